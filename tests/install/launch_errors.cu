// A launch on a runtime that fails as it is told: `launch_errors PENDING FAILING` prints what the
// launch throws where one error is pending and the launch returns another (0: none), and then
// what is pending. `launch_errors DRIVER PTX following` prints the attribute of two launches of a
// kernel that follows another, for a version of the driver and of the kernel's code.
// `launch_errors SHARED_BYTES` prints what two launches asked for while the thread captures a graph
// in the strictest mode, where code may be loaded in the relaxed one alone.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "cuda/launch.cuh"

namespace {

cudaError_t pending = cudaSuccess, failing = cudaSuccess;
int driver = 0, code = 0, asked = 0;
bool is_following = false, is_capturing = false;
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

cudaError_t unless_capturing() {
  const bool is_allowed = !is_capturing || mode == cudaStreamCaptureModeRelaxed;
  return is_allowed ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

}  // namespace

#ifndef __CUDA_ARCH__  // where the toolkit has bodies of its own

// The runtime's functions that a launch calls.
extern "C" {

cudaError_t CUDARTAPI cudaPeekAtLastError() { return pending; }
cudaError_t CUDARTAPI cudaGetLastError() { return std::exchange(pending, cudaSuccess); }
const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "an illegal address" : "another error";
}
cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  if (is_following) {
    const bool early = config->numAttrs == 1 &&
                       config->attrs->id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                       config->attrs->val.programmaticStreamSerializationAllowed == 1;
    std::puts(early ? "early" : config->numAttrs == 0 ? "in turn" : "otherwise");
  }
  if (failing != cudaSuccess) pending = failing;
  return failing;
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  const bool is_size = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
  std::printf("%s %d\n", is_size ? "shared memory" : "carveout", value);
  return unless_capturing();
}
cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = driver;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = code;
  ++asked;
  return unless_capturing();
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 232448;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// Of a program that nvcc has made.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
}

#endif

void nothing(int) {}  // no kernel, which would need more of the runtime

void launch(size_t shared_bytes = 0) {
  onepass::cuda::launch<nothing>({.blocks = 1, .threads = 32, .shared_bytes = shared_bytes},
                                 nullptr, 1);
}

int main(int count, char** words) {
  if (count == 2) {
    is_capturing = true;
    launch();
    for (int i = 0; i < 2; ++i) launch(std::atoi(words[1]));
    std::printf("loaded: %d, mode: %s\n", asked,
                mode == cudaStreamCaptureModeGlobal ? "as before" : "another");
    return 0;
  }
  if (count > 3) {
    is_following = true;
    driver = std::atoi(words[1]), code = std::atoi(words[2]);
    for (int i = 0; i < 2; ++i) {
      onepass::cuda::launch<nothing, onepass::cuda::kFollows>({.blocks = 1, .threads = 32}, nullptr,
                                                              1);
    }
    launch();
    std::printf("asked: %d\n", asked);
    return 0;
  }
  pending = static_cast<cudaError_t>(std::atoi(words[1]));
  failing = static_cast<cudaError_t>(std::atoi(words[2]));
  try {
    launch();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
  std::printf("pending: %d\n", static_cast<int>(pending));
}
