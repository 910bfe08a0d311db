// The optimizer family: schema, checks, the flat list of work.
#include "ops/optimizer.h"

#include <cmath>
#include <vector>

#include "core/visit.h"
#include "ops/library.h"
#include "ops/optimizer_table.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// A flat list of tensors, with the memory that holds it.
class CheckedTensors {
 public:
  CheckedTensors(const char* op, const char* name, const TensorList& tensors) {
    tensors_.reserve(tensors.size());
    first_piece_.reserve(tensors.size() + 1);
    int64_t pieces = 0;
    // Checks all tensors: torch chose the kernel by the first, and has none for an empty list.
    device_ = info_of(tensors[0]).device;
    for (const AtenTensorHandle tensor : tensors) {
      const FlatInfo info = flat_input_of(op, name, tensor, device_);
      const DType dtype = require_dtype(op, name, info.scalar_type);
      wide_ = wide_ || dtype == DType::kFloat64;
      mixed_ = mixed_ || (!tensors_.empty() && dtype != tensors_.front().dtype);
      tensors_.push_back({mutable_data_of(tensor), info.numel, dtype});
      first_piece_.push_back(pieces);
      pieces += pieces_of(info.numel);
    }
    first_piece_.push_back(pieces);
  }

  FlatTensors flat() const { return flat_list(tensors_, first_piece_); }
  void require_apart(const char* op, const char* name) const {
    onepass::require_apart(op, name, tensors_, [](const FlatTensor& tensor) { return tensor; });
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

// Starts the computation of the norm of all gradients together: float64 on their device. On CUDA it
// is also written to `total`, if that is not null.
Tensor norm_of(const char* op, const CheckedTensors& gradients, double norm_type,
               void* total = nullptr, DType total_dtype = DType::kFloat32) {
  require(norm_type == 1.0 || norm_type == 2.0 || norm_type == INFINITY, op,
          ": norm_type must be 1, 2 or inf, got ", norm_type);
  Tensor norm = empty(Shape(nullptr, 0), DType::kFloat64, gradients.device());
  GradientNorm args{};
  args.gradients = gradients.flat();
  args.order = norm_type;
  args.wide = gradients.wide();
  args.norm = static_cast<double*>(norm.mutable_data_ptr());
  args.total = total;
  args.total_dtype = total_dtype;
  run_operator(backend().gradient_norm, args, gradients.device(),
               [&] { return described(op, gradients.text()); });
  return norm;
}

Tensor gradient_norm(StableListHandle list, double norm_type) {
  constexpr const char* op = "gradient_norm";
  const TensorList gradients(list);
  return norm_of(op, CheckedTensors(op, "gradients", gradients), norm_type);
}

constexpr const char* kClip = "clip_grad_norm_";

#ifndef ONEPASS_CUDA

void write(void* target, DType dtype, double value) {
  if (dtype == DType::kFloat64) {
    *static_cast<double*>(target) = value;
  } else {
    visit_dtype_up_to_float32(
        dtype, [&]<class T>() { *static_cast<T*>(target) = narrow<T>(static_cast<float>(value)); });
  }
}

// The norm of all gradients together; then they are scaled to max_norm, if it is larger.
Tensor clip_grad_norm(StableListHandle list, double max_norm, double norm_type,
                      bool error_if_nonfinite) {
  const TensorList gradients(list);
  const CheckedTensors checked(kClip, "gradients", gradients);
  const DType dtype = checked.common_dtype();
  Tensor rounded =
      empty(Shape(nullptr, 0), dtype, checked.device());  // may fail: before the scaling
  const Tensor total = norm_of(kClip, checked, norm_type);
  const double norm = *static_cast<const double*>(total.const_data_ptr());
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
    checked.require_apart(kClip, "gradients");  // they may share memory where they are only read
    ScaleGradients args{};
    args.gradients = checked.flat();
    args.factor = factor;
    run_operator(backend().scale_gradients, args, checked.device(),
                 [&] { return described(kClip, checked.text()); });
  }
  write(rounded.mutable_data_ptr(), dtype, norm);
  return rounded;
}

#else  // CUDA: the host waits for nothing

// Python checks error_if_nonfinite, because that has to wait for the norm.
Tensor clip_grad_norm(StableListHandle list, double max_norm, double norm_type, bool) {
  const TensorList gradients(list);
  const CheckedTensors checked(kClip, "gradients", gradients);
  checked.require_apart(kClip, "gradients");
  const DType dtype = checked.common_dtype();
  Tensor rounded = empty(Shape(nullptr, 0), dtype, checked.device());
  const Tensor norm = norm_of(kClip, checked, norm_type, rounded.mutable_data_ptr(), dtype);
  ScaleGradients scale{};
  scale.gradients = checked.flat();
  scale.norm = static_cast<const double*>(norm.const_data_ptr());
  scale.max_norm = max_norm;
  run_operator(backend().scale_gradients, scale, checked.device(),
               [&] { return described(kClip, checked.text()); });
  return rounded;
}

#endif

// A step of all parameters of a table. The gradients are divided by grad_scale and scaled to
// max_norm as they are read. If `norm` is not finite or `found_inf` is not zero, nothing changes,
// except that gradients are zeroed if the call wants that. Returns false if the table is stale;
// then nothing was done. With checks_only nothing is done either way.
bool optimizer_step(const StepOptions& options, int64_t algorithm, int64_t table,
                    StableListHandle list, const Tensor& hyper) {
  constexpr const char* op = "optimizer_step";
  const TensorList gradients(list);
  require(algorithm >= 0 && algorithm < kAlgorithms, op, ": algorithm must be from 0 to ",
          kAlgorithms - 1, ", got ", algorithm);
  CheckedStep checked(op, static_cast<Algorithm>(algorithm), table, gradients, hyper, options);
  if (checked.is_stale()) return false;
  if (options.checks_only) return true;
  const OptimizerStep args = checked.args();
  run_operator(backend().optimizer_step, args, checked.device(),
               [&] { return described(op, checked.text()); });
  checked.count(args);
  return true;
}

}  // namespace

OperatorList optimizer_operators() {
  return {
      entry<&clip_grad_norm>("clip_grad_norm",
                             "Tensor(a!)[] gradients, float max_norm, float norm_type, "
                             "bool error_if_nonfinite",
                             "Tensor"),
      entry<&gradient_norm>("gradient_norm", "Tensor[] gradients, float norm_type=2.0", "Tensor"),
      entry<&optimizer_table>("optimizer_table",
                              "Tensor(a!)[] params, Tensor(b!)[] states, Tensor layout", "SymInt"),
      entry<&optimizer_table_release>("optimizer_table_release", "Tensor state, SymInt table",
                                      "()"),
      entry<&optimizer_step>("optimizer_step",
                             "SymInt algorithm, SymInt table, Tensor(a!)[] gradients, "
                             "Tensor hyper, *" ONEPASS_SCHEMA(ONEPASS_STEP_OPTIONS),
                             "bool"),
  };
}

}  // namespace onepass
