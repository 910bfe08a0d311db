// Every family and every operator, listed once. A back end has a function of its name for each
// operator, which gives its plan and its run; ops/ calls through a table of them per back end and
// CPU level.
#pragma once

#include "ops/attention.h"
#include "ops/attention_decode.h"
#include "ops/causal_conv.h"
#include "ops/delta_rule.h"
#include "ops/dropout.h"
#include "ops/gate.h"
#include "ops/group_norm.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/mamba_chunk_scan.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/quantized_linear.h"
#include "ops/rotary.h"
#include "ops/selective_scan.h"

// FAMILY(its name): ops/<name>.h and ops/<name>.cpp
#define ONEPASS_FAMILIES(FAMILY) \
  FAMILY(norm)                   \
  FAMILY(dropout)                \
  FAMILY(gate)                   \
  FAMILY(group_norm)             \
  FAMILY(loss)                   \
  FAMILY(optimizer)              \
  FAMILY(attention)              \
  FAMILY(attention_decode)       \
  FAMILY(linear)                 \
  FAMILY(quantized_linear)       \
  FAMILY(causal_conv)            \
  FAMILY(selective_scan)         \
  FAMILY(mamba_chunk_scan)       \
  FAMILY(delta_rule)             \
  FAMILY(rotary)

namespace onepass {

// OPERATOR(its name, its arguments)
#define ONEPASS_OPERATORS(OPERATOR)                        \
  OPERATOR(norm_forward, NormForward)                      \
  OPERATOR(norm_backward, NormBackward)                    \
  OPERATOR(modulated_norm_forward, ModulatedNormForward)   \
  OPERATOR(modulated_norm_backward, ModulatedNormBackward) \
  OPERATOR(dropout_forward, DropoutForward)                \
  OPERATOR(branch_forward, BranchForward)                  \
  OPERATOR(branch_backward, BranchBackward)                \
  OPERATOR(gate_forward, GateForward)                      \
  OPERATOR(gate_backward, GateBackward)                    \
  OPERATOR(group_norm_forward, GroupNormForward)           \
  OPERATOR(group_norm_backward, GroupNormBackward)         \
  OPERATOR(loss_forward, LossForward)                      \
  OPERATOR(loss_backward, LossBackward)                    \
  OPERATOR(gradient_norm, GradientNorm)                    \
  OPERATOR(scale_gradients, ScaleGradients)                \
  OPERATOR(optimizer_step, OptimizerStep)                  \
  OPERATOR(attention_forward, AttentionForward)            \
  OPERATOR(attention_backward, AttentionBackward)          \
  OPERATOR(attention_decode, AttentionDecode)              \
  OPERATOR(rotary_forward, RotaryForward)                  \
  OPERATOR(rotary_backward, RotaryBackward)
// The operators for which CUDA uses torch.
#define ONEPASS_CPU_OPERATORS(OPERATOR)                       \
  OPERATOR(linear_product, LinearProduct)                     \
  OPERATOR(epilogue_backward, EpilogueBackward)               \
  OPERATOR(causal_conv_forward, CausalConvForward)            \
  OPERATOR(causal_conv_backward, CausalConvBackward)          \
  OPERATOR(causal_conv_update, CausalConvUpdate)              \
  OPERATOR(selective_scan_forward, SelectiveScanForward)      \
  OPERATOR(selective_scan_backward, SelectiveScanBackward)    \
  OPERATOR(selective_state_update, SelectiveStateUpdate)      \
  OPERATOR(mamba_chunk_scan_forward, MambaChunkScanForward)   \
  OPERATOR(mamba_chunk_scan_backward, MambaChunkScanBackward) \
  OPERATOR(delta_rule_forward, DeltaRuleForward)              \
  OPERATOR(delta_rule_backward, DeltaRuleBackward)            \
  OPERATOR(delta_rule_update, DeltaRuleUpdate)

#define ONEPASS_DECLARE_OPERATOR(name, Args) Operator<Args> name();
#define ONEPASS_OPERATOR_MEMBER(name, Args) Operator<Args> name{};

struct Backend {
  const char* name;  // the CPU level, or the CUDA architecture
  // Measured billions of operations per second of one thread, null on CUDA; 0 where the level has
  // no such instruction.
  double (*fma_ceiling)(double seconds);
  double (*bf16_dot_ceiling)(double seconds);
  double (*int8_dot_ceiling)(double seconds);
  ONEPASS_OPERATORS(ONEPASS_OPERATOR_MEMBER)
  ONEPASS_CPU_OPERATORS(ONEPASS_OPERATOR_MEMBER)
};

}  // namespace onepass
