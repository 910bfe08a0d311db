// The gradient of a bias, which has its own launches: see backward_bias.cu.
#pragma once

#include "cuda/attention/backward_ends.cuh"

namespace onepass::cuda {

// Bytes of workspace that dbias needs; a multiple of 16.
int64_t dbias_bytes(const AttentionBackward& args);

// Computes dbias, which the call must want; launched after begin_backward().
void launch_dbias(const AttentionBackward& args, const BackwardEnds& ends, void* workspace,
                  void* stream);

}  // namespace onepass::cuda
