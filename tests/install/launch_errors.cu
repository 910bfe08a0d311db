// A launch on a runtime that fails as it is told: `launch_errors PENDING FAILING` prints what the
// launch throws where one error is pending and the launch returns another (0: none), and then
// what is pending. `launch_errors DRIVER PTX following` prints the attribute of two launches of a
// kernel that follows another, for a version of the driver and of the kernel's code.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "cuda/launch.cuh"

namespace {

cudaError_t pending = cudaSuccess, failing = cudaSuccess;
int driver = 0, code = 0, asked = 0;
bool is_following = false;

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
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
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
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// Of a program that nvcc has made.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
}

#endif

void nothing(int) {}  // no kernel, which would need more of the runtime

int main(int count, char** words) {
  if (count > 3) {
    is_following = true;
    driver = std::atoi(words[1]), code = std::atoi(words[2]);
    for (int i = 0; i < 2; ++i) {
      onepass::cuda::launch<nothing, onepass::cuda::kFollows>({.blocks = 1, .threads = 32}, nullptr,
                                                              1);
    }
    onepass::cuda::launch<nothing>({.blocks = 1, .threads = 32}, nullptr, 1);
    std::printf("asked: %d\n", asked);
    return 0;
  }
  pending = static_cast<cudaError_t>(std::atoi(words[1]));
  failing = static_cast<cudaError_t>(std::atoi(words[2]));
  try {
    onepass::cuda::launch<nothing>({.blocks = 1, .threads = 32}, nullptr, 1);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
  std::printf("pending: %d\n", static_cast<int>(pending));
}
