// The optimizer family: schema, checks, the flat list of work.
#include "ops/optimizer.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <vector>

#include "ops/check.h"
#include "ops/runtime.h"

#ifndef ONEPASS_CUDA

namespace onepass {
namespace {

// The flat list, and what it lies in.
class CheckedTensors {
 public:
  CheckedTensors(const char* op, const char* name, const std::vector<Tensor>& tensors) {
    tensors_.reserve(tensors.size());
    first_piece_.reserve(tensors.size() + 1);
    int64_t pieces = 0;
    device_ = info_of(tensors.front()).device;  // of all: torch chose the kernel by it
    for (const Tensor& tensor : tensors) {
      const FlatInfo info = flat_info_of(tensor);
      if (!info.contiguous) require_dense(op, name, info_of(tensor));
      const DType dtype = require_dtype(op, name, info.scalar_type);
      wide_ = wide_ || dtype == DType::kFloat64;
      mixed_ = mixed_ || (!tensors_.empty() && dtype != tensors_.front().dtype);
      tensors_.push_back({tensor.mutable_data_ptr(), info.numel, dtype});
      first_piece_.push_back(pieces);
      pieces += (tensors_.back().numel + kPieceElements - 1) / kPieceElements;
    }
    first_piece_.push_back(pieces);
  }

  FlatTensors flat() const {
    return {tensors_.data(), first_piece_.data(), static_cast<int64_t>(tensors_.size())};
  }
  const Device& device() const { return device_; }
  // Of torch.stack of one number per tensor: their common dtype, or the one they all fit into.
  DType common_dtype() const {
    return wide_ ? DType::kFloat64 : mixed_ ? DType::kFloat32 : tensors_.front().dtype;
  }
  std::string text() const {
    int64_t numel = 0;
    for (const FlatTensor& tensor : tensors_) numel += tensor.numel;
    return std::to_string(tensors_.size()) + " tensors, " + std::to_string(numel) + " elements";
  }

 private:
  // Neither gaps nor overlaps, whatever the order of the dimensions.
  static void require_dense(const char* op, const char* name, const TensorInfo& info) {
    int64_t longer = 0;
    for (int64_t d = 0; d < info.dims; ++d) longer += info.sizes[d] > 1;
    // From the innermost dimension outwards: each one's stride is what lies within it.
    for (int64_t within = 1; longer > 0; --longer) {
      int64_t d = 0;
      while (d < info.dims && (info.sizes[d] == 1 || info.strides[d] != within)) ++d;
      require(d < info.dims, op, ": ", name,
              " must have no gaps between their elements, got shape ", shape_of(info),
              " with strides ", Shape{info.strides, info.dims});
      within *= info.sizes[d];
    }
  }

  std::vector<FlatTensor> tensors_;
  std::vector<int64_t> first_piece_;
  Device device_{};
  bool wide_ = false;
  bool mixed_ = false;
};

void write(void* target, DType dtype, double value) {
  const float rounded = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64:
      *static_cast<double*>(target) = value;
      break;
    case DType::kFloat32:
      *static_cast<float*>(target) = rounded;
      break;
    case DType::kBFloat16:
      *static_cast<BFloat16*>(target) = narrow_to_bfloat16(rounded);
      break;
    case DType::kFloat16:
      *static_cast<Float16*>(target) = narrow_to_float16(rounded);
  }
}

// The norm of all gradients together; then they are scaled to max_norm, if it is larger.
Tensor clip_grad_norm(const std::vector<Tensor>& gradients, double max_norm, double norm_type,
                      bool error_if_nonfinite) {
  constexpr const char* op = "clip_grad_norm_";
  require(norm_type == 1.0 || norm_type == 2.0 || norm_type == INFINITY, op,
          ": norm_type must be 1, 2 or inf, got ", norm_type);
  const CheckedTensors checked(op, "gradients", gradients);
  const auto describe = [&]() -> Dispatch { return {.op = op, .arguments = checked.text()}; };
  double norm = 0.0;
  run_operator(backend().optimizer.norm,
               {checked.flat(), norm_type, checked.common_dtype() == DType::kFloat64, &norm},
               checked.device(), describe);
  if (error_if_nonfinite && !std::isfinite(norm)) {
    // torch's own words.
    std::ostringstream text;
    text << "The total norm of order " << norm_type << (norm_type == INFINITY ? "" : ".0")
         << " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`";
    throw std::runtime_error(text.str());
  }
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1.0)) {
    run_operator(backend().optimizer.scale, {checked.flat(), factor}, checked.device(), describe);
  }
  const DType dtype = checked.common_dtype();
  Tensor total = empty(nullptr, 0, dtype, checked.device());
  write(total.mutable_data_ptr(), dtype, norm);
  return total;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def(
      "clip_grad_norm(Tensor(a!)[] gradients, float max_norm, float norm_type, bool "
      "error_if_nonfinite) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { m.impl("clip_grad_norm", TORCH_BOX(&clip_grad_norm)); }

}  // namespace onepass

#endif  // ONEPASS_CUDA
