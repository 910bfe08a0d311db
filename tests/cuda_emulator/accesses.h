// How well the lanes of a warp access memory together: bank conflicts of shared memory, sectors of
// global memory. The kernels are compiled with -fsanitize=thread, so that each access of theirs is
// a call, and are linked with functions of ours (accesses.cpp) in the place of the sanitizer's.
//
// Lanes run one after the other, so what a warp does at once is put together later: accesses belong
// together that the lanes make at the same place of the code, under the same callers, for the same
// time since all lanes of the warp last met (at a barrier, a shuffle, an mma, a ldmatrix). A lane
// that skips a turn of a loop in which nobody meets is matched with others' turns from there on;
// so shapes without odd ends are counted exactly.
//
// Seen is every access to shared memory by plain C++, by ldmatrix and by cp.async (which writes as
// it is issued), and what goes through the functions of ptx.cuh to global memory. Not seen: what
// load_acquire polls, locals that a device would spill, arguments, and how far caches help.
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

// What warps were served with, and the least that it could have been.
struct Cost {
  uint64_t taken = 0;
  uint64_t least = 0;
};
// Of one kernel, where accesses are seen: of shared memory in wavefronts, of
// global memory in sectors of 32 bytes.
struct Accesses {
  Cost shared_reads, shared_writes;  // the first of cp.async among the latter
  Cost global_reads, global_writes;
};

// The address of an instruction, and of the calls that led to it, innermost first.
using Code = std::array<uintptr_t, 4>;

// By kernel, of all launches.
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
// Of 32 bytes, that are touched; and how many the bytes would fill.
Cost sectors(const WarpAccess& access);

// Of a thread: the calls that it is in.
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

// Of a warp, since its lanes last met.
class WarpAccesses {
 public:
  void add(Access access, int lane, uintptr_t address, size_t bytes, Callers::Site site);
  void end(const std::string& kernel);

 private:
  struct AtSite {
    int turns[kWarpSize] = {};  // of each lane so far
    std::vector<WarpAccess> of_turn;
  };
  std::unordered_map<uint64_t, AtSite> sites_;
};

Callers* callers();  // of the thread that runs; null where none does
void see_access(const void* address, size_t bytes, bool writes, const void* code);

// Of all launches, lines of "kernel", its name and four pairs: wavefronts and the least of them, of
// reads and of writes, then sectors; and for each place that takes more than the least, "site", the
// kernel's name, the addresses of its code and four pairs.
void print_accesses();

}  // namespace emulator
