// The operands of a step: the table of an optimizer's parameters, and the gradients of one step.
#include "ops/optimizer_table.h"

#include <mutex>
#include <unordered_map>

#include "core/visit.h"

namespace onepass {
namespace {

constexpr const char* kTableOp = "optimizer_table";

using States = std::vector<StepTable::Kept>;

// Part of a tensor of states.
struct StateSlice {
  void* data = nullptr;
  int32_t scalar_type = 0;
};

// The states of one parameter at `place`, a pair of `layout`.
StateSlice slice(const States& states, const int64_t* place, int64_t numel) {
  if (place[0] < 0) return {};
  require(place[0] < static_cast<int64_t>(states.size()), kTableOp,
          ": layout must name one of the states, got ", place[0]);
  const FlatInfo& info = states[place[0]].info;
  require(place[1] >= 0 && numel <= info.numel && place[1] <= info.numel - numel, kTableOp,
          ": layout must lie within the states, got ", place[1], " of ", info.numel);
  return {states[place[0]].data + place[1] * element_size_of(info.scalar_type), info.scalar_type};
}

// Stochastic rounding concerns the step alone, not the table.
std::optional<MomentType> moment_type_of(const StateSlice& moment) {
  if (is(ScalarType::Byte, moment.scalar_type)) return MomentType::kInt8;
  const std::optional<DType> dtype = dtype_of(moment.scalar_type);
  if (!dtype) return std::nullopt;
  constexpr MomentType types[] = {MomentType::kFloat32, MomentType::kBFloat16, MomentType::kFloat16,
                                  MomentType::kFloat64};
  return types[static_cast<int>(*dtype)];
}

void add_moments(StepTensor& tensor, const States& states, const int64_t* row) {
  const bool wide = tensor.param_dtype == DType::kFloat64;
  tensor.moment_type = wide ? MomentType::kFloat64 : MomentType::kFloat32;
  for (int which = 0; which < kMoments; ++which) {
    const StateSlice moment = slice(states, row + kMomentColumn + 2 * which, tensor.numel);
    if (!moment.data) return;
    const std::optional<MomentType> type = moment_type_of(moment);
    require(type && (which == 0 || *type == tensor.moment_type) &&
                (*type == MomentType::kFloat64) == wide,
            kTableOp,
            ": states must hold moments of one dtype, float32, bfloat16, float16 or codes",
            " (float64 for float64 parameters), got ", TypeName{moment.scalar_type});
    tensor.moment_type = *type;
    tensor.moments[which] = moment.data;
    if (*type == MomentType::kInt8) {
      require(tensor.numel % kCodeBlock == 0, kTableOp,
              ": params with codes must have a multiple of ", kCodeBlock, " elements, got ",
              tensor.numel);
      const StateSlice scale =
          slice(states, row + kScaleColumn + 2 * which, tensor.numel / kCodeBlock);
      require(scale.data && dtype_of(scale.scalar_type) == DType::kFloat32, kTableOp,
              ": states must hold float32 scales beside codes, got none or another dtype");
      tensor.scales[which] = static_cast<float*>(scale.data);
    }
  }
}

void add_master(StepTensor& tensor, const States& states, const int64_t* row) {
  const StateSlice master = slice(states, row + kMasterColumn, tensor.numel);
  if (!master.data) return;
  const bool remainder = is(ScalarType::Short, master.scalar_type);
  require(remainder
              ? tensor.param_dtype == DType::kBFloat16
              : size_of(tensor.param_dtype) == 2 && dtype_of(master.scalar_type) == DType::kFloat32,
          kTableOp, ": states must hold masters in float32 for 16-bit parameters, or int16 ",
          "remainders for bfloat16 ones, got ", TypeName{master.scalar_type}, " for ",
          tensor.param_dtype);
  tensor.master = master.data;
  tensor.master_kind = remainder ? Master::kRemainder : Master::kFloat32;
}

void add_average(StepTensor& tensor, const States& states, const int64_t* row) {
  const StateSlice average = slice(states, row + kAverageColumn, tensor.numel);
  if (!average.data) return;
  const std::optional<DType> dtype = dtype_of(average.scalar_type);
  require(dtype && (dtype == tensor.param_dtype ||
                    (dtype == DType::kFloat32 && tensor.param_dtype != DType::kFloat64)),
          kTableOp, ": states must hold averages in the parameter's dtype, or in float32 unless ",
          "that is float64, got ", TypeName{average.scalar_type}, " for ", tensor.param_dtype);
  tensor.average = average.data;
  tensor.average_dtype = *dtype;
}

// Never destroyed: at the end of the process torch may be gone before its tensors here.
struct Tables {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<StepTable>> by_number;
#ifndef ONEPASS_CUDA
  int64_t next = 1;
#else
  int64_t next = int64_t{1} << 32;  // apart from those of the CPU's library
#endif
};
Tables& tables() {
  static Tables* const all = new Tables;
  return *all;
}

std::shared_ptr<StepTable> find_table(const char* op, int64_t number) {
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  require(found != all.by_number.end(), op, ": table must be one that was made and not released",
          ", got ", number);
  return found->second;
}

// Of a parameter and its gradient, which has as many elements.
bool are_in_one_order(const char* op, const TensorInfo& param, const TensorInfo& gradient) {
  bool same_shape = param.dims == gradient.dims, same_order = true;
  for (int64_t d = 0; same_shape && d < param.dims; ++d) {
    same_shape = param.sizes[d] == gradient.sizes[d];
    same_order = same_order && (param.sizes[d] == 1 || param.strides[d] == gradient.strides[d]);
  }
  require(same_shape, op, ": gradients must have their parameter's shape, ", param, ", got ",
          gradient);
  return same_order;
}

}  // namespace

StepTable::StepTable(const std::vector<Tensor>& params_, const std::vector<Tensor>& states_,
                     const Tensor& layout) {
  const int64_t count = static_cast<int64_t>(params_.size());
  const TensorInfo table = input_of(kTableOp, "layout", layout);
  require(is(ScalarType::Long, table.scalar_type) && table.dims == 2 && table.sizes[0] == count &&
              table.sizes[1] == kLayoutColumns && layout.is_contiguous(),
          kTableOp, ": layout must be a contiguous int64 tensor of shape (", count, ", ",
          static_cast<int64_t>(kLayoutColumns), "), got ", table, " of ",
          TypeName{table.scalar_type});
  const int64_t* row = static_cast<const int64_t*>(layout.const_data_ptr());
  if (count > 0) device = info_of(params_.front()).device;
  states.reserve(states_.size());
  for (const Tensor& state : states_) {
    const FlatInfo info = flat_input_of(kTableOp, "states", state.get(), device);
    states.push_back({state, info, 0, static_cast<char*>(state.mutable_data_ptr())});
  }
  params.reserve(count);
  tensors.reserve(count);
  first_piece.reserve(count + 1);
  int64_t pieces = 0;
  for (const Tensor& param : params_) {
    const FlatInfo info = flat_input_of(kTableOp, "params", param.get(), device);
    StepTensor tensor{};
    tensor.numel = info.numel;
    tensor.param_dtype = require_dtype(kTableOp, "params", info.scalar_type);
    tensor.index = static_cast<int32_t>(row[kIndexColumn]);
    tensor.group = static_cast<int32_t>(row[kGroupColumn]);
    require(tensor.group >= 0, kTableOp, ": layout must name a row of hyper, got ", tensor.group);
    const StateSlice step = slice(states, row + kStepColumn, 1);
    require(step.data && dtype_of(step.scalar_type) == DType::kFloat32, kTableOp,
            ": states must hold a float32 step per parameter, got none or another dtype");
    tensor.step = static_cast<float*>(step.data);
    add_moments(tensor, states, row);
    add_master(tensor, states, row);
    add_average(tensor, states, row);
    groups = std::max(groups, static_cast<int64_t>(tensor.group) + 1);
    numel += tensor.numel;
    params.push_back({param, info, layout_key_of(param), nullptr});
    tensors.push_back(tensor);
    first_piece.push_back(pieces);
    pieces += pieces_of(tensor.numel);
    row += kLayoutColumns;
  }
  first_piece.push_back(pieces);
}

int64_t optimizer_table(const std::vector<Tensor>& params, const std::vector<Tensor>& states,
                        const Tensor& layout) {
  auto table = std::make_shared<StepTable>(params, states, layout);
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_number.emplace(all.next, std::move(table));
  return all.next++;
}

void optimizer_table_release(const Tensor&, int64_t table) {
  Tables& all = tables();
  std::shared_ptr<StepTable> last;  // destroyed after the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(table);
  if (found == all.by_number.end()) return;
  last = std::move(found->second);
  all.by_number.erase(found);
}

CheckedStep::CheckedStep(const char* op, Algorithm algorithm, int64_t table,
                         const TensorList& gradients, const Tensor& hyper,
                         const StepOptions& options)
    : op_(op), algorithm_(algorithm), options_(options), table_(find_table(op, table)) {
  const TensorInfo info = input_of(op, "hyper", hyper);
  require(dtype_of(info.scalar_type) == DType::kFloat64 && info.dims == 2 &&
              info.sizes[0] >= table_->groups && info.sizes[1] == kHyperColumns &&
              hyper.is_contiguous(),
          op, ": hyper must be a contiguous float64 tensor of shape (", table_->groups, ", ",
          kHyperColumns, "), got ", info, " of ", TypeName{info.scalar_type});
  hyper_ = static_cast<const double*>(hyper.const_data_ptr());
  require(gradients.size() == table_->params.size(), op,
          ": gradients must be as many as the table's parameters, ", table_->params.size(),
          ", got ", gradients.size());
  states_stayed();
  for (size_t i = 0; i < gradients.size() && !is_stale_; ++i) {
    is_stale_ = !complete(table_->tensors[i], i, gradients[i]);
  }
  if (is_stale_) return;
  if (!table_->are_apart) {
    require_apart(op, "params", table_->tensors,
                  [](const StepTensor& t) { return FlatTensor{t.param, t.numel, t.param_dtype}; });
    table_->are_apart = true;
  }
  if (options.zero_gradients) {
    require_apart(op, "gradients set to zeros", table_->tensors, [](const StepTensor& t) {
      return FlatTensor{t.gradient, t.numel, t.gradient_dtype};
    });
  }
}

// The table keeps the addresses of states, and no step may write to addresses that are stale.
// Memory that was freed or resized has another address, so the address alone is compared for the
// hundreds of states of a step.
void CheckedStep::states_stayed() const {
  for (size_t i = 0; i < table_->states.size(); ++i) {
    const StepTable::Kept& state = table_->states[i];
    tell_of_tensor(state.tensor.get(), state.info);
    if (mutable_data_of(state.tensor.get()) == state.data) continue;
    require_memory(op_, "states", state.tensor.get(), state.info);
    require(false, op_, ": states must lie where they did in the table, got others in number ", i);
  }
}

// False: the parameter or its gradient does not lie as the table has it.
bool CheckedStep::complete(StepTensor& tensor, size_t number, AtenTensorHandle gradient) {
  const Tensor& param = table_->params[number].tensor;
  const FlatInfo& before = table_->params[number].info;
  if (layout_key_of(param) != table_->params[number].layout_key) return false;
  require_memory(op_, "params", param.get(), before);
  const FlatInfo info = flat_info_of(gradient);
  require_device(op_, "gradients", gradient, table_->device);
  require(info.numel == tensor.numel, op_, ": gradients must have their parameter's ", tensor.numel,
          " elements, got ", info.numel);
  if (!(before.contiguous && info.contiguous) &&
      !are_in_one_order(op_, info_of(param), info_of(gradient))) {
    return false;
  }
  require_memory(op_, "gradients", gradient, info);
  if (info.scalar_type != before.scalar_type) {
    tensor.gradient_dtype = require_dtype(op_, "gradients", info.scalar_type);
    require((tensor.param_dtype == DType::kFloat64) == (tensor.gradient_dtype == DType::kFloat64),
            op_, ": gradients must have dtype ",
            tensor.param_dtype == DType::kFloat64 ? "float64 like"
                                                  : "float32, bfloat16 or float16 beside",
            " their parameter, got ", tensor.gradient_dtype);
  } else {
    tensor.gradient_dtype = tensor.param_dtype;
  }
  void* const data = param.mutable_data_ptr();
  if (data != tensor.param) {
    if (tensor.param && tensor.master) return false;  // it may be another parameter's master
    table_->are_apart = false;  // unknown from here on, also if a later check fails
    tensor.param = data;
  }
  tensor.gradient = mutable_data_of(gradient);
#ifndef ONEPASS_CUDA
  tensor.scalars = scalars_of(tensor.group, *tensor.step);
#endif
  const Hyper hyper = hyper_of(hyper_ + tensor.group * kHyperColumns);
  const int wanted = moments_of(algorithm_, hyper.amsgrad != 0.0, hyper.momentum != 0.0);
  require(wanted == 0 || tensor.moments[wanted - 1], op_, ": states must hold ", wanted,
          " moments for these settings, got fewer");
  if (!tensor.master) {
    tensor.master_kind = options_.stochastic_params && size_of(tensor.param_dtype) == 2
                             ? Master::kStochastic
                             : Master::kNone;
  }
  if (tensor.moment_type == MomentType::kBFloat16 ||
      tensor.moment_type == MomentType::kBFloat16Stochastic) {
    tensor.moment_type =
        options_.stochastic_moments ? MomentType::kBFloat16Stochastic : MomentType::kBFloat16;
  }
  return true;
}

// Parameters of a group at the same step share their scalars; those of a group mostly do.
int32_t CheckedStep::scalars_of(int32_t group, float steps) {
  for (size_t i = keys_.size(); i-- > 0;) {
    if (keys_[i].group == group && keys_[i].steps == steps) return static_cast<int32_t>(i);
  }
  constexpr float kMostSteps = 4294967040.0f;  // the last below 2^32
  require(steps >= 0.0f && steps <= kMostSteps, op_,
          ": states must hold a step that lies between 0 and 2^32, got ", steps);
  keys_.push_back({group, steps});
  scalars_.push_back(step_scalars(algorithm_, hyper_of(hyper_ + group * kHyperColumns),
                                  static_cast<uint32_t>(steps) + 1));
  return static_cast<int32_t>(scalars_.size()) - 1;
}

#ifndef ONEPASS_CUDA

namespace {

double read_number(const char* op, const char* name, const Tensor& tensor) {
  const TensorInfo info = input_of(op, name, tensor);
  const int64_t numel = Shape(info).numel();
  require(numel == 1, op, ": ", name, " must have one element, got ", numel);
  const void* const data = tensor.const_data_ptr();
  const DType dtype = require_dtype(op, name, info.scalar_type);
  if (dtype == DType::kFloat64) return *static_cast<const double*>(data);
  return visit_dtype_up_to_float32(dtype,
                                   [&]<class T>() { return widen(*static_cast<const T*>(data)); });
}

}  // namespace

OptimizerStep CheckedStep::args() const {
  double factor =
      options_.grad_scale ? 1.0 / read_number(op_, "grad_scale", *options_.grad_scale) : 1.0;
  bool is_made = !options_.found_inf || read_number(op_, "found_inf", *options_.found_inf) == 0.0;
  if (options_.norm) {
    const double unscaled = read_number(op_, "norm", *options_.norm) * factor;
    is_made = is_made && std::isfinite(unscaled);
    if (options_.max_norm) factor *= clip_factor(*options_.max_norm, unscaled);
  }
  OptimizerStep args = common_args();
  args.scalars = scalars_.data();
  args.gradient_factor = factor;
  args.is_made = is_made;
  return args;
}

void CheckedStep::count(const OptimizerStep& step) const {
  if (!step.is_made) return;
  for (const StepTensor& tensor : table_->tensors) *tensor.step += 1.0f;
}

#else

namespace {

const void* number_on(const char* op, const char* name, const std::optional<Tensor>& tensor,
                      DType dtype, const Device& device) {
  if (!tensor) return nullptr;
  const TensorInfo info = input_of(op, name, *tensor);
  require(flat_info_of(*tensor).numel == 1 && dtype_of(info.scalar_type) == dtype &&
              info.device == device,
          op, ": ", name, " must be one ", dtype, " on ", device, ", got ", info, " of ",
          TypeName{info.scalar_type}, " on ", info.device);
  return tensor->const_data_ptr();
}

}  // namespace

OptimizerStep CheckedStep::args() const {
  OptimizerStep args = common_args();
  const Device& device = table_->device;
  args.norm =
      static_cast<const double*>(number_on(op_, "norm", options_.norm, DType::kFloat64, device));
  args.grad_scale = static_cast<const float*>(
      number_on(op_, "grad_scale", options_.grad_scale, DType::kFloat32, device));
  args.found_inf = static_cast<const float*>(
      number_on(op_, "found_inf", options_.found_inf, DType::kFloat32, device));
  args.max_norm = options_.max_norm.value_or(INFINITY);
  require(options_.device_hyper.has_value(), op_, ": device_hyper must be given on CUDA, got none");
  const TensorInfo info = input_of(op_, "device_hyper", *options_.device_hyper);
  require(dtype_of(info.scalar_type) == DType::kFloat64 && info.dims == 2 &&
              info.sizes[0] >= table_->groups && info.sizes[1] == kHyperColumns &&
              options_.device_hyper->is_contiguous() && info.device == device,
          op_, ": device_hyper must be hyper on ", device, ", got ", info, " of ",
          TypeName{info.scalar_type}, " on ", info.device);
  args.hyper = static_cast<const double*>(options_.device_hyper->const_data_ptr());
  return args;
}

void CheckedStep::count(const OptimizerStep&) const {}  // the kernel does

#endif

OptimizerStep CheckedStep::common_args() const {
  OptimizerStep args{};
  args.list = flat_list(table_->tensors, table_->first_piece);
  args.algorithm = algorithm_;
  args.zero_gradients = options_.zero_gradients;
  args.seed = options_.seed;
  return args;
}

std::string CheckedStep::text() const {
  return std::to_string(table_->tensors.size()) + " tensors, " + std::to_string(table_->numel) +
         " elements";
}

}  // namespace onepass
