// One table per back end and CPU level: what ops/ calls and what `explain` plans with.
#pragma once

#include "ops/attention.h"
#include "ops/attention_decode.h"
#include "ops/dropout.h"
#include "ops/norm.h"
#include "ops/optimizer.h"

namespace onepass {

struct Backend {
  const char* name;  // the CPU level, or the CUDA architecture
  NormBackend norm;
  DropoutBackend dropout;
  OptimizerBackend optimizer;
  AttentionBackend attention;
  Operator<AttentionDecode> attention_decode;
  // Measured GFLOP/s of one thread, null on CUDA; 0 where the level has no such instruction.
  double (*fma_ceiling)(double seconds);
  double (*bf16_dot_ceiling)(double seconds);
};

}  // namespace onepass
