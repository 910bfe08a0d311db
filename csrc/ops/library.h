// The operators of a library, each stated once: its schema and its function. A family lists its
// own; library.cpp registers them all.
#pragma once

#include <torch/csrc/stable/library.h>

#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ops/backend.h"

namespace onepass {

struct OperatorEntry {
  const char* schema;  // "name(arguments) -> results"
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
  bool only_checks;  // registered for every device, also "meta"
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
      TORCH_BOX(function)(stack, arguments, results);
    } catch (const std::bad_alloc&) {
      throw OutOfMemory(no_memory().c_str());
    }
  }
};

// {schema, function}; only_checks: see OperatorEntry.
template <auto function>
OperatorEntry entry(const char* schema, bool only_checks = false) {
  const std::string text = schema;
  Boxed<function>::no_memory() =
      text.substr(0, text.find('(')) + ": out of memory for the lists of the call";
  return {schema, &Boxed<function>::call, only_checks};
}

using OperatorList = std::vector<OperatorEntry>;

// The list of each family.
#define ONEPASS_DECLARE_FAMILY(name) OperatorList name##_operators();
ONEPASS_FAMILIES(ONEPASS_DECLARE_FAMILY)

}  // namespace onepass
