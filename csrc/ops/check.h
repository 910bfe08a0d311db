// The error grammar: `<op>: <argument> must <rule>, got <value>`, thrown as std::runtime_error
// before anything is written and outside any parallel region, so that the message reaches Python
// unchanged.
#pragma once

#include <cmath>
#include <optional>
#include <stdexcept>

#include "ops/fields.h"
#include "ops/text.h"

namespace onepass {

// require(condition, op, ": ", argument, " must ...", ", got ", value). The parts are evaluated at
// every call and printed only if it fails: pass values that are cheap to make.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw std::runtime_error(text_of(parts...));
  }
}

template <class Info>
void require_memory(const char* op, const char* name, AtenTensorHandle tensor, const Info& info) {
  const StorageBytes bytes = storage_bytes_of(tensor, info);
  require(bytes.needed <= bytes.held, op, ": ", name,
          " must have memory for all its elements, which end at byte ", bytes.needed,
          " of its storage, got one of ", bytes.held, " bytes");
}

// The checks of a tensor argument: each one passes through here, or through flat_input_of().
inline TensorInfo input_of(const char* op, const char* name, AtenTensorHandle tensor) {
  set_operator(op);
  // torch passes `None` as an undefined tensor.
  require(is_defined(tensor), op, ": ", name, " must be given, got none");
  const TensorInfo info = info_of(tensor);
  require_memory(op, name, tensor, info);
  return info;
}
inline TensorInfo input_of(const char* op, const char* name, const Tensor& tensor) {
  return input_of(op, name, tensor.get());
}

// For sizes whose product no single tensor's number of elements bounds: those of expanded or empty
// tensors, or of several tensors.
inline int64_t product(const char* op, const char* name, int64_t a, int64_t b) {
  int64_t result;
  require(!__builtin_mul_overflow(a, b, &result), op, ": ", name,
          " must have sizes whose product int64 holds, got ", a, " and ", b);
  return result;
}

// The product of the first `dims` sizes.
inline int64_t product(const char* op, const char* name, const TensorInfo& info, int64_t dims) {
  int64_t result = 1;
  for (int64_t d = 0; d < dims; ++d) result = product(op, name, result, info.sizes[d]);
  return result;
}

inline DType require_dtype(const char* op, const char* name, int32_t scalar_type) {
  const std::optional<DType> dtype = dtype_of(scalar_type);
  require(dtype.has_value(), op, ": ", name,
          " must have dtype float32, bfloat16, float16 or float64, got ", TypeName{scalar_type});
  return *dtype;
}

inline void require_probability(const char* op, const char* name, double p) {
  require(p >= 0.0 && p <= 1.0, op, ": ", name, " must lie between 0 and 1, got ", p);
}

// A choice, by its number.
inline void require_choice(const char* op, const char* name, int64_t number, int64_t least,
                           int64_t most) {
  require(number >= least && number <= most, op, ": ", name, " must be one of ", least, " to ",
          most, ", got ", number);
}

inline void require_softcap(const char* op, double softcap) {
  const float rounded = static_cast<float>(softcap);  // as kernels take it
  require(softcap == 0.0 || (rounded > 0.0f && std::isfinite(rounded)), op,
          ": softcap must be 0 or a positive number that float32 holds, got ", softcap);
}

// The rules that tie the tensors of a call to its first one.
class CheckedAgainst {
 public:
  CheckedAgainst(const char* op, const char* first_name, const TensorInfo& first)
      : op_(op),
        first_name_(first_name),
        first_(first),
        first_dtype_(require_dtype(op, first_name, first.scalar_type)) {}

  DType first_dtype() const { return first_dtype_; }
  DType accumulator() const { return accumulator_of(first_dtype_); }

  // float64 is computed in float64 throughout, so it does not mix with the other dtypes.
  DType dtype(const char* name, int32_t scalar_type) const {
    const DType dtype = require_dtype(op_, name, scalar_type);
    const bool wide = first_dtype_ == DType::kFloat64;
    require((dtype == DType::kFloat64) == wide, op_, ": ", name, " must have dtype ",
            wide ? "float64 like " : "float32, bfloat16 or float16 beside ", first_name_, ", got ",
            dtype);
    return dtype;
  }
  DType dtype(const char* name, const OptionalScalarType& given, DType otherwise) const {
    return given ? dtype(name, static_cast<int32_t>(*given)) : otherwise;
  }

  void shape(const char* name, const TensorInfo& info, const Shape& shape) const {
    require(Shape(info) == shape, op_, ": ", name, " must have shape ", shape, ", got ", info);
    device(name, info);
  }

  // A tensor of this shape; its dtype.
  DType tensor(const char* name, const TensorInfo& info, const Shape& shape) const {
    this->shape(name, info, shape);
    return dtype(name, info.scalar_type);
  }
  DType tensor(const char* name, const Tensor& given, const Shape& shape) const {
    return tensor(name, input_of(op_, name, given), shape);
  }
  DType tensor(const char* name, const OptionalTensor& given, const Shape& shape,
               DType otherwise = {}) const {
    return given ? tensor(name, *given, shape) : otherwise;
  }

  // A tensor of this shape and dtype, which is that of the tensor named `like`.
  template <class Given>  // as tensor() takes it
  void tensor_of(const char* name, const Given& given, const Shape& shape, DType wanted,
                 const char* like = nullptr) const {
    const DType found = tensor(name, given, shape);
    require(found == wanted, op_, ": ", name, " must have dtype ", wanted,
            when(like, " like ", like ? like : ""), ", got ", found);
  }

  void device(const char* name, const TensorInfo& info) const {
    require(info.device == first_.device, op_, ": ", name, " must be on the device of ",
            first_name_, ", ", first_.device, ", got ", info.device);
  }

  void seed(const char* name, const Tensor& seed) const {
    const TensorInfo info = input_of(op_, name, seed);
    require(info.dims == 1 && info.sizes[0] == 2 && info.strides[0] == 1 &&
                is(ScalarType::Long, info.scalar_type) && info.device == first_.device,
            op_, ": ", name, " must be a dense int64 tensor of shape (2,) on ", first_.device,
            ", got ", info, " of ", TypeName{info.scalar_type}, " on ", info.device);
  }

  // A factor for each index of the first dimension, if there is one before the rows' own.
  void row_scale(const OptionalTensor& given, int64_t leading) const {
    if (!given) return;
    tensor_of("row_scale", *given, Shape(first_.sizes, leading > 0 ? 1 : 0), accumulator());
  }

  void dropout(const char* name, double p, const OptionalTensor& given) const {
    require_probability(op_, name, p);
    require((p > 0.0) == given.has_value(), op_, ": seed must be given with ", name,
            " > 0 only, got ", given ? "one" : "none");
    if (given) seed("seed", *given);
  }

 private:
  const char* op_;
  const char* first_name_;
  const TensorInfo& first_;
  DType first_dtype_;
};

// The arguments of a call as far as its checks know them, and its first tensor.
template <class Args>
struct Checked {
  TensorInfo first;
  Args args{};
};

// For tensors in a list: torch chose the kernel by one of them, so another may be on another
// device. On the CPU torch would have chosen another kernel for such a list.
inline void require_device([[maybe_unused]] const char* op, [[maybe_unused]] const char* name,
                           [[maybe_unused]] AtenTensorHandle tensor,
                           [[maybe_unused]] const Device& device) {
#ifdef ONEPASS_CUDA
  const Device here = info_of(tensor).device;
  require(here == device, op, ": ", name, " must be on one device, ", device, ", got ", here);
#endif
}

}  // namespace onepass
