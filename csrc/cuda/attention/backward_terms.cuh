// Bias and mask in attention's backward.
//
// In memory the elements of a row are neighbouring keys, but a lane's scores (backward_scores.cuh)
// are those of neighbouring queries. So each lane reads neighbours of a row, two elements of a bias
// or 16 bytes of a mask at a time, and passes them to the lanes that have their scores: a bias by
// movmatrix, a mask as bits. They are loaded before the product that hides their latency and
// converted after it; a mask that would need too many registers meanwhile is waited for.
//
// They go through registers, not through shared memory: a tile of bias does not fit beside tiles of
// 128 columns in 99 KiB, nor one of float32 in 163 KiB, and the kernel of dbias has no room at all.
#pragma once

#include "cuda/attention/backward_scores.cuh"

namespace onepass::cuda {

// Bias and mask of a strip: the 16 keys of a warp and 8 kTiles queries.
template <int kTiles>
class StripTerms {
  static constexpr int kRows = 8 * kTiles, kKeys = 16;
  static_assert(kRows <= kLanes);  // a lane per row

 public:
  // Starts loading bias and mask of the scores that are seen before any mask; called by all lanes.
  template <int kQueries>
  __device__ __forceinline__ StripTerms(const Attention& args, const HeadTerms& terms,
                                        const Strip<kQueries>& at) {
    ONEPASS_UNROLL
    for (int n = 0; n < kTiles; ++n) seen_ |= at.sees(n) << 4 * n;
    if (!args.bias.data && !args.mask.data) return;
    const bool sees = at.lane < kRows && at.queries.sees_any(at.query + at.lane, at.key, kKeys);
    const uint32_t rows = __ballot_sync(kAllLanes, sees);
    const bool has_keys = at.first_key >= 0 && at.first_key + kKeys <= args.seq_k;
    if (args.mask.data) load_mask(args, terms, at, rows, has_keys);
    if (!args.bias.data) return;
    if (args.bias_dtype == DType::kFloat32) {
      load_bias<uint32_t>(args, terms, at, rows, has_keys);
    } else {
      load_bias<uint16_t>(args, terms, at, rows, has_keys);
    }
  }

  // Which scores count: bit 4 n + e is element e of a lane's fragment n.
  __device__ __forceinline__ uint32_t counts(const Attention& args, int lane) const {
    if (!args.mask.data) return seen_;
    uint32_t of_two[4] = {mask_[0], mask_[1], mask_[2], mask_[3]};
    if (has_bytes_) {
      uint32_t allowed = 0;
      ONEPASS_UNROLL
      for (int i = 0; i < 4; ++i) allowed |= nonzero_bytes(mask_[i]) << 4 * i;
      const uint32_t other = __shfl_xor_sync(kAllLanes, allowed, 1);
      allowed = lane % 2 ? other | allowed << 16 : allowed | other << 16;
      ONEPASS_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        of_two[n] = __shfl_sync(kAllLanes, allowed, 8 * n + lane % 4 * 2);
      }
    }
    uint32_t allowed = 0;
    ONEPASS_UNROLL
    for (int n = 0; n < kTiles; ++n) allowed |= own_bits(of_two[n] >> lane / 4) << 4 * n;
    return seen_ & allowed;
  }

