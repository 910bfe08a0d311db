// Included in every file of a build with planted faults: which of them acts in this process.
#pragma once

#include <cstdlib>

inline bool is_planted(int number) {
  static const char* const chosen = std::getenv("ONEPASS_PLANTED");
  static const int planted = chosen ? std::atoi(chosen) : -1;
  return planted == number;
}
