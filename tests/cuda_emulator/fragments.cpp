// The fragment layouts of mma, ldmatrix and movmatrix, compared with the text of the PTX ISA
// (sections "Matrix Fragments for mma.m16n8k16", "... mma.m16n8k8", "ldmatrix" and "movmatrix"):
// the place of each element of a matrix is written down here as in that text, element by element,
// and the product must be right. Ends with 0 if everything is, else it names the error.
#include <cstdio>
#include <memory>

#include "cuda/launch.cuh"

using namespace onepass;
using namespace onepass::cuda;

namespace {

// The text's words: groupID = %laneid >> 2, threadID_in_group = %laneid % 4.
struct Place {
  int row;
  int column;
};

// ".bf16 / .f16, m16n8k16, A: row = groupID for a_i where 0 <= i < 2 || 4 <= i < 6, groupID + 8
// otherwise; col = (threadID_in_group * 2) + (i & 0x1) for a_i where i < 4, ... + 8 for i >= 4."
Place a_m16n8k16(int group, int in_group, int i) {
  const bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
  return {upper ? group : group + 8, in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
// "B: row = (threadID_in_group * 2) + (i & 0x1) for b_i where i < 2, ... + 8 for i >= 2;
// col = groupID."
Place b_m16n8k16(int group, int in_group, int i) {
  return {in_group * 2 + (i & 1) + (i < 2 ? 0 : 8), group};
}
// "C and D: row = groupID for c_i where i < 2, groupID + 8 for i >= 2;
// col = (threadID_in_group * 2) + (i & 0x1)."
Place c_m16n8(int group, int in_group, int i) {
  return {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
}
// ".tf32, m16n8k8, A: row = groupID for a0 and a2, groupID + 8 for a1 and a3;
// col = threadID_in_group for a0 and a1, threadID_in_group + 4 for a2 and a3."
Place a_m16n8k8(int group, int in_group, int i) {
  return {i == 0 || i == 2 ? group : group + 8, i < 2 ? in_group : in_group + 4};
}
// "B: row = threadID_in_group for b0, threadID_in_group + 4 for b1; col = groupID."
Place b_m16n8k8(int group, int in_group, int i) {
  return {i == 0 ? in_group : in_group + 4, group};
}

// Small integers, all products and sums exact, no two rows or columns alike.
int a_value(int row, int k) { return (row * 7 + k * 5 + row * k) % 13 - 6; }
int b_value(int k, int column) { return (k * 3 + column * 11 + k * column) % 11 - 5; }

struct Result {
  float d[16][8];
};

template <class T>
uint16_t bits_of(int value) {
  if constexpr (__is_same(T, BFloat16)) {
    return narrow_to_bfloat16(static_cast<float>(value)).bits;
  } else {
    return narrow_to_float16(static_cast<float>(value)).bits;
  }
}

template <class T>
void multiply_k16(Result* result) {
  const int lane = static_cast<int>(threadIdx.x), group = lane >> 2, in_group = lane % 4;
  uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  for (int i = 0; i < 8; ++i) {
    const Place place = a_m16n8k16(group, in_group, i);
    a[i / 2] |= static_cast<uint32_t>(bits_of<T>(a_value(place.row, place.column))) << (i % 2 * 16);
  }
  for (int i = 0; i < 4; ++i) {
    const Place place = b_m16n8k16(group, in_group, i);
    b[i / 2] |= static_cast<uint32_t>(bits_of<T>(b_value(place.row, place.column))) << (i % 2 * 16);
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(i);
  mma_m16n8k16<T>(d, a, b);
  for (int i = 0; i < 4; ++i) {
    const Place place = c_m16n8(group, in_group, i);
    result->d[place.row][place.column] = d[i] - static_cast<float>(i);
  }
}

void multiply_k8(Result* result) {
  const int lane = static_cast<int>(threadIdx.x), group = lane >> 2, in_group = lane % 4;
  uint32_t a[4], b[2];
  float d[4] = {};
  for (int i = 0; i < 4; ++i) {
    const Place place = a_m16n8k8(group, in_group, i);
    a[i] = std::bit_cast<uint32_t>(static_cast<float>(a_value(place.row, place.column)));
    a[i] |= 0x1fffu;  // tf32 has no such bits
  }
  for (int i = 0; i < 2; ++i) {
    const Place place = b_m16n8k8(group, in_group, i);
    b[i] = std::bit_cast<uint32_t>(static_cast<float>(b_value(place.row, place.column)));
  }
  mma_m16n8k8_tf32(d, a, b);
  for (int i = 0; i < 4; ++i) {
    const Place place = c_m16n8(group, in_group, i);
    result->d[place.row][place.column] = d[i];
  }
}

// Bits beyond float32's precision are dropped, not rounded.
void add_truncated(int* wrong) {
  const uint32_t one = std::bit_cast<uint32_t>(1.0f);
  const uint32_t a[4] = {one, one, one, one}, b[2] = {one, one};
  for (const float sign : {1.0f, -1.0f}) {
    const uint32_t part = std::bit_cast<uint32_t>(sign * 0.2f * 0x1p-23f);  // of a unit of 1
    const uint32_t small[2] = {part, part};
    float d[4] = {sign, sign, sign, sign};
    mma_m16n8k8_tf32(d, a, small);  // four at a time, nearly a unit
    const bool dropped = d[0] == sign && d[1] == sign && d[2] == sign && d[3] == sign;
    mma_m16n8k8_tf32(d, a, b);
    if (!dropped || d[0] != sign + 8.0f) __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
  }
}

// d + `count` products of 2 ** exponent, of either sign: of the same sign's 1 that is `units` units
// in the last place.
struct Sum {
  int count;
  int exponent;
  int units;
};

// Each factor gets half of the exponent: float16 has few exponents.
template <class T>
void add_16_bits(int* wrong, Sum sum) {
  const int lane = static_cast<int>(threadIdx.x), in_group = lane % 4;
  const auto power = [](int exponent) {
    const float value = std::ldexp(1.0f, exponent);
    return __is_same(T, BFloat16) ? narrow_to_bfloat16(value).bits : narrow_to_float16(value).bits;
  };
  const uint32_t half = power(sum.exponent / 2);
  const uint32_t a[4] = {half | half << 16, half | half << 16, half | half << 16,
                         half | half << 16};
  for (const float sign : {1.0f, -1.0f}) {
    uint32_t b[2] = {};
    for (int i = 0; i < 4; ++i) {
      if (b_m16n8k16(0, in_group, i).row >= sum.count) continue;
      const uint32_t other = power(sum.exponent - sum.exponent / 2) | (sign < 0.0f ? 0x8000u : 0u);
      b[i / 2] |= other << (i % 2 * 16);
    }
    float d[4] = {sign, sign, sign, sign};
    if (lane == 0) d[0] = INFINITY;  // other elements are not affected
    mma_m16n8k16<T>(d, a, b);
    if (lane == 0 && std::isinf(d[0])) d[0] = d[1];
    const float expected = sign * (1.0f + static_cast<float>(sum.units) * 0x1p-23f);
    for (const float found : d) {
      if (found != expected) __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
    }
  }
}

// Each addend loses the bits below the last that it keeps, and the sum those that float32 has not.
template <class T>
bool drops(int64_t at_once, std::initializer_list<Sum> sums) {
  emulator::settings().at("truncates") = at_once;
  bool right = true;
  for (const Sum& sum : sums) {
    auto wrong = std::make_unique<int>(0);
    launch<add_16_bits<T>>({.blocks = 1, .threads = 32}, nullptr, wrong.get(), sum);
    if (*wrong == 0) continue;
    std::printf("mma.m16n8k16, %d at once: %d x 2^%d beside 1: %d wrong\n",
                static_cast<int>(at_once), sum.count, sum.exponent, *wrong);
    right = false;
  }
  return right;
}

template <class T>
bool adds_16_bits_right() {
  const bool h100 = drops<T>(16, {{16, -26, 0}, {16, -25, 4}, {3, -25, 0}, {16, -24, 8}});
  return drops<T>(8, {{16, -25, 0}, {16, -24, 8}, {1, -24, 0}, {9, -24, 4}}) && h100;
}

bool is_product(const Result& result, int depth, const char* what) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      int expected = 0;
      for (int k = 0; k < depth; ++k) expected += a_value(row, k) * b_value(k, column);
      if (result.d[row][column] != static_cast<float>(expected)) {
        std::printf("%s: row %d, column %d is %g, not %d\n", what, row, column,
                    static_cast<double>(result.d[row][column]), expected);
        return false;
      }
    }
  }
  return true;
}

// "Threads 0-7, 8-15, 16-23, 24-31 give the row addresses of the first to fourth matrix. When
// reading 8x8 matrices, four consecutive threads load 16 bytes: thread T holds elements 2 (T % 4)
// and 2 (T % 4) + 1 of row T / 4; with .trans the matrix is loaded in column-major format."
template <int kMatrices, bool kTranspose>
void load_matrices(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x);
  SharedMemory shared;
  uint16_t* matrices = shared.take<uint16_t>(kMatrices * 64);
  for (int i = lane; i < kMatrices * 64; i += 32) matrices[i] = static_cast<uint16_t>(1000 + i);
  __syncwarp();
  uint32_t d[kMatrices];
  ldmatrix<kMatrices, kTranspose>(d, matrices + lane % (kMatrices * 8) * 8);
  for (int m = 0; m < kMatrices; ++m) {
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4, column = 2 * (lane % 4) + half;
      const int expected = 1000 + m * 64 + (kTranspose ? column * 8 + row : row * 8 + column);
      if (static_cast<int>(d[m] >> (16 * half) & 0xffffu) != expected) {
        __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
      }
    }
  }
}

