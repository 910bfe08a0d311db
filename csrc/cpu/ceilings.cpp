// Twelve independent chains keep two pipes of four cycles' latency busy with room to spare. The
// empty asm stops the compiler from folding the loop, and keeps every chain in a register.
#include "cpu/ceilings.h"

#include <chrono>

#include "cpu/vec_bytes.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int kChains = 12;
constexpr int kRepeats = 4096;

// The best rate of batch(), which does `flops` operations, over about `seconds`.
template <class Batch>
double best_gflops(double seconds, double flops, Batch&& batch) {
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  double best = 0;
  const Clock::time_point start = Clock::now();
  do {
    const Clock::time_point begin = Clock::now();
    batch();
    const double rate = flops / elapsed(begin) * 1e-9;
    best = rate > best ? rate : best;
  } while (elapsed(start) < seconds);
  return best;
}

}  // namespace

double fma_ceiling(double seconds) {
  constexpr double kFlops = 2.0 * kChains * kRepeats * kLanes<float>;
  return best_gflops(seconds, kFlops, [] {
    Vec<float> sum[kChains] = {};
    Vec<float> a = broadcast<float>(0.5f);
    Vec<float> b = broadcast<float>(0.25f);
    for (int i = 0; i < kRepeats; ++i) {
      for (int c = 0; c < kChains; ++c) {
        sum[c] = fma<float>(sum[c], a, b);
#if defined(__x86_64__)
        asm volatile("" : "+x"(sum[c]));
#else
        asm volatile("" : "+w"(sum[c]));
#endif
      }
    }
  });
}

double bf16_dot_ceiling(double seconds) {
#if defined(__AVX512BF16__)
  constexpr double kFlops = 2.0 * kChains * kRepeats * 2 * kLanes<float>;
  return best_gflops(seconds, kFlops, [] {
    __m512 sum[kChains] = {};
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00);
    for (int i = 0; i < kRepeats; ++i) {
      for (int c = 0; c < kChains; ++c) {
        sum[c] = _mm512_dpbf16_ps(sum[c], a, a);
        asm volatile("" : "+x"(sum[c]));
      }
    }
  });
#else
  (void)seconds;
  return 0;
#endif
}

double int8_dot_ceiling(double seconds) {
#if defined(__AVX2__)
  constexpr double kOperations = 2.0 * kChains * kRepeats * 4 * kLanes<float>;
  return best_gflops(seconds, kOperations, [] {
    SignedWords sum[kChains] = {};
    const WordBits a = WordBits{} + 0x01010101u;
    for (int i = 0; i < kRepeats; ++i) {
      for (int c = 0; c < kChains; ++c) {
        sum[c] = multiply_add_bytes(a, a, sum[c]);
        asm volatile("" : "+x"(sum[c]));
      }
    }
  });
#else
  (void)seconds;
  return 0;
#endif
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
