// The optimizer family: schema, checks, the flat list of work.
#include "ops/optimizer.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <vector>

#include "ops/check.h"
#include "ops/optimizer_table.h"
#include "ops/runtime.h"

#ifndef ONEPASS_CUDA

namespace onepass {
namespace {

// A flat list, and what it lies in.
class CheckedTensors {
 public:
  CheckedTensors(const char* op, const char* name, const std::vector<Tensor>& tensors) {
    tensors_.reserve(tensors.size());
    first_piece_.reserve(tensors.size() + 1);
    int64_t pieces = 0;
    device_ = info_of(tensors.front())
                  .device;  // of all: torch chose the kernel by it, and has none for an empty list
    for (const Tensor& tensor : tensors) {
      const FlatInfo info = flat_info_of(tensor);
      if (!info.contiguous) require_dense(op, name, info_of(tensor));
      const DType dtype = require_dtype(op, name, info.scalar_type);
      wide_ = wide_ || dtype == DType::kFloat64;
      mixed_ = mixed_ || (!tensors_.empty() && dtype != tensors_.front().dtype);
      tensors_.push_back({tensor.mutable_data_ptr(), info.numel, dtype});
      first_piece_.push_back(pieces);
      pieces += pieces_of(info.numel);
    }
    first_piece_.push_back(pieces);
  }

  FlatTensors flat() const {
    return {tensors_.data(), first_piece_.data(), static_cast<int64_t>(tensors_.size())};
  }
  const Device& device() const { return device_; }
  bool wide() const { return wide_; }
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

double read_scalar(const char* op, const char* name, const Tensor& tensor) {
  const FlatInfo info = flat_info_of(tensor);
  require(info.numel == 1, op, ": ", name, " must have one element, got ", info.numel);
  const void* const data = tensor.const_data_ptr();
  switch (require_dtype(op, name, info.scalar_type)) {
    case DType::kFloat64:
      return *static_cast<const double*>(data);
    case DType::kFloat32:
      return *static_cast<const float*>(data);
    case DType::kBFloat16:
      return widen(*static_cast<const BFloat16*>(data));
    default:
      return widen(*static_cast<const Float16*>(data));
  }
}

double norm_of(const char* op, const CheckedTensors& gradients, double norm_type) {
  require(norm_type == 1.0 || norm_type == 2.0 || norm_type == INFINITY, op,
          ": norm_type must be 1, 2 or inf, got ", norm_type);
  double norm = 0.0;
  run_operator(backend().optimizer.norm, {gradients.flat(), norm_type, gradients.wide(), &norm},
               gradients.device(),
               [&]() -> Dispatch { return {.op = op, .arguments = gradients.text()}; });
  return norm;
}

Tensor gradient_norm(const std::vector<Tensor>& gradients, double norm_type) {
  constexpr const char* op = "gradient_norm";
  const CheckedTensors checked(op, "gradients", gradients);
  Tensor total = empty(nullptr, 0, DType::kFloat64, checked.device());
  write(total.mutable_data_ptr(), DType::kFloat64, norm_of(op, checked, norm_type));
  return total;
}

// The norm of all gradients together; then they are scaled to max_norm, if it is larger.
Tensor clip_grad_norm(const std::vector<Tensor>& gradients, double max_norm, double norm_type,
                      bool error_if_nonfinite) {
  constexpr const char* op = "clip_grad_norm_";
  const CheckedTensors checked(op, "gradients", gradients);
  const double norm = norm_of(op, checked, norm_type);
  if (error_if_nonfinite && !std::isfinite(norm)) {
    // torch's own words.
    std::ostringstream text;
    text << "The total norm of order " << norm_type << (norm_type == INFINITY ? "" : ".0")
         << " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`";
    throw std::runtime_error(text.str());
  }
  const double factor = clip_factor(max_norm, norm);
  if (factor != 1.0) {
    run_operator(backend().optimizer.scale, {checked.flat(), factor}, checked.device(),
                 [&]() -> Dispatch { return {.op = op, .arguments = checked.text()}; });
  }
  const DType dtype = checked.common_dtype();
  Tensor total = empty(nullptr, 0, dtype, checked.device());
  write(total.mutable_data_ptr(), dtype, norm);
  return total;
}

// A step of all parameters of a table, unless `norm` is not finite or `found_inf` is not zero; then
// nothing changes. The gradients are divided by grad_scale and scaled to max_norm on their way.
void optimizer_step(int64_t algorithm, int64_t table, const std::vector<Tensor>& gradients,
                    const Tensor& hyper, int64_t seed, bool stochastic_params,
                    bool stochastic_moments, bool zero_gradients, std::optional<double> max_norm,
                    const std::optional<Tensor>& norm, const std::optional<Tensor>& grad_scale,
                    const std::optional<Tensor>& found_inf) {
  constexpr const char* op = "optimizer_step";
  require(algorithm >= 0 && algorithm <= static_cast<int64_t>(Algorithm::kLion), op,
          ": algorithm must be 0 (Adam), 1 (SGD) or 2 (Lion), got ", algorithm);
  CheckedStep checked(op, static_cast<Algorithm>(algorithm), table, gradients, hyper,
                      {stochastic_params, stochastic_moments}, zero_gradients);
  double factor = grad_scale ? 1.0 / read_scalar(op, "grad_scale", *grad_scale) : 1.0;
  if (found_inf && read_scalar(op, "found_inf", *found_inf) != 0.0) return;
  if (norm) {
    const double unscaled = read_scalar(op, "norm", *norm) * factor;
    if (!std::isfinite(unscaled)) return;
    if (max_norm) factor *= clip_factor(*max_norm, unscaled);
  }
  run_operator(backend().optimizer.step, checked.args(factor, seed), checked.device(),
               [&]() -> Dispatch { return {.op = op, .arguments = checked.text()}; });
  checked.count_the_step();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def(
      "clip_grad_norm(Tensor(a!)[] gradients, float max_norm, float norm_type, bool "
      "error_if_nonfinite) -> Tensor");
  m.def("gradient_norm(Tensor[] gradients, float norm_type=2.0) -> Tensor");
  m.def("optimizer_table(Tensor(a!)[] params, Tensor(b!)[] states, Tensor layout) -> SymInt");
  m.def("optimizer_table_release(SymInt table) -> ()");
  m.def(
      "optimizer_step(SymInt algorithm, SymInt table, Tensor(a!)[] gradients, Tensor hyper, *, "
      "SymInt seed=0, bool stochastic_params=False, bool stochastic_moments=False, bool "
      "zero_gradients=False, float? max_norm=None, Tensor? norm=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) {
  m.impl("clip_grad_norm", TORCH_BOX(&clip_grad_norm));
  m.impl("gradient_norm", TORCH_BOX(&gradient_norm));
  m.impl("optimizer_table", TORCH_BOX(&optimizer_table));
  m.impl("optimizer_step", TORCH_BOX(&optimizer_step));
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, m) {
  m.impl("optimizer_table_release", TORCH_BOX(&optimizer_table_release));
}

}  // namespace onepass

#endif  // ONEPASS_CUDA
