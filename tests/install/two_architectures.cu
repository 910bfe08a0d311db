// A kernel that differs by architecture: in shared memory, launch bounds and code.

#if __CUDA_ARCH__ == 800
constexpr int kThreads = 128;
#else
constexpr int kThreads = 256;
#endif

extern "C" __global__ void __launch_bounds__(kThreads) kernel(float* x) {
#if __CUDA_ARCH__ == 900
  __shared__ float reversed[1024];
  reversed[1023 - threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = reversed[threadIdx.x];
#else
  x[threadIdx.x] *= 2;
#endif
}
