// Shared by the operators of the norm family, before the back end: options, checks, allocation.
#pragma once

#include <tuple>

#include "ops/library.h"
#include "ops/norm_tensors.h"
#include "ops/runtime.h"

namespace onepass {

// The arguments of norm_forward besides its input.
#define ONEPASS_NORM_OPTIONS(FIELD)             \
  FIELD(OptionalTensor, residual, "")           \
  FIELD(OptionalTensor, weight, "")             \
  FIELD(OptionalTensor, bias, "")               \
  FIELD(OptionalTensor, seed, "")               \
  FIELD(Sizes, normalized_shape, "")            \
  FIELD(StaticInt, kind, "") /* NormKind */     \
  FIELD(double, eps, "")                        \
  FIELD(double, weight_offset, "")              \
  FIELD(double, dropout_p, "")                  \
  FIELD(OptionalScalarType, out_dtype, "")      \
  FIELD(OptionalScalarType, residual_dtype, "") \
  FIELD(bool, save_statistics, "")

// The arguments of norm_backward besides doutput.
#define ONEPASS_NORM_BACKWARD_OPTIONS(FIELD)    \
  FIELD(OptionalTensor, dresidual_out, "")      \
  FIELD(Tensor, x, "")                          \
  FIELD(OptionalTensor, weight, "")             \
  FIELD(OptionalTensor, bias, "")               \
  FIELD(OptionalTensor, seed, "")               \
  FIELD(Tensor, mean, "")                       \
  FIELD(Tensor, rstd, "")                       \
  FIELD(Sizes, normalized_shape, "")            \
  FIELD(StaticInt, kind, "") /* NormKind */     \
  FIELD(double, weight_offset, "")              \
  FIELD(double, dropout_p, "")                  \
  FIELD(OptionalScalarType, input_dtype, "")    \
  FIELD(OptionalScalarType, residual_dtype, "") \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(NormOptions, ONEPASS_NORM_OPTIONS);
ONEPASS_DEFINE_OPTIONS(NormBackwardOptions, ONEPASS_NORM_BACKWARD_OPTIONS);

// Bits of grad_mask; weight and bias are scale and shift too.
inline constexpr int64_t kWantInput = 1;
inline constexpr int64_t kWantResidual = 2;
inline constexpr int64_t kWantWeight = 4;
inline constexpr int64_t kWantBias = 8;
inline constexpr int64_t kWantGate = 16;

enum class NormForm { kPlain, kAdd, kModulated };

const char* op_name(NormKind kind, NormForm form);
const char* backward_name(NormKind kind, NormForm form);
NormKind norm_kind_of(int64_t number);

struct CheckedNorm {
  NormForward args{};
  RowTensor input;
  RowTensor residual;
  OptionalTensor weight{};
  OptionalTensor bias{};
  int64_t leading = 0;  // dimensions before normalized_shape
};

// Throws unless everything fits.
CheckedNorm check_forward(const char* op, const NormOptions& options, const Tensor& input);

using NormResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Allocates the results of a forward, and points its arguments to them and to its rows.
NormResults allocate(CheckedNorm& call, const NormOptions& options);

struct CheckedNormBackward {
  NormBackward args{};
  RowTensor x;
  RowTensor dresidual_out;
  int64_t leading = 0;  // dimensions before normalized_shape
};

CheckedNormBackward check_backward(const char* op, const NormBackwardOptions& options,
                                   const OptionalTensor& doutput);

// Allocates a gradient and points `target` to it; or one of size 0, and leaves `target` alone.
Tensor gradient_of(bool wanted, const int64_t* sizes, int64_t dims, DType dtype, Device device,
                   void*& target);

// The gradients of rows and the other tensors to which the arguments point.
struct NormBackwardRows {
  Tensor dinput;
  Tensor dresidual;
  RowTensor doutput;
  OptionalTensor mean;
  OptionalTensor rstd;
};

// `branch`: addressed as rows together with the call's tensors; may be no tensor.
NormBackwardRows allocate(CheckedNormBackward& call, const NormBackwardOptions& options,
                          const OptionalTensor& doutput, RowTensor& branch);

// For the log.
Dispatch describe(const NormForward& args);
Dispatch describe(const NormBackward& args);

OperatorList modulated_norm_operators();

}  // namespace onepass
