// What may be set of the emulated device and of how it runs.
#include <cctype>
#include <cstdlib>

#include "emulator.h"

namespace emulator {

std::map<std::string, int64_t>& settings() {
  static auto* const all = [] {
    auto* values = new std::map<std::string, int64_t>{
        {"seed", 0},      {"resident", 1},          {"shared", 227 * 1024},
        {"l2", 50 << 20}, {"multiprocessors", 132}, {"capability", 90},
        {"truncates", 16}};
    for (auto& [name, value] : *values) {
      std::string variable = "EMULATOR_" + name;
      for (char& letter : variable) letter = static_cast<char>(std::toupper(letter));
      if (const char* const text = std::getenv(variable.c_str())) value = std::atoll(text);
    }
    return values;
  }();
  return *all;
}

size_t max_shared_bytes() { return static_cast<size_t>(settings().at("shared")); }
size_t l2_bytes() { return static_cast<size_t>(settings().at("l2")); }
int64_t multiprocessors() { return settings().at("multiprocessors"); }
int64_t capability() { return settings().at("capability"); }
int64_t truncates() {
  static const int64_t& chosen = settings().at("truncates");  // at every product of matrices
  return chosen;
}

}  // namespace emulator
