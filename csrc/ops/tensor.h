// The facts of a tensor that ops/ uses, read once: each query through the stable ABI is a call.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <vector>

#include "core/dtype.h"

namespace onepass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Device {
  int32_t type;
  int32_t index;
  bool operator==(const Device&) const = default;
};

struct TensorInfo {
  const int64_t* sizes;    // (dims,)
  const int64_t* strides;  // (dims,)
  int64_t dims;
  int32_t scalar_type;
  Device device;
};

// Sizes, written as (2, 3) or (3,) like Python's shapes. Does not own them. A TensorInfo is written
// as its shape.
struct Shape {
  const int64_t* sizes;
  int64_t dims;

  Shape(const int64_t* sizes, int64_t dims) : sizes(sizes), dims(dims) {}
  Shape(const TensorInfo& info) : Shape(info.sizes, info.dims) {}
  Shape(const std::vector<int64_t>& sizes) : Shape(sizes.data(), sizes.size()) {}
  template <size_t dims>
  Shape(const int64_t (&sizes)[dims]) : Shape(sizes, dims) {}

  bool operator==(const Shape& other) const {
    return std::equal(sizes, sizes + dims, other.sizes, other.sizes + other.dims);
  }
  int64_t product(int64_t first, int64_t last) const;  // of sizes [first, last)
  int64_t numel() const { return product(0, dims); }
  bool is_empty() const { return std::find(sizes, sizes + dims, 0) != sizes + dims; }
};
std::ostream& operator<<(std::ostream& text, const Shape& shape);
// Elements from the first to the end of the last; none if int64 does not hold them.
std::optional<int64_t> extent_of(const Shape& shape, const int64_t* strides);

// A failing query means a tensor without strided storage, which no operator here takes. For a
// caller's tensors there is input_of() in check.h.
TensorInfo info_of(AtenTensorHandle tensor);
inline TensorInfo info_of(const Tensor& tensor) { return info_of(tensor.get()); }

bool is_defined(AtenTensorHandle tensor);

// The bytes of a tensor's storage, and the end of the last element there. The storage is shorter
// where it was resized, as FSDP frees parameters.
struct StorageBytes {
  int64_t held;
  int64_t needed;
};
StorageBytes storage_bytes_of(AtenTensorHandle tensor, const TensorInfo& info);

// The facts that an operator on flat lists of tensors uses: fewer, because there are hundreds.
struct FlatInfo {
  int64_t numel;
  int32_t scalar_type;
  bool contiguous;
};
FlatInfo flat_info_of(AtenTensorHandle tensor);
inline FlatInfo flat_info_of(const Tensor& tensor) { return flat_info_of(tensor.get()); }
StorageBytes storage_bytes_of(AtenTensorHandle tensor, const FlatInfo& info);  // without gaps

// The data pointer of a `Tensor(a!)` argument, which an operator writes to.
void* mutable_data_of(AtenTensorHandle tensor);

// A hash of shape, strides and dtype.
uint64_t layout_key_of(const Tensor& tensor);

// The tensors of a `Tensor[]` argument, which TORCH_BOX passes as StableListHandle, until the
// operator returns. std::vector<Tensor> would allocate a reference count for each tensor, which
// slows down a step of hundreds of tensors (`onepass bench optimizer`, 400x768).
class TensorList {
 public:
  explicit TensorList(StableListHandle list);  // which is its own from now on
  ~TensorList();
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  size_t size() const { return tensors_.size(); }
  AtenTensorHandle operator[](size_t i) const { return tensors_[i]; }
  auto begin() const { return tensors_.begin(); }
  auto end() const { return tensors_.end(); }

 private:
  void release();

  std::vector<AtenTensorHandle> tensors_;
};

