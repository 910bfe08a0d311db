// Registers the operators of this library with torch. The sources of ops/ are compiled once for
// each back end. ONEPASS_NAMESPACE is the namespace of its operators, ONEPASS_DISPATCH_KEY the
// dispatch key of its kernels, and ONEPASS_DEFINES_SCHEMAS is set if the library defines the
// schemas. (The CUDA library adds kernels to schemas that the CPU library has defined.)
// ONEPASS_CUDA is set for the CUDA back end: the host may not read the memory of its tensors.
#include "ops/library.h"

#include <string>

#ifndef ONEPASS_NAMESPACE
#define ONEPASS_NAMESPACE onepass
#endif
#ifndef ONEPASS_DISPATCH_KEY
#define ONEPASS_DISPATCH_KEY CPU
#endif

namespace onepass {
namespace {

OperatorList operators() {
  OperatorList all;
#define ONEPASS_LIST_OF_FAMILY(name) name##_operators,
  for (const auto family : {ONEPASS_FAMILIES(ONEPASS_LIST_OF_FAMILY)}) {
    for (OperatorEntry& entry : family()) all.push_back(std::move(entry));
  }
  return all;
}

}  // namespace
}  // namespace onepass

#ifdef ONEPASS_DEFINES_SCHEMAS
namespace onepass {
namespace {

// Without the marks of arguments that are written to: a check only reads them.
std::string read_only(std::string arguments) {
  for (size_t at; (at = arguments.find("!)")) != std::string::npos;) {
    const size_t begin = arguments.rfind('(', at);
    arguments.erase(begin, at + 2 - begin);
  }
  return arguments;
}

}  // namespace
}  // namespace onepass

STABLE_TORCH_LIBRARY_FRAGMENT(ONEPASS_NAMESPACE, library) {
  for (const auto& [name, arguments, results, _, check] : onepass::operators()) {
    library.def((name + "(" + arguments + ") -> " + results).c_str());
    if (!check) continue;
    library.def((name + "_check(" + onepass::read_only(arguments) + ") -> ()").c_str());
  }
}
STABLE_TORCH_LIBRARY_IMPL(ONEPASS_NAMESPACE, CompositeExplicitAutograd, library) {
  for (const onepass::OperatorEntry& entry : onepass::operators()) {
    if (entry.boxed_check) library.impl((entry.name + "_check").c_str(), entry.boxed_check);
  }
}
#endif
STABLE_TORCH_LIBRARY_IMPL(ONEPASS_NAMESPACE, ONEPASS_DISPATCH_KEY, library) {
  for (const onepass::OperatorEntry& entry : onepass::operators()) {
    library.impl(entry.name.c_str(), entry.boxed);
  }
}
