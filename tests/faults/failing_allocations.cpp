// Preloaded into a process: lets the n-th allocation after fail_at(n) fail, of those that torch's
// CPU tensors (posix_memalign) and our libraries (operator new) make. 0 lets all succeed.
#include <dlfcn.h>
#include <errno.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> remaining{0};
std::atomic<long> seen{0};
std::atomic<long> failed{0};
std::atomic<bool> counting{false};
std::atomic<size_t> smallest{0};

bool fails() {
  if (!counting) return false;
  ++seen;
  if (remaining == 0 || --remaining != 0) return false;
  ++failed;
  return true;
}

// Where the code of our libraries lies.
struct Range {
  uintptr_t begin;
  uintptr_t end;
};
Range ranges[8];
int range_count = 0;

int note(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "libonepass") == nullptr || range_count == 8) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X)) continue;
    const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
    if (range_count < 8) ranges[range_count++] = {begin, begin + segment.p_memsz};
  }
  return 0;
}

bool is_ours(const void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(caller);
  for (int i = 0; i < range_count; ++i) {
    if (address >= ranges[i].begin && address < ranges[i].end) return true;
  }
  return false;
}

void* allocated(size_t size, const void* caller) {
  if (counting && is_ours(caller) && fails()) throw std::bad_alloc();
  void* memory = std::malloc(size != 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" {

// Called once our libraries are loaded.
int failing_allocations_find() {
  range_count = 0;
  dl_iterate_phdr(note, nullptr);
  return range_count;
}

void failing_allocations_begin(long at) {
  remaining = at;
  seen = failed = 0;
  counting = true;
}

// How many allocations were counted; whether one failed.
long failing_allocations_end(long* has_failed) {
  counting = false;
  *has_failed = failed;
  return seen;
}

int posix_memalign(void** memory, size_t alignment, size_t size) {
  using Function = int (*)(void**, size_t, size_t);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  if (fails()) {
    *memory = nullptr;
    return ENOMEM;
  }
  return real(memory, alignment, size);
}

}  // extern "C"

void* operator new(size_t size) { return allocated(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return allocated(size, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