  // scalar: p += bias; also for scores that do not count: these may become NaN and are never used
  __device__ __forceinline__ void add_bias(float (&p)[kTiles][4], const Attention& args) const {
    if (!args.bias.data) return;
    visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
      if (form_ == BiasForm::kOneRow) {
        ONEPASS_UNROLL
        for (int j = 0; j < 4 * kTiles; ++j) p[j / 4][j % 4] += of_bits<B>(bias_[j % 4 / 2]);
      } else if (sizeof(B) == 2 && form_ == BiasForm::kPairs) {
        ONEPASS_UNROLL
        for (int i = 0; i < 2 * kTiles; ++i) {
          const uint32_t queries = movmatrix_transposed(bias_[i]);
          p[i / 2][i % 2 * 2] += of_bits<B>(queries & 0xffffu);
          p[i / 2][i % 2 * 2 + 1] += of_bits<B>(queries >> 16);
        }
      } else {
        ONEPASS_UNROLL
        for (int j = 0; j < 4 * kTiles; ++j) p[j / 4][j % 4] += of_bits<B>(bias_[j]);
      }
    });
  }

 private:
  // The elements of bias_; the same for all lanes.
  enum class BiasForm {
    kOneRow,    // [r]: of key g + 8 r, for all queries
    kPairs,     // [2 n + r]: of query 8 n + g and keys 8 r + 2 t and the next, 16 bits each
    kElements,  // [4 n + e]: of element e of fragment n
  };

  // If rows are aligned to 4 bytes, a lane loads the 16 keys of one query. Otherwise the warp reads
  // two rows at a time, byte by byte, and waits for them: as ballots they take 4 registers, as
  // loads in flight 16.
  template <int kQueries>
  __device__ __forceinline__ void load_mask(const Attention& args, const HeadTerms& terms,
                                            const Strip<kQueries>& at, uint32_t rows,
                                            bool has_keys) {
    const int64_t stride = args.mask.row_stride;
    const uint8_t* const first =
        mask_row(args, terms.batch, terms.head, at.first_query) + at.first_key;
    const uint64_t places = reinterpret_cast<uintptr_t>(first) | static_cast<uint64_t>(stride);
    has_bytes_ = has_keys && places % 4 == 0;
    if (has_bytes_) {
      if (!(rows >> at.lane & 1)) return;
      const uint8_t* const row = first + at.lane * stride;
      if (places % 16 == 0) {
        const Words words = load_global(reinterpret_cast<const Words*>(row));
        ONEPASS_UNROLL
        for (int i = 0; i < 4; ++i) mask_[i] = words.word[i];
      } else {
        ONEPASS_UNROLL
        for (int i = 0; i < 4; ++i) {
          mask_[i] = load_global(reinterpret_cast<const uint32_t*>(row) + i);
        }
      }
      return;
    }
    const int key = at.lane % kKeys;
    const bool has_key = 0 <= at.first_key + key && at.first_key + key < args.seq_k;
    if (stride == 0) {  // one row, which both halves of the warp read
      const uint32_t row = __ballot_sync(kAllLanes, has_key && load_global(first + key) != 0);
      ONEPASS_UNROLL
      for (int n = 0; n < kTiles; ++n) mask_[n] = row;
      return;
    }
    uint8_t allowed[kRows / 2] = {};
    ONEPASS_UNROLL
    for (int i = 0; i < kRows / 2; ++i) {
      const int row = 2 * i + at.lane / kKeys;
      if (has_key && rows >> row & 1) allowed[i] = load_global(first + row * stride + key);
    }
    ONEPASS_UNROLL
    for (int i = 0; i < kRows / 2; ++i) {
      const uint32_t of_two = __ballot_sync(kAllLanes, allowed[i] != 0);
      if (at.lane % 4 == i % 4) mask_[i / 4] = of_two;
    }
  }

  template <class Bits, int kQueries>
  __device__ __forceinline__ void load_bias(const Attention& args, const HeadTerms& terms,
                                            const Strip<kQueries>& at, uint32_t rows,
                                            bool has_keys) {
    const int64_t stride = args.bias.row_stride;
    const Bits* const first =
        static_cast<const Bits*>(args.bias.data) + terms.batch * args.bias.batch_stride +
        terms.head * args.bias.head_stride + at.first_query * stride + at.first_key;
    const int g = at.lane / 4, t = at.lane % 4;
    if (stride == 0) {
      form_ = BiasForm::kOneRow;
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int key = at.first_key + g + 8 * r;
        if (0 <= key && key < args.seq_k) bias_[r] = load_global(first + g + 8 * r);
      }
    } else if (sizeof(Bits) == 2 && has_keys && stride % 2 == 0 &&
               reinterpret_cast<uintptr_t>(first) % 4 == 0) {
      form_ = BiasForm::kPairs;
      ONEPASS_UNROLL
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int row = i / 2 * 8 + g;
        const Bits* const pair = first + row * stride + i % 2 * 8 + 2 * t;
        if (rows >> row & 1) bias_[i] = load_global(reinterpret_cast<const uint32_t*>(pair));
      }
    } else {
      form_ = BiasForm::kElements;
      ONEPASS_UNROLL
      for (int j = 0; j < 4 * kTiles; ++j) {
        // Computed outside the condition, so that the condition covers the load alone.
        const Bits* const element =
            first + (j / 4 * 8 + 2 * t + j % 2) * stride + g + j % 4 / 2 * 8;
        if (seen_ >> j & 1) bias_[j] = load_global(element);
      }
    }
  }

  // Bit i: whether byte i is not 0. The multiplication brings the four bits together.
  static __device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) {
    const uint32_t high = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word;
    return (high >> 7 & 0x01010101u) * 0x01020408u >> 24;
  }
  // Bits 0, 16, 8 and 24 as bits 0 to 3. Each half of the word is a query; in it these bits are the
  // lane's key and the key 8 further.
  static __device__ __forceinline__ uint32_t own_bits(uint32_t of_two) {
    return (of_two & 0x01010101u) * 0x01040208u >> 24;
  }
  template <class B>
  static __device__ __forceinline__ float of_bits(uint32_t bits) {
    if constexpr (sizeof(B) == 4) {
      return std::bit_cast<float>(bits);
    } else {
      return widen(B{static_cast<uint16_t>(bits)});
    }
  }

  uint32_t seen_ = 0;  // before any mask, in the layout of counts()
  uint32_t bias_[4 * kTiles] = {};
  // Bytes of keys 4 i .. of query `lane`; or words of ballots, see counts().
  uint32_t mask_[4] = {};
  bool has_bytes_ = false;
  BiasForm form_ = BiasForm::kOneRow;
};

}  // namespace onepass::cuda
