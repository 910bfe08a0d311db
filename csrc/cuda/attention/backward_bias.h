// The gradient of a bias, in launches of its own: see backward_bias.cu.
#pragma once

#include "cuda/attention/backward_ends.cuh"

namespace onepass::cuda {

// Of the workspace, a multiple of 16.
int64_t dbias_bytes(const AttentionBackward& args);

// dbias, which is wanted; after begin_backward().
void launch_dbias(const AttentionBackward& args, const BackwardEnds& ends, void* workspace,
                  void* stream);

}  // namespace onepass::cuda
