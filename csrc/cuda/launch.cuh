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

// While one exists, this thread may load code and set attributes, also where it captures a graph.
class OutsideCapture {
 public:
  OutsideCapture() { exchange(); }
  ~OutsideCapture() { exchange(); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What is known of a kernel on a device.
enum Preparation : unsigned {
  kLoaded = 1,
  kLarge = 2,  // it may use all shared memory
  kEarly = 4,  // it may start before the kernel in front of it has ended
};

// Loads a kernel's code for the current device. The wait for the kernel before is in code of sm_90
// and newer, also where a newer device compiles it from PTX; edges of graphs have known such
// launches since CUDA 12.3.
inline unsigned load(const void* kernel, bool is_following, cudaError_t before) {
  constexpr int kWithThem = 12030, kWithWait = 90;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel", before);
  const char* const chosen = std::getenv("ONEPASS_CUDA_OVERLAP");
  if (!is_following || !chosen || chosen != std::string("always")) return kLoaded;
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  return driver >= kWithThem && attributes.ptxVersion >= kWithWait ? kLoaded | kEarly : kLoaded;
}

// The maximum: the limit belongs to the kernel, and another launch may need more. The driver would
// choose a part of the L1 cache by one block; several are to run side by side.
inline unsigned allow_large(const void* kernel, cudaError_t before) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(max_shared_bytes())),
        "asking for shared memory", before);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "asking for a part of the L1 cache", before);
  return kLarge;
}

// Prepares a kernel for launches on the current device, once for each kernel and device: the first
// launch may be inside a capture, where loading code is not allowed.
template <auto kKernel>
unsigned prepare(bool is_following, bool is_large, cudaError_t before) {
  constexpr int kDevices = 64;
  static std::atomic<unsigned> known[kDevices];
  const void* const kernel = reinterpret_cast<const void*>(kKernel);
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  unsigned found = device < kDevices ? known[device].load() : 0;
  const unsigned wanted = kLoaded | (is_large ? kLarge : 0u);
  if ((found & wanted) == wanted) return found;
  const OutsideCapture outside;
  if (!(found & kLoaded)) found |= load(kernel, is_following, before);
  if (is_large) found |= allow_large(kernel, before);
  if (device < kDevices) known[device].fetch_or(found);
  return found;
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
  const bool is_large = shape.shared_bytes > kWithoutAsking;
  const unsigned known = prepare<kKernel>(kIsFollowing, is_large, before);
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
  } else if (kIsFollowing && known & kEarly) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kKernel, args...), "starting a kernel", before);
}

#endif

}  // namespace onepass::cuda
