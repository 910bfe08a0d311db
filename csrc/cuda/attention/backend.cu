// Chooses the kernels for a call of attention.
#include "cuda/attention/attention.h"
#include "cuda/backend.h"

namespace onepass::cuda {
namespace {

// The 16-bit tile kernels where they fit; otherwise the plain kernels.
template <class Args>
bool takes_tiles(const Args& args) {
  return is_tiled(args);
}

}  // namespace

Operator<AttentionForward> attention_forward() {
  return either_of<AttentionForward, takes_tiles, tiled_attention_forward,
                   plain_attention_forward>();
}

Operator<AttentionBackward> attention_backward() {
  return either_of<AttentionBackward, takes_tiles, tiled_attention_backward,
                   plain_attention_backward>();
}

}  // namespace onepass::cuda
