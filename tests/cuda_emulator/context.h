// Switches from one stack to another; included by emulator.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#else
// Saves the registers that a function must preserve on its stack, and the stack in *from; continues
// on `to`.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
  .text
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#endif

namespace emulator {
namespace {

// The place where a fiber continues. swapcontext() would do, but it makes a system call for the
// signal mask each time: half of the time of a kernel that multiplies matrices.
#if defined(__x86_64__)

struct Context {
  void* stack;
};

void prepare(Context& context, char* memory, size_t bytes, void (*begin)()) {
  constexpr int kPreserved = 6;
  auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(memory + bytes) / 16 * 16);
  *--top = nullptr;  // where begin() would return to, which it never does
  *--top = reinterpret_cast<void*>(begin);
  for (int i = 0; i < kPreserved; ++i) *--top = nullptr;
  context.stack = top;
}

void switch_stacks(Context& from, Context& to) { emulator_switch(&from.stack, to.stack); }

#else

using Context = ucontext_t;

// A function of its own: getcontext may return twice as far as the compiler knows.
void prepare(Context& context, char* memory, size_t bytes, void (*begin)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = memory;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
}

void switch_stacks(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

}  // namespace
}  // namespace emulator
