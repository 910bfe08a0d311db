// Shared by the programs of planted faults: a kernel with one fault each, beside the same kernel
// without it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "cuda/launch.cuh"

namespace {

using namespace onepass;
using namespace onepass::cuda;

constexpr int kThreads = 64;

// Exact allocations: the address sanitizer's red zones follow them directly.
struct Free {
  void operator()(float* values) const { std::free(values); }
};
struct Buffers {
  std::unique_ptr<float[], Free> input{allocated()}, output{allocated()};
  static float* allocated() {  // as aligned as a sector
    return static_cast<float*>(std::aligned_alloc(32, kThreads * sizeof(float)));
  }
  Buffers() {
    for (int i = 0; i < kThreads; ++i) {
      input[i] = static_cast<float>(i);
      output[i] = -1.0f;
    }
  }
  // output[i] == expected(i)
  template <class Expected>
  bool holds(Expected expected) const {
    for (int i = 0; i < kThreads; ++i) {
      if (!(output[i] == expected(i))) {
        std::fprintf(stderr, "wrong value: output[%d] is %g, not %g\n", i, output[i],
                     static_cast<double>(expected(i)));
        return false;
      }
    }
    return true;
  }
};

int thread() { return static_cast<int>(threadIdx.x); }

struct alignas(16) Four {
  float value[4];
};

template <auto kKernel>
bool run(int shift) {
  Buffers buffers;
  launch<kKernel>({.blocks = 1, .threads = kThreads, .shared_bytes = 2048}, nullptr,
                  static_cast<const float*>(buffers.input.get()), buffers.output.get());
  return buffers.holds([&](int i) { return static_cast<float>((i + shift) % kThreads); });
}

struct Pair {
  bool (*faulty)(int);
  bool (*right)(int);
  int shift = 0;
};

#define PAIR(runner, kernel) runner<kernel<true>>, runner<kernel<false>>

// `PROGRAM NAME` runs the faulty one, `PROGRAM NAME right` the right one; without a name it prints
// all of them.
inline int run_fault(const std::map<std::string, Pair>& pairs, int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, pair] : pairs) std::puts(name.c_str());
    return 0;
  }
  const Pair& pair = pairs.at(argv[1]);
  const bool faulty = argc == 2;
  emulator::reseed();
  return (faulty ? pair.faulty : pair.right)(pair.shift) ? 0 : 1;
}

}  // namespace
