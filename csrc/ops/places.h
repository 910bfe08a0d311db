// Whether elements of tensors share memory, for operators that write into their arguments.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "ops/tensor.h"

namespace onepass {

// A distance in bytes that is taken any number of times from `least` to `most`.
struct Steps {
  int64_t bytes;
  int64_t least;
  int64_t most;
};

// Sums of steps, one number of each kind.
class Reach {
 public:
  void add(int64_t bytes, int64_t least, int64_t most) {
    if (bytes < 0) {
      bytes = -bytes;
      std::swap(least, most);
      least = -least, most = -most;
    }
    int64_t at = 0;
    while (at < count_ && steps_[at].bytes > bytes) ++at;
    if (at < count_ && steps_[at].bytes == bytes) {
      steps_[at].least += least;
      steps_[at].most += most;
      return;
    }
    for (int64_t i = count_++; i > at; --i) steps_[i] = steps_[i - 1];
    steps_[at] = {bytes, least, most};
  }

  // Whether some sum is `distance`. Long steps come first: if tensors are rows of dense columns,
  // the rest allows at most two numbers of each kind. For other layouts the search ends after
  // kMostTries and returns true.
  bool comes_to(int64_t distance) {
    tries_ = 0;
    return search(0, distance);
  }

 private:
  static constexpr int64_t kMostKinds = 12;  // two tensors of five dimensions, and their elements
  static constexpr int64_t kMostTries = 4096;

  static int64_t floor_div(int64_t a, int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  }

  bool search(int64_t kind, int64_t left) {
    if (kind == count_) return left == 0;
    if (++tries_ > kMostTries) return true;
    int64_t least = left, most = left;  // that this kind may come to, the next ones doing the rest
    for (int64_t i = kind + 1; i < count_; ++i) {
      least -= steps_[i].bytes * steps_[i].most;
      most -= steps_[i].bytes * steps_[i].least;
    }
    const Steps& own = steps_[kind];
    if (own.least > own.most) return false;
    if (own.bytes == 0) return search(kind + 1, left);
    const int64_t first = std::max(own.least, -floor_div(-least, own.bytes));
    const int64_t last = std::min(own.most, floor_div(most, own.bytes));
    for (int64_t n = first; n <= last; ++n) {
      if (search(kind + 1, left - n * own.bytes)) return true;
    }
    return false;
  }

  std::array<Steps, kMostKinds> steps_{};  // the longest first
  int64_t count_ = 0;
  int64_t tries_ = 0;
};

// A tensor's elements, `bytes` each.
struct Place {
  const void* data;
  TensorInfo info;
  int64_t bytes;

  bool is_empty() const { return Shape(info).is_empty(); }
};

// Whether two elements of one tensor share memory, as in an expanded tensor.
inline bool has_shared_elements(const TensorInfo& info) {
  if (Shape(info).is_empty()) return false;
  for (int64_t d = 0; d < info.dims; ++d) {  // the first in which they differ
    if (info.sizes[d] == 1) continue;
    Reach reach;
    reach.add(info.strides[d], 1, info.sizes[d] - 1);
    for (int64_t e = d + 1; e < info.dims; ++e) {
      reach.add(info.strides[e], 1 - info.sizes[e], info.sizes[e] - 1);
    }
    if (reach.comes_to(0)) return true;
  }
  return false;
}

// Whether two tensors have a byte in common. Tensors that lie in the gaps of each other have none,
// such as the heads of query and of key in one projection of both.
inline bool share_memory(const Place& a, const Place& b) {
  // On the meta device tensors lie nowhere.
  if (!a.data || !b.data || a.is_empty() || b.is_empty()) return false;
  Reach reach;
  for (int64_t d = 0; d < a.info.dims; ++d) {
    reach.add(a.info.strides[d] * a.bytes, 0, a.info.sizes[d] - 1);
  }
  for (int64_t d = 0; d < b.info.dims; ++d) {
    reach.add(b.info.strides[d] * b.bytes, 1 - b.info.sizes[d], 0);
  }
  reach.add(1, 1 - b.bytes, a.bytes - 1);
  return reach.comes_to(static_cast<const char*>(b.data) - static_cast<const char*>(a.data));
}

}  // namespace onepass
