// A CUDA device on the CPU, to test kernels where there is no GPU: it replaces the CUDA toolkit for
// the shipping .cu files when they are compiled with ONEPASS_EMULATE.
//
// A CUDA thread is a fiber, and all fibers run in turn on one OS thread, in an order drawn from a
// seed. A barrier or a warp collective yields until all threads that it waits for have arrived.
// Built four times: plain (which counts bytes of global memory); with the address and
// undefined-behaviour sanitizers; with the thread sanitizer, for which every CUDA thread is a
// separate thread; and with that sanitizer's calls at each access replaced by functions that count
// bank conflicts and sectors (accesses.h).
//
// Ordering follows the PTX memory model, so that real races stay visible to the thread sanitizer:
// only __syncthreads, __syncwarp and acquire/release atomics order memory. Shuffles, ballots, mma
// and ldmatrix make lanes meet and order nothing.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__ &  // it follows the type: no copy for each thread here either
#define __restrict__ __restrict

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

inline constexpr int kWarpSize = 32;
// Settings, from here or else from the environment of a program: seed, of the order of blocks and
// threads; resident, the least number of blocks that run at the same time; shared, the bytes of a
// block; l2, in bytes; multiprocessors; capability, 86 for 8.6; truncates, the number of products
// of 16-bit matrices that tensor cores add at once and truncate: 16 (an H100), 8 (an A100), 0 for
// rounded sums. Defaults are those of an H100.
std::map<std::string, int64_t>& settings();
size_t max_shared_bytes();
size_t l2_bytes();
int64_t multiprocessors();
int64_t capability();
int64_t truncates();
inline constexpr uint8_t kPoison = 0xff;  // a NaN in every float type

// The fiber that is running.
struct Self {
  dim3 thread, block, block_size, grid_size;
  int lane;
};
namespace detail {
extern const Self* running;
}
inline const Self& self() { return *detail::running; }

// Throws, out of launch() as well: the kernel broke a rule of the programming model.
[[noreturn]] void fail(const std::string& what);
[[noreturn]] void fail_misaligned(const char* what, size_t bytes);

// Guard bands, first byte to end. They are filled with poison; addresses from which poison was read
// are looked up here.
std::map<uintptr_t, uintptr_t>& guard_bands();
void check_beside(const void* address, size_t bytes, const char* what);  // fails if inside a band

void block_barrier();
void warp_barrier(unsigned mask, const char* what);
// An exchange between the lanes of a mask, which deposit `bytes` each (at most kMaxDeposit): each
// lane makes one, and reads it before they meet again.
inline constexpr size_t kMaxDeposit = 64;
class Exchange {
 public:
  // Called by the lane that arrives last, to compute something once for all lanes.
  using Finish = void (*)(Exchange& all);

  Exchange(unsigned mask, const char* what, const void* mine, size_t bytes,
           Finish finish = nullptr);
  explicit Exchange(unsigned char (*deposits)[kMaxDeposit]) : deposits_(deposits) {}
  template <class T>
  void get(int lane, T* value) const {
    copy(value, deposits_[lane], sizeof(T));
  }
  template <class T>
  void put(int lane, const T& value) {
    copy(deposits_[lane], &value, sizeof(T));
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
    copy_unseen(to, from, bytes);
#else
    std::memcpy(to, from, bytes);
#endif
  }
  static void copy_unseen(void* to, const void* from, size_t bytes);  // sanitizers do not see it

  unsigned char (*deposits_)[kMaxDeposit];
};
// Lets the others run; for loops that wait for another block.
void spin();

// `bytes` of the block's shared memory from `offset`, the `index`-th piece that is taken. Pieces
// have poisoned gaps between them.
void* shared_piece(size_t offset, size_t bytes, int index);

struct Counters {
  uint64_t global_read = 0;     // bytes
  uint64_t global_written = 0;  // bytes
  uint64_t launches = 0;
  uint64_t shared = 0;  // bytes of a block, the maximum of all launches
};
const Counters& counters();
void forget_counted();  // and the launches
void count_read(const void* address, size_t bytes);
void count_written(const void* address, size_t bytes);
// While one exists, the thread's writes to shared memory do not count as its kernel's.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
};

// One cp.async in flight, and the running thread's groups of them: oldest first, the last one open.
struct Copy {
  void* shared;
  const void* global;
  int bytes;
  bool valid;
  unsigned char source[16];  // its bytes when it was issued
};
std::vector<std::vector<Copy>>& copies_in_flight();

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  int resident = 1;  // blocks that run at the same time, or the setting if that is more
  const char* kernel = "";
};
void launch(const Launch& launch, const std::function<void()>& kernel);

// Every kernel that the program could launch, and the launches, in order.
std::vector<std::string>& kernels();
const std::vector<Launch>& launched();

// The instance's name. A use of it lists the kernel, even if that line is never reached.
template <auto kKernel>
class KernelName {
 public:
  static const char* get() {
    (void)kListed;
    return __PRETTY_FUNCTION__;
  }

 private:
  static inline const bool kListed = (kernels().push_back(get()), true);
};

// From here on blocks and threads run in the order of the seed.
void reseed();

// Lane `source`'s value for each lane; a source outside the mask is an error.
template <class T>
T shuffle(unsigned mask, const char* what, T value, int source) {
  const Exchange all(mask, what, &value, sizeof(T));
  if (!(mask >> source & 1)) fail(std::string(what) + " reads a lane that is not in its mask");
  T result;
  all.get(source, &result);
  return result;
}

}  // namespace emulator

#define threadIdx (::emulator::self().thread)
#define blockIdx (::emulator::self().block)
#define blockDim (::emulator::self().block_size)
#define gridDim (::emulator::self().grid_size)

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::warp_barrier(mask, "__syncwarp"); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::shuffle(mask, "__shfl_sync", value, lane % emulator::kWarpSize);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::shuffle(mask, "__shfl_xor_sync", value, emulator::self().lane ^ lanes);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
  const int lane = emulator::self().lane;
  return emulator::shuffle(mask, "__shfl_down_sync", value,
                           lane + delta < emulator::kWarpSize ? lane + delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const emulator::Exchange all(mask, "__ballot_sync", &predicate, sizeof(predicate));
  unsigned bits = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    if (!(mask >> lane & 1)) continue;
    bool voted;
    all.get(lane, &voted);
    if (voted) bits |= 1u << lane;
  }
  return bits;
}
