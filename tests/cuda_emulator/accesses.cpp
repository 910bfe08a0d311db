// The costs of the accesses of warps (accesses.h), and the functions that code compiled for the
// thread sanitizer calls. Linked instead of it; in the other builds nothing calls them.
#include "accesses.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace emulator {
namespace {

constexpr size_t kBankBytes = 4;
constexpr int kBanks = 32;
constexpr size_t kSectorBytes = 32;
constexpr size_t kMostAtOnce = 16;  // bytes that a lane accesses by one instruction

struct Counted {
  std::map<std::string, Accesses> of_kernel;
  std::map<std::string, std::map<Code, Accesses>> of_code;
};

Counted& all() {
  static auto* const one = new Counted;
  return *one;
}

void sort_unique(std::vector<uintptr_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

// The units of `size` bytes that the lanes of a mask touch.
std::vector<uintptr_t> touched(const WarpAccess& access, unsigned lanes, size_t size) {
  std::vector<uintptr_t> units;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!(access.lanes & lanes & 1u << lane)) continue;
    const uintptr_t begin = access.address[lane], end = begin + access.bytes;
    for (uintptr_t unit = begin / size; unit * size < end; ++unit) units.push_back(unit);
  }
  sort_unique(units);
  return units;
}

void add(Cost& to, const Cost& cost) {
  to.taken += cost.taken;
  to.least += cost.least;
}

void add(Accesses& to, const WarpAccess& access) {
  switch (access.access) {
    case Access::kSharedRead:
      return add(to.shared_reads, wavefronts(access));
    case Access::kSharedWrite:
      return add(to.shared_writes, wavefronts(access));
    case Access::kGlobalRead:
      return add(to.global_reads, sectors(access));
    case Access::kGlobalWrite:
      return add(to.global_writes, sectors(access));
  }
}

void print(const Accesses& counted) {
  for (const Cost& cost :
       {counted.shared_reads, counted.shared_writes, counted.global_reads, counted.global_writes}) {
    std::printf("\t%llu\t%llu", static_cast<unsigned long long>(cost.taken),
                static_cast<unsigned long long>(cost.least));
  }
  std::printf("\n");
}

bool is_least(const Accesses& counted) {
  for (const Cost& cost :
       {counted.shared_reads, counted.shared_writes, counted.global_reads, counted.global_writes}) {
    if (cost.taken != cost.least) return false;
  }
  return true;
}

}  // namespace

const std::map<std::string, Accesses>& accesses() { return all().of_kernel; }

Cost wavefronts(const WarpAccess& access) {
  const int together = access.bytes <= kBankBytes ? kWarpSize : access.bytes == 8 ? 16 : 8;
  Cost cost;
  for (int first = 0; first < kWarpSize; first += together) {
    const unsigned lanes = (together == kWarpSize ? ~0u : (1u << together) - 1) << first;
    if (!(access.lanes & lanes)) continue;
    int words[kBanks] = {};
    for (const uintptr_t word : touched(access, lanes, kBankBytes)) ++words[word % kBanks];
    cost.taken += *std::max_element(words, words + kBanks);
    ++cost.least;
  }
  return cost;
}

Cost sectors(const WarpAccess& access) {
  const size_t bytes = touched(access, ~0u, 1).size();
  return {touched(access, ~0u, kSectorBytes).size(), (bytes + kSectorBytes - 1) / kSectorBytes};
}

void WarpAccesses::add(Access access, int lane, uintptr_t address, size_t bytes,
                       Callers::Site site) {
  // An access wider than any instruction counts as several.
  size_t at_once = kMostAtOnce;
  while (bytes % at_once != 0) at_once /= 2;
  for (size_t done = 0; done < bytes; done += at_once) {
    AtSite& here = sites_[(site.call ^ static_cast<uint64_t>(access)) * 64 + done / at_once];
    const auto turn = static_cast<size_t>(here.turns[lane]++);
    if (turn >= here.of_turn.size()) {
      here.of_turn.push_back({.access = access, .bytes = at_once, .code = site.code});
    }
    WarpAccess& of_turn = here.of_turn[turn];
    of_turn.lanes |= 1u << lane;
    of_turn.address[lane] = address + done;
  }
}

void WarpAccesses::end(const std::string& kernel) {
  for (const auto& [call, here] : sites_) {
    for (const WarpAccess& access : here.of_turn) {
      emulator::add(all().of_kernel[kernel], access);
      emulator::add(all().of_code[kernel][access.code], access);
    }
  }
  sites_.clear();
}

void print_accesses() {
  for (const auto& [kernel, counted] : accesses()) {
    std::printf("kernel\t%s", kernel.c_str());
    print(counted);
  }
  for (const auto& [kernel, places] : all().of_code) {
    for (const auto& [code, counted] : places) {
      if (is_least(counted)) continue;
      std::printf("site\t%s\t", kernel.c_str());
      for (const uintptr_t address : code) {
        std::printf("%llx ", static_cast<unsigned long long>(address));
      }
      print(counted);
    }
  }
}

}  // namespace emulator

#if defined(EMULATOR_ACCESSES)

using emulator::see_access;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void* code) {
  if (auto* const callers = emulator::callers()) callers->enter(code);
}
void __tsan_func_exit() {
  if (auto* const callers = emulator::callers()) callers->leave();
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define CODE __builtin_return_address(0)
#define OF_BYTES(bytes)                                                                         \
  void __tsan_read##bytes(void* address) { see_access(address, bytes, false, CODE); }           \
  void __tsan_write##bytes(void* address) { see_access(address, bytes, true, CODE); }           \
  void __tsan_unaligned_read##bytes(void* address) { see_access(address, bytes, false, CODE); } \
  void __tsan_unaligned_write##bytes(void* address) { see_access(address, bytes, true, CODE); }
OF_BYTES(1)
OF_BYTES(2)
OF_BYTES(4)
OF_BYTES(8)
OF_BYTES(16)
void __tsan_read_range(void* address, size_t bytes) { see_access(address, bytes, false, CODE); }
void __tsan_write_range(void* address, size_t bytes) { see_access(address, bytes, true, CODE); }

// ptx.cuh's functions have counted these; one byte says whether a static local has been made.
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_load(const volatile uint32_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(volatile uint32_t* address, uint32_t value, int) {
  __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* address, uint32_t value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_compare_exchange_strong(volatile uint32_t* address, uint32_t* expected,
                                            uint32_t value, int, int) {
  return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_compare_exchange_weak(volatile uint32_t* address, uint32_t* expected,
                                          uint32_t value, int, int) {
  return __tsan_atomic32_compare_exchange_strong(address, expected, value, 0, 0);
}

}  // extern "C"

#endif
