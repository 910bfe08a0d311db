// A thin wrapper for each instruction that plain CUDA C++ does not offer. Under the emulator the
// same names come from tests/cuda_emulator/device.h, so kernels contain no asm.
//
// Fragments are those of the PTX ISA's figures for mma.m16n8k16 and mma.m16n8k8; g is lane / 4 and
// t is lane % 4 throughout.
#pragma once

#include <cstdint>

#include "core/dtype.h"

#ifdef ONEPASS_EMULATE
#include <cuda_emulator/device.h>
#define ONEPASS_UNROLL
#define ONEPASS_ROLL
#else

#include <cuda_runtime.h>

// Before a loop over an array that must stay in registers.
#define ONEPASS_UNROLL _Pragma("unroll")
// Before a loop that must not be unrolled: its iterations side by side need too many registers.
#define ONEPASS_ROLL _Pragma("unroll 1")

namespace onepass::cuda {

// ---- matrix multiply-accumulate: d += a * b -----------------------------------------------------

// a: 16 x 16 row-major, b: 16 x 8 column-major, 16-bit pairs with the lower column (row of b) in
// the low half; d: 16 x 8 float32.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (__is_same(T, BFloat16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(__is_same(T, Float16));
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// a: 16 x 8 row-major, b: 8 x 8 column-major, float32 bits of which tf32 keeps the upper 19. Sums
// are truncated to float32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// kMatrices 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row
// i % 8 of matrix i / 8 (16 aligned bytes) and receives row g, columns 2t and 2t + 1, of each;
// transposed: column g, rows 2t and 2t + 1.
template <int kMatrices, bool kTranspose>
__device__ __forceinline__ void ldmatrix(uint32_t (&d)[kMatrices], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kMatrices == 1 && !kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(d[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(d[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2 && !kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (!kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
  }
}

// The transpose of an 8 x 8 matrix of 16-bit elements: a lane gives row g, columns 2t and 2t + 1,
// and receives column g, rows 2t and 2t + 1.
__device__ __forceinline__ uint32_t movmatrix_transposed(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// ---- asynchronous copies, global to shared ------------------------------------------------------

// 16 aligned bytes; with `valid` false, 16 zero bytes and no read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same of kBytes, 4 or 8, as aligned; these go through the L1.
template <int kBytes>
__device__ __forceinline__ void cp_async_few(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8);
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? kBytes : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global),
               "n"(kBytes), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of the thread's own groups are in flight; data that other threads
// copied needs a barrier after it.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A hint: loads the 128-byte line of an address into L2.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- ordered access to global memory ------------------------------------------------------------

__device__ __forceinline__ uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// *address += value, in any order of the blocks; it orders no other access.
__device__ __forceinline__ void add_global(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// The same for four neighbours, 16-byte aligned: one instruction if adds_four().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && \
    __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
__device__ __forceinline__ constexpr bool adds_four() { return true; }
__device__ __forceinline__ void add_global_4(float* address, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}
#else
__device__ __forceinline__ constexpr bool adds_four() { return false; }
__device__ __forceinline__ void add_global_4(float* address, const float (&value)[4]) {
  for (int i = 0; i < 4; ++i) add_global(address + i, value[i]);
}
#endif

// In loops that wait for another block.
__device__ __forceinline__ void spin() { __nanosleep(20); }

// ---- kernels that overlap: see launch() with kFollows -------------------------------------------

// Returns when the kernel before this one has ended and its writes are visible. All threads of a
// kernel that follows call it first, so a third kernel, after that one, also comes after the first.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of a kernel that follows may start, and wait, when each block of this one has called it or
// has ended. It orders nothing.
__device__ __forceinline__ void start_kernel_after() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- plain access to global memory: the loads and stores that a traffic test counts -------------

template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *address;
}

// Of 8 or 16 aligned bytes by one instruction: the compiler splits such stores of a struct.
template <class T>
__device__ __forceinline__ void store_global(T* address, const T& value) {
  if constexpr (sizeof(T) == 16 && alignof(T) == 16) {
    uint32_t word[4];
    __builtin_memcpy(word, &value, sizeof(word));
    asm volatile(
        "st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)),
        "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
        : "memory");
  } else if constexpr (sizeof(T) == 8 && alignof(T) == 8 && !__is_same(T, double)) {
    uint32_t word[2];
    __builtin_memcpy(word, &value, sizeof(word));
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)),
                 "r"(word[0]), "r"(word[1])
                 : "memory");
  } else {
    *address = value;
  }
}

// ---- arithmetic ---------------------------------------------------------------------------------

// a * b + c, rounded once. Only here: --fmad=false forbids the compiler to fuse elsewhere, so that
// the emulator computes the same bits as a device.
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return __fma_rn(a, b, c);
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to a unit in the last place.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to a pair of 16-bit elements, `low` in the low half; nearest, ties to even.
template <class T>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint32_t pair;
  if constexpr (__is_same(T, BFloat16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(__is_same(T, Float16));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

__device__ __forceinline__ float widen_half(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Hides the value from the compiler: earlier results that depend on it are recomputed instead of
// being kept in registers.
__device__ __forceinline__ void forget(uint32_t& bits) { asm volatile("" : "+r"(bits)); }

// threadIdx.x, read again at each call instead of being kept in a register.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0);  // divisions by powers of two are shifts
  return index;
}

// ---- shared memory ------------------------------------------------------------------------------

extern __shared__ __align__(1024) unsigned char shared_memory[];

// `index` numbers the pieces of a kernel; the emulator keeps gaps between them.
template <class T>
__device__ __forceinline__ T* shared_piece(int offset, int /*bytes*/, int /*index*/) {
  return reinterpret_cast<T*>(shared_memory + offset);
}

// The address of shared memory: a multiple of 1,024, so that the lower bits of an offset are those
// of shared_base() + offset, and may be changed by an exclusive-or there.
__device__ __forceinline__ uint32_t shared_base() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
}

// piece + offset in bytes; `place`: shared_base() + offset.
template <class T>
__device__ __forceinline__ T* at_place(T* piece, uint32_t place) {
  const auto first = static_cast<uint32_t>(__cvta_generic_to_shared(piece)) - shared_base();
  return static_cast<T*>(__cvta_shared_to_generic(first + place));
}

}  // namespace onepass::cuda

#endif  // ONEPASS_EMULATE

namespace onepass::cuda {

inline constexpr int kLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The shared memory of a block. All threads take the same pieces in the same order. All of it is
// dynamic: the launch states the size.
class SharedMemory {
 public:
  template <class T>
  __device__ __forceinline__ T* take(int count) {
    const int bytes = (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
    T* piece = shared_piece<T>(offset_, bytes, index_);
    offset_ += bytes;
    ++index_;
    return piece;
  }

 private:
  int offset_ = 0;
  int index_ = 0;
};

}  // namespace onepass::cuda