template <int kMatrices, bool kTranspose>
bool loads_right() {
  auto wrong = std::make_unique<int>(0);
  launch<load_matrices<kMatrices, kTranspose>>(
      {.blocks = 1, .threads = 32, .shared_bytes = kMatrices * 128}, nullptr, wrong.get());
  if (*wrong)
    std::printf("ldmatrix.x%d%s: %d wrong\n", kMatrices, kTranspose ? ".trans" : "", *wrong);
  return *wrong == 0;
}

// "movmatrix.m8n8.trans.b16: a thread holds elements 2 (T % 4) and 2 (T % 4) + 1 of row T / 4 of
// the source, and of the destination, which is the transpose."
void turn_matrix(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x), row = lane / 4, column = 2 * (lane % 4);
  const auto element = [](int r, int c) { return static_cast<uint32_t>(1000 + 8 * r + c); };
  const uint32_t turned =
      movmatrix_transposed(element(row, column) | element(row, column + 1) << 16);
  if (turned != (element(column, row) | element(column + 1, row) << 16)) {
    __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
  }
}

// Every lane of a warp of two: the collectives.
void collectives(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x);
  bool right = __ballot_sync(0xffffffffu, lane % 3 == 0) == 0x49249249u;
  right = right && __shfl_sync(0xffffffffu, lane * 2.5, 7) == 17.5;
  right = right && __shfl_xor_sync(0xffffffffu, lane, 5) == (lane ^ 5);
  right = right && __shfl_down_sync(0xffffffffu, lane, 30) == (lane < 2 ? lane + 30 : lane);
  if (lane < 16) right = right && __shfl_xor_sync(0x0000ffffu, lane, 8) == (lane ^ 8);
  if (!right) __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
}

}  // namespace

