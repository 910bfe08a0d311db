// The arithmetic ceilings of one thread of this CPU level, measured: kernels are compared with
// them. Memory ceilings are measured from Python, with torch's own copy.
#pragma once

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// GFLOP/s (a fused multiply-add counts two) in float32, measured for about `seconds`.
double fma_ceiling(double seconds);

// GFLOP/s of bfloat16 dot products into float32; 0 where the level has no such instruction.
double bf16_dot_ceiling(double seconds);

// Billions of operations per second of dot products of bytes into 32 bits, for a CPU that has the
// instruction (multiply_add_bytes); 0 at levels that never use it.
double int8_dot_ceiling(double seconds);

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
