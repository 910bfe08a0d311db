// Runs one operator of the optimizer family on lists of tensors from files: `optimizer CASE`, see
// case.h. What belongs to the i-th tensor of a list has i behind its name.
#include <vector>

#include "case.h"
#include "cuda/backend.h"

namespace onepass {
namespace {

template <class Enum>
Enum enum_of(const Case& call, const std::string& name) {
  return static_cast<Enum>(std::stoll(call.values.at(name)));
}

template <class T>
T* pointer(const Case& call, const std::string& name) {
  T* found;
  call.get(name.c_str(), found);
  return found;
}

// The list, and what it lies in.
template <class Item>
struct List {
  std::vector<Item> tensors;
  std::vector<int64_t> first_piece{0};

  void add(const Item& tensor) {
    tensors.push_back(tensor);
    first_piece.push_back(first_piece.back() +
                          (tensor.numel + kPieceElements - 1) / kPieceElements);
  }
  FlatList<Item> flat() const {
    return {tensors.data(), first_piece.data(), static_cast<int64_t>(tensors.size())};
  }
};

int64_t count_of(const Case& call) { return std::stoll(call.values.at("count")); }

List<FlatTensor> gradients_of(const Case& call) {
  List<FlatTensor> list;
  for (int64_t i = 0; i < count_of(call); ++i) {
    const std::string at = std::to_string(i);
    list.add({.data = pointer<void>(call, "gradient" + at),
              .numel = std::stoll(call.values.at("numel" + at)),
              .dtype = enum_of<DType>(call, "gradient_dtype" + at)});
  }
  return list;
}

List<StepTensor> tensors_of(const Case& call) {
  List<StepTensor> list;
  for (int64_t i = 0; i < count_of(call); ++i) {
    const std::string at = std::to_string(i);
    StepTensor tensor{};
    tensor.param = pointer<void>(call, "param" + at);
    tensor.gradient = pointer<void>(call, "gradient" + at);
    tensor.master = pointer<void>(call, "master" + at);
    tensor.step = pointer<float>(call, "step" + at);
    for (int which = 0; which < kMoments; ++which) {
      const std::string of = std::to_string(which) + "_" + at;
      tensor.moments[which] = pointer<void>(call, "moment" + of);
      tensor.scales[which] = pointer<float>(call, "scale" + of);
    }
    tensor.numel = std::stoll(call.values.at("numel" + at));
    tensor.param_dtype = enum_of<DType>(call, "param_dtype" + at);
    tensor.gradient_dtype = enum_of<DType>(call, "gradient_dtype" + at);
    tensor.moment_type = enum_of<MomentType>(call, "moment_type" + at);
    tensor.master_kind = enum_of<Master>(call, "master_kind" + at);
    tensor.index = enum_of<int32_t>(call, "index" + at);
    tensor.group = enum_of<int32_t>(call, "group" + at);
    list.add(tensor);
  }
  return list;
}

void gradient_norm(const Case& call) {
  GradientNorm args{};
  const List<FlatTensor> list = gradients_of(call);
  args.gradients = list.flat();
  GET(order), GET(wide), GET(norm), GET(total), GET(total_dtype);
  run(cuda::gradient_norm(), args);
}

void scale_gradients(const Case& call) {
  ScaleGradients args{};
  const List<FlatTensor> list = gradients_of(call);
  args.gradients = list.flat();
  GET(factor), GET(norm), GET(max_norm);
  run(cuda::scale_gradients(), args);
}

void optimizer_step(const Case& call) {
  OptimizerStep args{};
  const List<StepTensor> list = tensors_of(call);
  args.list = list.flat();
  args.algorithm = enum_of<Algorithm>(call, "algorithm");
  GET(zero_gradients), GET(seed), GET(hyper), GET(norm), GET(grad_scale), GET(found_inf);
  GET(max_norm), GET(norm_dtype);
  run(cuda::optimizer_step(), args);
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  using namespace onepass;
  return run_case(argc, argv, [](const Case& call, const std::string& op) {
    if (op == "gradient_norm") gradient_norm(call);
    if (op == "scale_gradients") scale_gradients(call);
    if (op == "optimizer_step") optimizer_step(call);
  });
}
