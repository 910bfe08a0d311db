// The one way a kernel is started.
#pragma once

#include "cuda/ptx.cuh"

#ifdef ONEPASS_EMULATE
#include <cstring>
#else
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <stdexcept>
#include <string>
#endif

namespace onepass::cuda {

struct LaunchShape {
  int64_t blocks;
  unsigned threads;
  size_t shared_bytes = 0;
  int resident = 1;  // blocks that must run at the same time for the kernel to end
};

// For launch(): the kernel may start before the preceding one on the stream has ended (programmatic
// dependent launch), which hides the time of its launch. It calls wait_for_kernel_before() first,
// and the preceding kernel calls start_kernel_after() near its end. The order on the stream stays
// the usual one, with any kernel, memset or copy before or after. Used only if ONEPASS_CUDA_OVERLAP
// is "always", until the gain has been measured on a device.
inline constexpr bool kFollows = true;

// Bytes of a kernel's parameters. More than 4,096 need CUDA 12.1 and driver 530.
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
inline constexpr size_t kMaxParameterBytes = 4096;
#else
inline constexpr size_t kMaxParameterBytes = 32764;
#endif

#ifdef ONEPASS_EMULATE

// Ordered with the kernels on the stream; part of a graph that captures it.
inline void zero(void* memory, size_t bytes, void* /*stream*/) { std::memset(memory, 0, bytes); }

// Bytes of shared memory that a block of the current device may use.
inline size_t max_shared_bytes() { return emulator::max_shared_bytes(); }

// Facts of the current device.
inline size_t l2_bytes() { return emulator::l2_bytes(); }
inline int64_t multiprocessors() { return emulator::multiprocessors(); }

template <auto kKernel, bool kIsFollowing = false, class... Args>
void launch(const LaunchShape& shape, void* /*stream*/, const Args&... args) {
  emulator::launch({.grid = {static_cast<unsigned>(shape.blocks), 1, 1},
                    .block = {shape.threads, 1, 1},
                    .shared_bytes = shape.shared_bytes,
                    .resident = shape.resident,
                    .kernel = emulator::KernelName<kKernel>::get()},
                   [&] { kKernel(args...); });
}

#else

// Errors of a running kernel. Any later call may return them, even one that starts nothing.
inline bool is_of_running_kernels(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

// Throws if a call failed. `before`: the error that was pending before the call.
inline void check(cudaError_t error, const char* what, cudaError_t before = cudaSuccess) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error: it is reported here, and must not be reported again
  std::string text = std::string("onepass: ") + what + ": " + cudaGetErrorString(error);
  if (before != cudaSuccess) {
    text += std::string("; an error was pending before this call: ") + cudaGetErrorString(before);
  } else if (is_of_running_kernels(error)) {
    text += "; a kernel that was started earlier ran into it (CUDA_LAUNCH_BLOCKING=1 shows which)";
  }
  throw std::runtime_error(text);
}

// Ordered with the kernels on the stream; part of a graph that captures it.
inline void zero(void* memory, size_t bytes, void* stream) {
  check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "zeroing memory");
}

inline int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "asking for the device");
  check(cudaDeviceGetAttribute(&value, attribute, device), "asking what the device has");
  return value;
}

// Bytes of shared memory that a block of the current device may use.
inline size_t max_shared_bytes() {
  return static_cast<size_t>(attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// Facts of the current device.
inline size_t l2_bytes() {
  return static_cast<size_t>(attribute_of_device(cudaDevAttrL2CacheSize));
}
inline int64_t multiprocessors() { return attribute_of_device(cudaDevAttrMultiProcessorCount); }

// Whether a kernel's code for the current device waits: code of sm_90 and newer, also where a newer
// device compiles it from PTX. Edges of graphs have known such launches since CUDA 12.3.
inline bool waits_for_kernel_before(const void* kernel) {
  const char* const chosen = std::getenv("ONEPASS_CUDA_OVERLAP");
  if (!chosen || chosen != std::string("always")) return false;
  constexpr int kWithThem = 12030, kWithWait = 90;
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "asking about a kernel");
  return driver >= kWithThem && attributes.ptxVersion >= kWithWait;
}

// The same, asked once for each kernel and device.
template <auto kKernel>
bool can_follow() {
  enum class Known : signed char { kNotAsked, kNo, kYes };
  constexpr int kDevices = 64;
  static std::atomic<Known> known[kDevices];
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  if (device >= kDevices) return false;
  if (known[device] == Known::kNotAsked) {
    const bool waits = waits_for_kernel_before(reinterpret_cast<const void*>(kKernel));
    known[device] = waits ? Known::kYes : Known::kNo;
  }
  return known[device] == Known::kYes;
}

template <auto kKernel, bool kIsFollowing = false, class... Args>
void launch(const LaunchShape& shape, void* stream, const Args&... args) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  if (shape.blocks > kMaxBlocks) {
    throw std::runtime_error("onepass: a grid has at most 2147483647 blocks, and this call needs " +
                             std::to_string(shape.blocks));
  }
  const cudaError_t before = cudaPeekAtLastError();  // of an earlier call, not ours
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kWithoutAsking) {
    // The maximum: the limit belongs to the kernel, and another thread may start it with more.
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(max_shared_bytes())),
          "asking for shared memory", before);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(shape.blocks);
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  config.attrs = &attribute;
  if (shape.resident > 1) {
    // A cooperative launch. Without it, blocks that wait for others could keep those from starting.
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.numAttrs = 1;
  } else if constexpr (kIsFollowing) {
    if (can_follow<kKernel>()) {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      config.numAttrs = 1;
    }
  }
  check(cudaLaunchKernelEx(&config, kKernel, args...), "starting a kernel", before);
}

#endif

}  // namespace onepass::cuda
