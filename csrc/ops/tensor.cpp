#include "ops/tensor.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace onepass {

namespace {

thread_local const char* operator_name = "onepass";

// In the order of DType.
constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                 ScalarType::Double};

// The error has torch's words, because callers that retry with less memory look for them; the
// stable ABI has no exception type for it.
[[noreturn]] void no_memory(const Device& device, const Shape& shape, const int64_t* strides,
                            int32_t scalar_type) {
  const std::optional<int64_t> elements = extent_of(shape, strides);
  int64_t bytes = 0;
  const bool overflows =
      !elements || __builtin_mul_overflow(*elements, element_size_of(scalar_type), &bytes);
  throw std::runtime_error(
      std::string(operator_name) +
      (device.type == aoti_torch_device_type_cuda()
           ? ": CUDA out of memory. Tried to allocate "
           : ": DefaultCPUAllocator: can't allocate memory: tried to allocate ") +
      (overflows ? "more than 2^63" : std::to_string(bytes)) + " bytes");
}

void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(std::string("onepass: ") + what + " failed");
  }
}

// `elements` from the first of the tensor to the end of its last.
StorageBytes storage_bytes(AtenTensorHandle handle, int64_t elements, int32_t scalar_type) {
  StorageBytes bytes;
  int64_t offset;
  check(aoti_torch_get_storage_size(handle, &bytes.held), "reading a storage's size");
  check(aoti_torch_get_storage_offset(handle, &offset), "reading a tensor's offset");
  if (__builtin_add_overflow(offset, elements, &elements) ||
      __builtin_mul_overflow(elements, element_size_of(scalar_type), &bytes.needed)) [[unlikely]] {
    bytes.needed = std::numeric_limits<int64_t>::max();
  }
#ifdef ONEPASS_EMULATE
  if (bytes.needed <= bytes.held) {
    void* data;
    check(aoti_torch_get_data_ptr(handle, &data), "reading where a tensor lies");
    const int64_t size = element_size_of(scalar_type);
    tell_of_memory(Memory::kTensor, data, bytes.needed - offset * size, size);
  }
#endif
  return bytes;
}

Tensor allocated(const Shape& shape, const int64_t* strides, int32_t scalar_type,
                 const Device& device) {
#ifdef ONEPASS_EMULATE
  const std::vector<int64_t> emulated = emulated_strides(shape.sizes, strides, shape.dims);
  strides = emulated.data();
#endif
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(shape.dims, shape.sizes, strides, scalar_type, device.type,
                               device.index, &handle) != AOTI_TORCH_SUCCESS) [[unlikely]] {
    no_memory(device, shape, strides, scalar_type);
  }
#ifdef ONEPASS_EMULATE
  int64_t bytes;
  check(aoti_torch_get_storage_size(handle, &bytes), "reading a storage's size");
  tell_of_memory(Memory::kNew, mutable_data_of(handle), bytes, element_size_of(scalar_type));
#endif
  return Tensor(handle);
}

Tensor empty_of(const Shape& shape, int32_t scalar_type, const Device& device) {
  constexpr int64_t kMaxDims = 64;  // torch has no tensors of more
  std::array<int64_t, kMaxDims> strides;
  int64_t stride = 1;
  for (int64_t d = shape.dims - 1; d >= 0; --d) {
    strides[d] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(shape.sizes[d], 1), &stride))
        [[unlikely]] {
      stride = std::numeric_limits<int64_t>::max();  // which torch refuses
    }
  }
  return allocated(shape, strides.data(), scalar_type, device);
}

}  // namespace

int64_t Shape::product(int64_t first, int64_t last) const {
  return std::accumulate(sizes + first, sizes + last, int64_t{1}, std::multiplies<>());
}

