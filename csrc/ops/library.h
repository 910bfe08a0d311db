// The operators of a library, each stated once: its schema and the function behind it. A family
// lists its own; library.cpp registers them all.
#pragma once

#include <torch/csrc/stable/library.h>

#include <vector>

namespace onepass {

struct OperatorEntry {
  const char* schema;                                // "name(arguments) -> results"
  void (*boxed)(StableIValue*, uint64_t, uint64_t);  // TORCH_BOX of the function
  bool only_checks = false;                          // one for every device, "meta" too
};

using OperatorList = std::vector<OperatorEntry>;

OperatorList norm_operators();
OperatorList dropout_operators();
OperatorList optimizer_operators();
OperatorList attention_operators();
OperatorList attention_decode_operators();

}  // namespace onepass
