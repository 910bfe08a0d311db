// The head of a call's file, before the image: the operator, and the settings of its run. The
// tests' library writes such files, replay.cpp reads them.
#pragma once

#include <cstring>
#include <istream>
#include <ostream>
#include <sstream>
#include <string>

#include "cuda/attention/attention.h"
#include "emulator.h"
#include "ops/backend.h"

extern "C" onepass::Backend onepass_cuda_kernels();

namespace emulator {

// The CUDA back end's table; with `plain`, attention's plain kernels also run calls that fit its
// tiles.
inline const onepass::Backend& cuda_backend(bool plain) {
  static const onepass::Backend shipped = onepass_cuda_kernels();
  static const onepass::Backend without_tiles = [] {
    onepass::Backend backend = shipped;
    backend.attention_forward = onepass::cuda::plain_attention_forward();
    backend.attention_backward = onepass::cuda::plain_attention_backward();
    return backend;
  }();
  return plain ? without_tiles : shipped;
}

// `op` is an operator of that table.
inline void write_operator(std::ostream& file, const void* op, bool plain) {
  const auto* const table = reinterpret_cast<const char*>(&cuda_backend(plain));
  file << static_cast<const char*>(op) - table << ' ' << plain;
  for (const auto& [name, value] : settings()) file << ' ' << name << ' ' << value;
  file << '\n';
}

// Applies the settings; the operator is one of `Any`, whatever its arguments.
template <class Any>
Any read_operator(std::istream& file) {
  std::string line, name;
  std::getline(file, line);
  std::istringstream words(line);
  ptrdiff_t place = 0;
  bool plain = false;
  words >> place >> plain;
  int64_t value;
  while (words >> name >> value) settings().at(name) = value;
  Any op;
  std::memcpy(&op, reinterpret_cast<const char*>(&cuda_backend(plain)) + place, sizeof(op));
  return op;
}

}  // namespace emulator
