// Arithmetic of sizes.
#pragma once

#include <cstdint>

namespace onepass {

constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace onepass
