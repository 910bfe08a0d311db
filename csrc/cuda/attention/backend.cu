// Which kernels a call of attention takes.
#include "cuda/attention/attention.h"
#include "cuda/backend.h"

namespace onepass::cuda {
namespace {

// Tiles of 16-bit rows where they fit; all else is the plain kernels.
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
