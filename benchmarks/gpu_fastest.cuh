// Shared by the programs that time kernels without torch.
#pragma once

#include <chrono>

#include "cuda/launch.cuh"

namespace onepass::cuda {

constexpr int kRounds = 7;  // at least
// Long enough for samples of clock and power: BUSY of gpu_load.py.
constexpr double kBusySeconds = 0.5;

// Seconds of the fastest of all calls that begin within kBusySeconds, kRounds or more.
template <class Call>
double fastest(Call&& call) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event");
  check(cudaEventCreate(&end), "an event");
  double best = 0.0;
  Clock::time_point start;
  for (int round = 0; round <= kRounds || since(start) < kBusySeconds; ++round) {
    check(cudaEventRecord(begin), "an event");
    call();
    check(cudaEventRecord(end), "an event");
    check(cudaEventSynchronize(end), "waiting for a kernel");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
    const double seconds = milliseconds / 1e3;
    if (round == 0) start = Clock::now();  // the first one loads it
    if (round == 1 || (round > 1 && seconds < best)) best = seconds;
  }
  check(cudaEventDestroy(begin), "an event");
  check(cudaEventDestroy(end), "an event");
  return best;
}

}  // namespace onepass::cuda
