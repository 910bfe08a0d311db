// The settings of the emulated device and of its runs.
#include <cctype>
#include <cstdlib>

#include "emulator.h"

namespace emulator {

std::map<std::string, int64_t>& settings() {
  static auto* const all = [] {
    auto* values = new std::map<std::string, int64_t>{{"seed", 0},
                                                      {"resident", 1},
                                                      {"shared", 227 * 1024},
                                                      {"l2", 50 << 20},
                                                      {"multiprocessors", 132},
                                                      {"capability", 90},
                                                      {"truncates", 16},
                                                      {"current", 1}};  // is the tensors' device
    for (auto& [name, value] : *values) {
      std::string variable = "EMULATOR_" + name;
      for (char& letter : variable) letter = static_cast<char>(std::toupper(letter));
      if (const char* const text = std::getenv(variable.c_str())) value = std::atoll(text);
    }
    return values;
  }();
  return *all;
}

// A runtime answers for the current device, whatever a call's tensors are on.
static int64_t of_current_device(const char* setting) {
  if (!settings().at("current")) fail("a plan asks what the current device has, not the tensors'");
  return settings().at(setting);
}

size_t max_shared_bytes() { return static_cast<size_t>(of_current_device("shared")); }
size_t l2_bytes() { return static_cast<size_t>(of_current_device("l2")); }
int64_t multiprocessors() { return of_current_device("multiprocessors"); }
int64_t capability() { return settings().at("capability"); }
int64_t truncates() {
  static const int64_t& chosen = settings().at("truncates");  // at every product of matrices
  return chosen;
}

}  // namespace emulator