std::optional<int64_t> extent_of(const Shape& shape, const int64_t* strides) {
  int64_t elements = 1;
  bool overflows = false;
  for (int64_t d = 0; d < shape.dims; ++d) {
    if (shape.sizes[d] == 0) return 0;
    int64_t reach;
    overflows |= __builtin_mul_overflow(shape.sizes[d] - 1, strides[d], &reach);
    overflows |= __builtin_add_overflow(elements, reach, &elements);
  }
  return overflows ? std::nullopt : std::optional(elements);
}

std::ostream& operator<<(std::ostream& text, const Shape& shape) {
  text << "(";
  for (int64_t d = 0; d < shape.dims; ++d) text << (d ? ", " : "") << shape.sizes[d];
  return text << (shape.dims == 1 ? ",)" : ")");
}

void set_operator(const char* op) { operator_name = op; }

TensorInfo info_of(AtenTensorHandle handle) {
  TensorInfo info;
  int64_t* sizes;
  int64_t* strides;
  check(aoti_torch_get_dim(handle, &info.dims), "reading a tensor's rank");
  check(aoti_torch_get_sizes(handle, &sizes), "reading a tensor's shape");
  check(aoti_torch_get_strides(handle, &strides), "reading a tensor's strides");
  check(aoti_torch_get_dtype(handle, &info.scalar_type), "reading a tensor's dtype");
  check(aoti_torch_get_device_type(handle, &info.device.type), "reading a tensor's device");
  check(aoti_torch_get_device_index(handle, &info.device.index), "reading a tensor's device");
  info.sizes = sizes;
  info.strides = strides;
  return info;
}

bool is_defined(AtenTensorHandle handle) {
  bool defined;
  check(aoti_torch_is_defined(handle, &defined), "reading whether there is a tensor");
  return defined;
}

FlatInfo flat_info_of(AtenTensorHandle handle) {
  FlatInfo info;
  check(aoti_torch_get_numel(handle, &info.numel), "reading a tensor's size");
  check(aoti_torch_get_dtype(handle, &info.scalar_type), "reading a tensor's dtype");
  check(aoti_torch_is_contiguous(handle, &info.contiguous), "reading a tensor's strides");
  return info;
}

StorageBytes storage_bytes_of(AtenTensorHandle handle, const TensorInfo& info) {
  const int64_t elements =
      extent_of(info, info.strides).value_or(std::numeric_limits<int64_t>::max());
  return elements == 0 ? StorageBytes{0, 0} : storage_bytes(handle, elements, info.scalar_type);
}

StorageBytes storage_bytes_of(AtenTensorHandle handle, const FlatInfo& info) {
  if (info.numel == 0) return {0, 0};
  return storage_bytes(handle, info.numel, info.scalar_type);
}

void* mutable_data_of(AtenTensorHandle handle) {
  void* data;
  check(torch_get_mutable_data_ptr(handle, &data), "reading where a tensor lies");
  return data;
}

TensorList::TensorList(StableListHandle list) {
  size_t size = 0;
  AOTITorchError error = torch_list_size(list, &size);
  tensors_.reserve(size);
  for (size_t i = 0; i < size && error == AOTI_TORCH_SUCCESS; ++i) {
    StableIValue item;
    error = torch_list_get_item(list, i, &item);
    if (error == AOTI_TORCH_SUCCESS) {
      tensors_.push_back(torch::stable::detail::to<AtenTensorHandle>(item));
    }
  }
  torch_delete_list(list);
  if (error != AOTI_TORCH_SUCCESS) [[unlikely]] {
    release();  // no destructor runs where a constructor throws
  }
  check(error, "reading a list of tensors");
}

TensorList::~TensorList() { release(); }

void TensorList::release() {
  for (const AtenTensorHandle tensor : tensors_) aoti_torch_delete_tensor_object(tensor);
}

