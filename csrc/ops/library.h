// The operators of a library, each stated once: its schema and its function. A family lists its
// own; library.cpp registers them all.
#pragma once

#include <torch/csrc/stable/library.h>

#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ops/backend.h"
#include "ops/fields.h"

namespace onepass {

struct OperatorEntry {
  using BoxedFunction = void(StableIValue*, uint64_t, uint64_t);
  std::string name;
  std::string arguments;
  std::string results;
  BoxedFunction* boxed;
  // The checks alone, as an operator `name`_check for every device, also "meta": there is nothing
  // to compute there, the fake gives the shapes, and this the errors. Or null.
  BoxedFunction* boxed_check;
};

// Thrown if there is no memory for a list of this library, such as the gradients of a step: a
// MemoryError in Python. For tensors allocate() reports the bytes instead.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const char* text) : text_(text) {}
  const char* what() const noexcept override { return text_; }

 private:
  const char* text_;
};

template <auto function>
struct Boxed {
  static std::string& no_memory() {  // made in advance: when it is needed, there is no memory
    static std::string text;
    return text;
  }
  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    try {
      TORCH_BOX(Packed<function>::call)(stack, arguments, results);
    } catch (const std::bad_alloc&) {
      throw OutOfMemory(no_memory().c_str());
    }
  }
};

template <auto function>
OperatorEntry::BoxedFunction* boxed(const std::string& name) {
  Boxed<function>::no_memory() = name + ": out of memory for the lists of the call";
  return &Boxed<function>::call;
}

// Calls a function that checks, for its errors alone.
template <auto check>
struct ErrorsOf;
template <class Result, class... Args, Result (*check)(Args...)>
struct ErrorsOf<check> {
  static void call(Args... args) { check(std::forward<Args>(args)...); }
};

// An operator, and its check, which takes the same arguments.
template <auto function>
OperatorEntry entry(const std::string& name, const char* arguments, const char* results) {
  return {name, arguments, results, boxed<function>(name), nullptr};
}
template <auto function, auto check>
OperatorEntry entry(const std::string& name, const char* arguments, const char* results) {
  return {name, arguments, results, boxed<function>(name),
          boxed<&ErrorsOf<check>::call>(name + "_check")};
}

using OperatorList = std::vector<OperatorEntry>;

// The list of each family.
#define ONEPASS_DECLARE_FAMILY(name) OperatorList name##_operators();
ONEPASS_FAMILIES(ONEPASS_DECLARE_FAMILY)

}  // namespace onepass