int main() {
  bool right = true;
  auto result = std::make_unique<Result>();
  launch<multiply_k16<BFloat16>>({.blocks = 1, .threads = 32}, nullptr, result.get());
  right &= is_product(*result, 16, "mma.m16n8k16 bf16");
  launch<multiply_k16<Float16>>({.blocks = 1, .threads = 32}, nullptr, result.get());
  right &= is_product(*result, 16, "mma.m16n8k16 f16");
  launch<multiply_k8>({.blocks = 1, .threads = 32}, nullptr, result.get());
  right &= is_product(*result, 8, "mma.m16n8k8 tf32");
  right &= loads_right<1, false>() && loads_right<1, true>();
  right &= loads_right<2, false>() && loads_right<2, true>();
  right &= loads_right<4, false>() && loads_right<4, true>();
  right &= adds_16_bits_right<BFloat16>() && adds_16_bits_right<Float16>();
  auto wrong = std::make_unique<int>(0);
  launch<add_truncated>({.blocks = 1, .threads = 32}, nullptr, wrong.get());
  if (*wrong) std::printf("mma.m16n8k8 tf32: %d lanes have rounded sums\n", *wrong);
  right &= *wrong == 0;
  *wrong = 0;
  launch<collectives>({.blocks = 1, .threads = 32}, nullptr, wrong.get());
  if (*wrong) std::printf("collectives: %d lanes wrong\n", *wrong);
  right &= *wrong == 0;
  *wrong = 0;
  launch<turn_matrix>({.blocks = 1, .threads = 32}, nullptr, wrong.get());
  if (*wrong) std::printf("movmatrix: %d lanes wrong\n", *wrong);
  return right && *wrong == 0 ? 0 : 1;
}