uint64_t layout_key_of(const Tensor& tensor) {
  const AtenTensorHandle handle = tensor.get();
  int64_t dims;
  int64_t* sizes;
  int64_t* strides;
  int32_t scalar_type;
  check(aoti_torch_get_dim(handle, &dims), "reading a tensor's rank");
  check(aoti_torch_get_sizes(handle, &sizes), "reading a tensor's shape");
  check(aoti_torch_get_strides(handle, &strides), "reading a tensor's strides");
  check(aoti_torch_get_dtype(handle, &scalar_type), "reading a tensor's dtype");
  // Multiplications by odd constants that mix well (those of splitmix64).
  uint64_t key = static_cast<uint64_t>(dims) << 32 | static_cast<uint32_t>(scalar_type);
  for (int64_t d = 0; d < dims; ++d) {
    key = (key ^ static_cast<uint64_t>(sizes[d])) * 0xbf58476d1ce4e5b9u;
    key = (key ^ key >> 31 ^ static_cast<uint64_t>(strides[d])) * 0x94d049bb133111ebu;
    key ^= key >> 29;
  }
  return key;
}

std::optional<DType> dtype_of(int32_t scalar_type) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (scalar_type_of(dtype) == scalar_type) return dtype;
  }
  return std::nullopt;
}

int32_t scalar_type_of(DType dtype) {
  return static_cast<int32_t>(kTypes[static_cast<int>(dtype)]);
}

int64_t element_size_of(int32_t scalar_type) {  // a switch: a step of optimizers asks for hundreds
  switch (static_cast<ScalarType>(scalar_type)) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
    case ScalarType::Short:
      return 2;
    default:
      return 1;
  }
}

std::ostream& operator<<(std::ostream& text, const TypeName& name) {
  constexpr std::pair<ScalarType, const char*> names[] = {
      {ScalarType::Byte, "uint8"},
      {ScalarType::Char, "int8"},
      {ScalarType::Short, "int16"},
      {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"},
      {ScalarType::Bool, "bool"},
      {ScalarType::ComplexFloat, "complex64"},
      {ScalarType::ComplexDouble, "complex128"}};
  for (const auto& [type, known] : names) {
    if (is(type, name.scalar_type)) return text << known;
  }
  if (const std::optional<DType> dtype = dtype_of(name.scalar_type)) return text << *dtype;
  return text << torch::headeronly::toString(static_cast<ScalarType>(name.scalar_type));
}

std::ostream& operator<<(std::ostream& text, const Device& device) {
  text << (device.type == aoti_torch_device_type_cpu()    ? "cpu"
           : device.type == aoti_torch_device_type_cuda() ? "cuda"
           : device.type == aoti_torch_device_type_meta() ? "meta"
                                                          : "another device");
  if (device.index >= 0) text << ":" << device.index;
  return text;
}

Tensor empty(const Shape& shape, DType dtype, Device device) {
  return empty_of(shape, scalar_type_of(dtype), device);
}

Tensor empty_strided(const Shape& shape, const int64_t* strides, DType dtype, Device device) {
  return allocated(shape, strides, scalar_type_of(dtype), device);
}

Tensor zeros(const Shape& shape, DType dtype, Device device) {
  Tensor made = empty(shape, dtype, device);
  set_to_zero(made);
  return made;
}

Tensor contiguous_copy(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  Tensor copy = empty_of(info, info.scalar_type, info.device);
  torch::stable::copy_(copy, tensor);
  return copy;
}

Tensor strided_copy(const Tensor& tensor, const int64_t* strides) {
  const TensorInfo info = info_of(tensor);
  Tensor copy = allocated(info, strides, info.scalar_type, info.device);
  torch::stable::copy_(copy, tensor);
  return copy;
}

void set_to_zero(Tensor& tensor) { torch::stable::zero_(tensor); }

Workspace::Workspace(int64_t bytes, Device device) {
  if (bytes == 0) return;
  owner_ = empty_1d((bytes + 64) / 4 + 1, DType::kFloat32, device);
  const auto address = reinterpret_cast<uintptr_t>(owner_->mutable_data_ptr());
  data_ = reinterpret_cast<void*>((address + 63) / 64 * 64);
}

}  // namespace onepass
