// CUDA facts for `onepass doctor`: the toolkit that built this library, and the devices that the
// driver shows. Plain C functions, called through ctypes.
#include <cuda_runtime.h>

#include <cstring>

#define ONEPASS_EXPORT extern "C" __attribute__((visibility("default")))

// The CUDA toolkit of the build, as 1000 * major + 10 * minor.
ONEPASS_EXPORT int onepass_cuda_toolkit() { return CUDART_VERSION; }

// The number of visible devices, or minus the cudaError if the driver cannot be used.
ONEPASS_EXPORT int onepass_cuda_device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -static_cast<int>(error);
}

// The text of an error code.
ONEPASS_EXPORT const char* onepass_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// 10 * major + minor of a device, or minus the cudaError.
ONEPASS_EXPORT int onepass_cuda_capability(int device) {
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  return error == cudaSuccess ? 10 * major + minor : -static_cast<int>(error);
}

// A device's name, at most size - 1 characters of it. Returns 0, or minus the cudaError.
ONEPASS_EXPORT int onepass_cuda_device_name(int device, char* name, int size) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return -static_cast<int>(error);
  std::strncpy(name, properties.name, size - 1);
  name[size - 1] = '\0';
  return 0;
}
