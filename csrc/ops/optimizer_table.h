// The parameters of an optimizer and where their states lie, checked once and kept from step to
// step: every tensor that an operator is handed costs 0.1 us and more (CONTRIBUTING.md, Gotchas),
// so a step is handed its gradients alone.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/optimizer.h"

namespace onepass {

// Neither gaps nor overlaps, whatever the order of the dimensions.
inline bool is_dense(const TensorInfo& info) {
  int64_t longer = 0;
  for (int64_t d = 0; d < info.dims; ++d) longer += info.sizes[d] > 1;
  // From the innermost dimension outwards: each stride must be the product of the inner sizes.
  for (int64_t within = 1; longer > 0; --longer) {
    int64_t d = 0;
    while (d < info.dims && (info.sizes[d] == 1 || info.strides[d] != within)) ++d;
    if (d == info.dims) return false;
    within *= info.sizes[d];
  }
  return true;
}

// The checks of a tensor of a list, whose elements may have any order, but no gaps.
inline FlatInfo flat_input_of(const char* op, const char* name, AtenTensorHandle tensor,
                              const Device& device) {
  set_operator(op);
  require_device(op, name, tensor, device);
  const FlatInfo info = flat_info_of(tensor);
  if (!info.contiguous) {
    const TensorInfo strided = info_of(tensor);
    require(is_dense(strided), op, ": ", name,
            " must have no gaps between their elements, got shape ", strided, " with strides ",
            Shape(strided.strides, strided.dims));
  }
  require_memory(op, name, tensor, info);
  return info;
}

inline int64_t pieces_of(int64_t numel) { return (numel + kPieceElements - 1) / kPieceElements; }

template <class Item>
FlatList<Item> flat_list(const std::vector<Item>& tensors,
                         const std::vector<int64_t>& first_piece) {
  tell_of_list(tensors);
  tell_of_list(first_piece);
  return {tensors.data(), first_piece.data(), static_cast<int64_t>(tensors.size())};
}

// Pieces of all tensors are written at the same time, so none may lie in another.
// flat_of(item) says where each lies.
template <class Item, class FlatOf>
void require_apart(const char* op, const char* name, const std::vector<Item>& items,
                   FlatOf&& flat_of) {
  struct Span {
    uintptr_t begin;
    uintptr_t end;
    size_t number;
  };
  std::vector<Span> spans;
  spans.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const FlatTensor tensor = flat_of(items[i]);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    const auto bytes = static_cast<uintptr_t>(tensor.numel * size_of(tensor.dtype));
    if (bytes > 0) spans.push_back({begin, begin + bytes, i});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& one, const Span& other) { return one.begin < other.begin; });
  for (size_t i = 1; i < spans.size(); ++i) {
    require(spans[i - 1].end <= spans[i].begin, op, ": ", name,
            " must not share memory with one another, got ",
            std::min(spans[i - 1].number, spans[i].number), " and ",
            std::max(spans[i - 1].number, spans[i].number), " that do");
  }
}

struct StepTable {
  // A tensor as it was when the table was made.
  struct Kept {
    Tensor tensor;
    FlatInfo info;
    uint64_t layout_key;  // of a parameter
    char* data;           // of a state: memory that holds a kind of state of many parameters
  };

  // Keeps the tensors; the StepTensors lack the fields that may change from step to step.
  StepTable(const std::vector<Tensor>& params, const std::vector<Tensor>& states,
            const Tensor& layout);

  std::vector<Kept> params;
  std::vector<Kept> states;
  std::vector<StepTensor> tensors;   // one per parameter
  std::vector<int64_t> first_piece;  // (parameters + 1,)
  int64_t groups = 0;                // rows of hyper that are named
  int64_t numel = 0;
  bool are_apart = false;  // where the parameters lie, as of the last step
  Device device{};
};

// Makes a table and returns its number; releases a table. Tables have numbers, not pointers, so
// that a wrong number is an error and nothing worse.
int64_t optimizer_table(const std::vector<Tensor>& params, const std::vector<Tensor>& states,
                        const Tensor& layout);
void optimizer_table_release(const Tensor& state, int64_t table);  // any state of it

// The arguments of optimizer_step besides its table, gradients and settings. Tensors of one number
// lie on the parameters' device.
#define ONEPASS_STEP_OPTIONS(FIELD)                                                       \
  FIELD(int64_t, seed, "=0")                                                              \
  FIELD(bool, stochastic_params, "=False")  /* those without a master */                  \
  FIELD(bool, stochastic_moments, "=False") /* second ones in bfloat16 */                 \
  FIELD(bool, zero_gradients, "=False")                                                   \
  FIELD(OptionalDouble, max_norm, "=None")                                                \
  FIELD(OptionalTensor, norm, "=None")         /* () of all gradients, as they are */     \
  FIELD(OptionalTensor, grad_scale, "=None")   /* () what gradients are divided by */     \
  FIELD(OptionalTensor, found_inf, "=None")    /* () no step is made where it is not 0 */ \
  FIELD(OptionalTensor, device_hyper, "=None") /* CUDA: the settings on the device */     \
  FIELD(bool, checks_only, "=False")           /* makes no step */

ONEPASS_DEFINE_OPTIONS(StepOptions, ONEPASS_STEP_OPTIONS);

// A table with the gradients, settings and options of one step; the options outlive it.
class CheckedStep {
 public:
  CheckedStep(const char* op, Algorithm algorithm, int64_t table, const TensorList& gradients,
              const Tensor& hyper, const StepOptions& options);

  OptimizerStep args() const;
  // Whether the memory layout of parameters or gradients differs from the table's: then the caller
  // must make another table, or pass copies.
  bool is_stale() const { return is_stale_; }
  const Device& device() const { return table_->device; }
  void count(const OptimizerStep& step) const;  // where the host knows that it was made
  std::string text() const;

 private:
  struct Key {
    int32_t group;
    float steps;
  };

  void states_stayed() const;
  bool complete(StepTensor& tensor, size_t number, AtenTensorHandle gradient);
  int32_t scalars_of(int32_t group, float steps);
  OptimizerStep common_args() const;

  const char* op_;
  Algorithm algorithm_;
  const StepOptions& options_;
  std::shared_ptr<StepTable> table_;
  bool is_stale_ = false;
  const double* hyper_;
  std::vector<Key> keys_;
  std::vector<StepScalars> scalars_;
};

}  // namespace onepass