// The element type, or nothing where no kernel takes it.
std::optional<DType> dtype_of(int32_t scalar_type);
int32_t scalar_type_of(DType dtype);
int64_t element_size_of(int32_t scalar_type);  // 1 for dtypes that no operator takes
inline bool is(ScalarType type, int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == type;
}
// The dtype in which elements of `dtype` are summed.
constexpr DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Written as Python names the dtype, without "torch.".
struct TypeName {
  int32_t scalar_type;
};
std::ostream& operator<<(std::ostream& text, const TypeName& name);
inline std::ostream& operator<<(std::ostream& text, DType dtype) { return text << name_of(dtype); }
std::ostream& operator<<(std::ostream& text, const Device& device);

#ifdef ONEPASS_EMULATE
// Memory that arguments of kernels may point to: a tensor's, that of a new tensor without values
// yet, or lists of tensors on the host. An element has this many bytes.
enum class Memory { kTensor, kNew, kList };
void tell_of_memory(Memory what, const void* begin, int64_t bytes, int64_t element = 1);
// The padding of a struct holds whatever was in that memory before, for example half an address.
template <class T>
void clear_padding([[maybe_unused]] T& object) {
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&object);
#endif
}
template <class Item>
void tell_of_list(const std::vector<Item>& list) {
  for (const Item& item : list) clear_padding(const_cast<Item&>(item));
  tell_of_memory(Memory::kList, list.data(), static_cast<int64_t>(list.size() * sizeof(Item)));
}
inline void tell_of_tensor(AtenTensorHandle tensor, const FlatInfo& info) {
  storage_bytes_of(tensor, info);
}
// The strides that a new tensor gets there: those given, or longer ones.
std::vector<int64_t> emulated_strides(const int64_t* sizes, const int64_t* strides, int64_t dims);
#else
// Only the emulated runtime uses it.
template <class Item>
void tell_of_list(const std::vector<Item>&) {}
inline void tell_of_tensor(AtenTensorHandle, const FlatInfo&) {}
#endif

// The operator that this thread runs, for the error if memory runs out. Checks set it first.
void set_operator(const char* op);

Tensor empty(const Shape& shape, DType dtype, Device device);
Tensor empty_strided(const Shape& shape, const int64_t* strides, DType dtype, Device device);
inline Tensor empty_1d(int64_t size, DType dtype, Device device) {
  return empty(Shape(&size, 1), dtype, device);
}
// Of size 0 if it is not wanted.
inline Tensor empty_if(bool wanted, const Shape& shape, DType dtype, Device device) {
  return wanted ? empty(shape, dtype, device) : empty_1d(0, dtype, device);
}
// The same, and points `data` to it if it is wanted.
inline Tensor empty_if(bool wanted, const Shape& shape, DType dtype, Device device, void*& data) {
  Tensor made = empty_if(wanted, shape, dtype, device);
  if (wanted) data = made.mutable_data_ptr();
  return made;
}
Tensor zeros(const Shape& shape, DType dtype, Device device);

Tensor contiguous_copy(const Tensor& tensor);
Tensor strided_copy(const Tensor& tensor, const int64_t* strides);  // (dims,)
void set_to_zero(Tensor& tensor);

// The copies that a call made of its inputs, alive until it returns.
using Copies = std::vector<Tensor>;

inline const void* data_of(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}
// The elements of a tensor, of a contiguous copy if it is not contiguous; null if there is none.
template <class T = void>
const T* dense_data_of(const OptionalTensor& tensor, Copies& copies) {
  if (!tensor || tensor->is_contiguous()) return static_cast<const T*>(data_of(tensor));
  copies.push_back(contiguous_copy(*tensor));
  return static_cast<const T*>(copies.back().const_data_ptr());
}
// Of a seed that CheckedAgainst::seed() has checked.
inline const int64_t* seed_of(const OptionalTensor& seed) {
  return static_cast<const int64_t*>(data_of(seed));
}

// Scratch for a run, 64-byte aligned; holds the tensor that owns it.
class Workspace {
 public:
  Workspace(int64_t bytes, Device device);
  void* data() const { return data_; }

 private:
  std::optional<Tensor> owner_;
  void* data_ = nullptr;
};

}  // namespace onepass
