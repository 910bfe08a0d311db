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

void implement(torch::stable::detail::StableLibrary& library, bool only_checks) {
  for (const OperatorEntry& entry : operators()) {
    if (entry.only_checks != only_checks) continue;
    const std::string schema = entry.schema;
    library.impl(schema.substr(0, schema.find('(')).c_str(), entry.boxed);
  }
}

}  // namespace
}  // namespace onepass

#ifdef ONEPASS_DEFINES_SCHEMAS
STABLE_TORCH_LIBRARY_FRAGMENT(ONEPASS_NAMESPACE, library) {
  for (const onepass::OperatorEntry& entry : onepass::operators()) {
    library.def(entry.schema);
  }
}
STABLE_TORCH_LIBRARY_IMPL(ONEPASS_NAMESPACE, CompositeExplicitAutograd, library) {
  onepass::implement(library, true);
}
#endif
STABLE_TORCH_LIBRARY_IMPL(ONEPASS_NAMESPACE, ONEPASS_DISPATCH_KEY, library) {
  onepass::implement(library, false);
}
