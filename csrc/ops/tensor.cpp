#include "ops/tensor.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <stdexcept>

namespace onepass {

using torch::headeronly::ScalarType;

namespace {

void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(std::string("onepass: ") + what + " failed");
  }
}

}  // namespace

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

FlatInfo flat_info_of(AtenTensorHandle handle) {
  FlatInfo info;
  check(aoti_torch_get_numel(handle, &info.numel), "reading a tensor's size");
  check(aoti_torch_get_dtype(handle, &info.scalar_type), "reading a tensor's dtype");
  check(aoti_torch_is_contiguous(handle, &info.contiguous), "reading a tensor's strides");
  return info;
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
  switch (static_cast<ScalarType>(scalar_type)) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

int32_t scalar_type_of(DType dtype) {
  constexpr std::array<ScalarType, 4> types = {ScalarType::Float, ScalarType::BFloat16,
                                               ScalarType::Half, ScalarType::Double};
  return static_cast<int32_t>(types[static_cast<int>(dtype)]);
}

std::ostream& operator<<(std::ostream& text, const TypeName& name) {
  const auto type = static_cast<ScalarType>(name.scalar_type);
  switch (type) {
    case ScalarType::Byte:
      return text << "uint8";
    case ScalarType::Char:
      return text << "int8";
    case ScalarType::Short:
      return text << "int16";
    case ScalarType::Int:
      return text << "int32";
    case ScalarType::Long:
      return text << "int64";
    case ScalarType::Bool:
      return text << "bool";
    case ScalarType::ComplexFloat:
      return text << "complex64";
    case ScalarType::ComplexDouble:
      return text << "complex128";
    default:
      if (const std::optional<DType> dtype = dtype_of(name.scalar_type)) {
        return text << name_of(*dtype);
      }
      return text << torch::headeronly::toString(type);
  }
}

bool is_bool(int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == ScalarType::Bool;
}

bool is_int64(int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == ScalarType::Long;
}

bool is_int32(int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == ScalarType::Int;
}

bool is_int16(int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == ScalarType::Short;
}

bool is_uint8(int32_t scalar_type) {
  return static_cast<ScalarType>(scalar_type) == ScalarType::Byte;
}

std::ostream& operator<<(std::ostream& text, const Device& device) {
  text << (device.type == aoti_torch_device_type_cpu()    ? "cpu"
           : device.type == aoti_torch_device_type_cuda() ? "cuda"
           : device.type == aoti_torch_device_type_meta() ? "meta"
                                                          : "another device");
  if (device.index >= 0) text << ":" << device.index;
  return text;
}

Tensor empty(const int64_t* sizes, int64_t dims, DType dtype, Device device) {
  constexpr int64_t kMaxDims = 64;  // torch has no tensors of more
  std::array<int64_t, kMaxDims> strides;
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return empty_strided(sizes, strides.data(), dims, dtype, device);
}

Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype,
                     Device device) {
  AtenTensorHandle handle;
  check(aoti_torch_empty_strided(dims, sizes, strides, scalar_type_of(dtype), device.type,
                                 device.index, &handle),
        "allocating an output");
  return Tensor(handle);
}

Tensor zeros_like(const Tensor& like, DType dtype) {
  const TensorInfo info = info_of(like);
  Tensor zeros = empty(info.sizes, info.dims, dtype, info.device);
  torch::stable::zero_(zeros);
  return zeros;
}

std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  if (!tensor || tensor->is_contiguous()) return tensor;
  return torch::stable::contiguous(*tensor);
}

Workspace::Workspace(int64_t bytes, Device device) {
  if (bytes == 0) return;
  owner_ = empty_1d((bytes + 64) / 4 + 1, DType::kFloat32, device);
  const auto address = reinterpret_cast<uintptr_t>(owner_->mutable_data_ptr());
  data_ = reinterpret_cast<void*>((address + 63) / 64 * 64);
}

}  // namespace onepass
