// The interface of an op library to onepass._C: which code runs here, and the plans of its calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace onepass {

// One call, as its plan decided it.
struct Dispatch {
  std::string op;         // layer_norm, add_rms_norm_backward, ...
  std::string arguments;  // sizes and dtypes
  std::string level{};    // CPU level or CUDA architecture
  Plan plan{};
  int32_t threads = 1;
};

struct Host {
  const Backend& (*backend)();
  Machine (*machine)();
  std::vector<std::string> (*levels)();  // that this machine supports
  void (*record)(bool on);               // starts or stops recording
  std::vector<Dispatch> (*take)();       // the calls recorded since the last take
  int64_t (*regions)();                  // parallel regions entered so far, on the CPU
};

}  // namespace onepass
