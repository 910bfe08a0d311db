// How well the lanes of a warp access memory together: bank conflicts of shared memory, sectors of
// global memory. The kernels are compiled with -fsanitize=thread, so that each access of theirs is
// a call, and are linked with functions of ours (accesses.cpp) in the place of the sanitizer's.
//
// Lanes run one after the other, so the accesses that a warp makes at once are put together later.
// Accesses of lanes belong together if they have the same place in the code, the same callers, and
// the same count since all lanes of the warp last met (at a barrier, a shuffle, an mma, a
// ldmatrix). If a lane skips an iteration of a loop without a meeting, its later iterations are
// matched with the wrong ones of other lanes; so only shapes without odd ends are counted exactly.
//
// It sees every access to shared memory by plain C++, by ldmatrix and by cp.async (which writes
// when it is issued), and accesses to global memory by the functions of ptx.cuh. It does not see
// the polling of load_acquire, locals that a device would spill, arguments, and the effect of
// caches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"

namespace emulator {

// The wavefronts or sectors that accesses took, and the least that they could have taken.
struct Cost {
  uint64_t taken = 0;
  uint64_t least = 0;
};
// The accesses of one kernel: to shared memory in wavefronts, to global memory in sectors of 32
// bytes.
struct Accesses {
  Cost shared_reads, shared_writes;  // cp.async counts as a write
  Cost global_reads, global_writes;
};

// The address of an instruction, and of the calls that led to it, innermost first.
using Code = std::array<uintptr_t, 4>;

// The accesses of all launches, by kernel.
const std::map<std::string, Accesses>& accesses();

enum class Access { kSharedRead, kSharedWrite, kGlobalRead, kGlobalWrite };

// One instruction of a warp.
struct WarpAccess {
  Access access;
  size_t bytes;  // of a lane
  Code code;
  unsigned lanes = 0;  // a mask
  uintptr_t address[kWarpSize] = {};
};

// A wavefront brings at most one 4-byte word of each of the 32 banks, to any number of lanes.
// Accesses of 8 bytes are served by half warps, of 16 bytes by quarters (as the rows of each matrix
// of ldmatrix are); each takes one wavefront at least.
Cost wavefronts(const WarpAccess& access);
// The sectors of 32 bytes that are touched, and the number that the bytes would fill.
Cost sectors(const WarpAccess& access);

// The calls that a thread is in.
class Callers {
 public:
  struct Site {
    uint64_t call;  // a digest of all the calls and the code
    Code code;
  };
  void enter(const void* code) { calls_.push_back({address(code), digest(code)}); }
  void leave() {
    if (!calls_.empty()) calls_.pop_back();
  }
  Site site(const void* code) const {
    Site found = {digest(code), {address(code)}};
    for (size_t i = 1; i < found.code.size() && i <= calls_.size(); ++i) {
      found.code[i] = calls_[calls_.size() - i].code;
    }
    return found;
  }

 private:
  struct Call {
    uintptr_t code;
    uint64_t digest;
  };
  static uintptr_t address(const void* code) { return reinterpret_cast<uintptr_t>(code); }
  uint64_t digest(const void* code) const {
    const uint64_t before = calls_.empty() ? 0 : calls_.back().digest;
    return (before ^ address(code)) * 0x9e3779b97f4a7c15u + (before >> 29);
  }

  std::vector<Call> calls_;
};

// The accesses of a warp since its lanes last met.
class WarpAccesses {
 public:
  void add(Access access, int lane, uintptr_t address, size_t bytes, Callers::Site site);
  void end(const std::string& kernel);

 private:
  struct AtSite {
    int turns[kWarpSize] = {};  // accesses of each lane so far
    std::vector<WarpAccess> of_turn;
  };
  std::unordered_map<uint64_t, AtSite> sites_;
};

Callers* callers();  // of the running thread; null if none runs
void see_access(const void* address, size_t bytes, bool writes, const void* code);

// Prints, for all launches, lines of "kernel", its name and four pairs: wavefronts and their least
// number, of reads and of writes, then the same for sectors; and for each place that takes more
// than the least, "site", the kernel's name, the addresses of its code and four pairs.
void print_accesses();

}  // namespace emulator
