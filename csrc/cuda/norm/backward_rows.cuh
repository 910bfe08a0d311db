// Rows in the kernels of the norm family's backward: the rows of a block, the gradient of one pack,
// and the sums over rows.
#pragma once

#include "cuda/norm/geometry.cuh"
#include "cuda/row_sums.cuh"

namespace onepass::cuda {

// The sums over a row that its gradient needs.
template <class A>
struct RowMeans {
  A g;   // of g = doutput * weight; 0 for rms
  A gh;  // of g * h
};

// Constants of a block. They are in shared memory because registers are scarce.
struct alignas(16) BlockConstants {
  int64_t first_row;
  int rows;
  Dropout dropout;
  double per_size[kRowDims];  // 1 / size of the rows' dimensions
  double per_column;          // 1 / cols
  double per_sample_row = 1;  // 1 / the rows that share a factor

  // The rows of a part: part `part` of `parts` of the `of_rows` rows from `first` on.
  __device__ __forceinline__ BlockConstants(const NormBackward& args, int64_t part, int64_t parts,
                                            int64_t of_rows, int64_t first = 0)
      : first_row(first + of_rows * part / parts),
        rows(static_cast<int>(first + of_rows * (part + 1) / parts - first_row)),
        dropout(load_dropout(args.seed, args.dropout_p)),
        per_size{1.0 / args.row_size[0], 1.0 / args.row_size[1], 1.0 / args.row_size[2]},
        per_column(1.0 / args.cols) {}
};

__device__ __forceinline__ BlockConstants constants_of(const NormBackward& args, int64_t part,
                                                       int64_t parts) {
  return BlockConstants(args, part, parts, args.rows);
}

// `parts` is the number of parts of all groups together.
__device__ __forceinline__ BlockConstants constants_of(const ModulatedNormBackward& args,
                                                       int64_t part, int64_t parts) {
  const int64_t each = parts / args.groups;
  const int64_t group = part / each;
  BlockConstants constants(args, part - group * each, each, args.tokens, group * args.tokens);
  constants.per_sample_row = 1.0 / args.sample_rows;
  return constants;
}

// The vectors that the rows of a part share.
struct Vectors {
  const void* weight;
  const void* gate;
};

// A plain norm has one weight for all rows.
__device__ __forceinline__ const NormBackward& vectors_of(const NormBackward& args, int64_t,
                                                          int64_t) {
  return args;
}

// A modulated norm has vectors for each group.
__device__ __forceinline__ Vectors vectors_of(const ModulatedNormBackward& args, int64_t part,
                                              int64_t parts) {
  const int64_t group = part / (parts / args.groups);
  return {of_group(args, group, args.weight, args.weight_dtype, args.scale_stride),
          of_group(args, group, args.gate, args.gate_dtype, args.gate_stride)};
}

// Statistics of two rows that are prefetched, rounded up to pieces of 16 bytes.
template <class Args>
inline constexpr int kStatistics = kIsModulated<Args> ? 8 : 4;

// Sums over rows: dweight, dbias and dgate.
template <class Args>
inline constexpr int kSums = kIsModulated<Args> ? 3 : 2;

// row_index without divisions.
__device__ __forceinline__ RowIndex row_index_by_inverse(const int64_t (&size)[kRowDims],
                                                         const double* per_size, int64_t row) {
  if (size[0] == 1 && size[1] == 1) return {{0, 0, row}};
  const int64_t outer = quotient(row, size[2], per_size[2]);
  const int64_t outermost = quotient(outer, size[1], per_size[1]);
  return {{outermost, outer - outermost * size[1], row - outer * size[2]}};
}

// The sample whose factor applies to a row; 0 where no factor is read.
__device__ __forceinline__ int64_t sample_of(const ModulatedNormBackward& args,
                                             const BlockConstants& constants, int64_t row) {
  return args.row_scale ? quotient(row, args.sample_rows, constants.per_sample_row) : 0;
}

// Element offsets of a row in its tensors.
struct RowOffsets {
  int64_t doutput;
  int64_t x;
  int64_t dresidual_out;
  int64_t dense;  // in contiguous tensors

  __device__ __forceinline__ RowOffsets(const NormBackward& args, int64_t row,
                                        const RowIndex& index)
      : doutput(row_offset(index, args.doutput_stride)),
        x(row_offset(index, args.x_stride)),
        dresidual_out(row_offset(index, args.dresidual_out_stride)),
        dense(row * args.cols) {}
};

// Prefetches into L2 the operands of a block's row r, line by line. A block works on one row at a
// time, and all its threads wait for the sums of the row. Without the prefetch nothing would come
// from memory while a row is in use, and where rows are few a multiprocessor has no second block.
// Only for rows with a single stride, as almost all tensors have: registers are scarce.
template <class Args>
__device__ __forceinline__ void ask_for_row(const Args& args, const BlockConstants& constants,
                                            int r, int threads_per_row) {
  constexpr int kLine = 128;
  if (r >= constants.rows || args.row_size[0] != 1 || args.row_size[1] != 1) return;
  const int thread = threads_per_row > kLanes ? thread_index() : thread_index() % kLanes;
  const auto ask = [&](const void* base, DType dtype, const RowStride& stride) {
    if (!base) return;
    auto size = static_cast<uint32_t>(size_of(dtype));
    forget(size);  // else values derived from it are kept in registers during the loop over rows
    const char* const first = static_cast<const char*>(base) +
                              (constants.first_row + r) * stride.stride[kRowDims - 1] * size;
    const auto bytes = static_cast<int>(static_cast<uint32_t>(args.cols) * size);
    ONEPASS_ROLL
    for (int at = thread * kLine; at < bytes; at += threads_per_row * kLine) {
      prefetch_to_l2(first + at);
    }
  };
  ask(args.doutput, args.doutput_dtype, args.doutput_stride);
  ask(args.x, args.x_dtype, args.x_stride);
  ask(args.dresidual_out, args.x_dtype, args.dresidual_out_stride);
  if constexpr (kIsModulated<Args>) {
    if (args.gate) ask(args.branch, args.branch_dtype, args.branch_stride);
  }
}

// Writes dx of one pack, and adds the pack's terms to the sums. load_gate is called if there is a
// gate; `factor` is the row's factor of the branch.
template <class Types, class Args, class Columns>
__device__ __forceinline__ void apply_pack(
    const Args& args, const Dropout& dropout, uint32_t kept, const RowOffsets& row,
    const RowIndex& index, const Columns& columns, auto pack, const typename Types::Kept& doutput,
    const typename Types::Kept& x, const typename Types::A* weight, auto&& load_gate,
    typename Types::A factor, typename Types::A mean, typename Types::A rstd,
    const RowMeans<typename Types::A>& means, typename Types::A (&dweight)[kPack],
    typename Types::A (&dbias)[kPack], typename Types::A (&dgate)[kPack]) {
  using A = typename Types::A;
  A dx[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const A d = Types::value(doutput, e);
    const A h = (Types::value(x, e) - mean) * rstd;
    // Not fused: the difference is exactly zero in a row of one column.
    const A g = d * weight[e] - means.g;
    dx[e] = multiply_add(-h, means.gh, g) * rstd;
    dweight[e] = multiply_add(d, h, dweight[e]);
    dbias[e] += d;
  }
  if (args.dresidual_out) {
    const auto above =
        Types::load(args.dresidual_out, args.x_dtype, row.dresidual_out, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) dx[e] += Types::value(above, e);
  }
  if (args.dresidual) {
    Types::store(args.dresidual, args.dresidual_dtype, row.dense, columns, pack,
                 Types::round(dx, args.dresidual_dtype));
  }
  if constexpr (kIsModulated<Args>) {
    if (args.row_scale) {
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) dx[e] = factor == A(0) ? A(0) : dx[e] * factor;
    }
    if (args.seed) drop(dropout, kept, dx);
    if (args.gate && factor != A(0)) {
      const auto branch = Types::load(args.branch, args.branch_dtype,
                                      row_offset(index, args.branch_stride), columns, pack);
      A gate[kPack];
      load_gate(gate);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        dgate[e] = multiply_add(dx[e], Types::value(branch, e), dgate[e]);
        dx[e] *= gate[e];
      }
    }
  }
  if (args.dinput) {
    if constexpr (!kIsModulated<Args>) {
      if (args.seed) drop(dropout, kept, dx);
    }
    Types::store(args.dinput, args.dinput_dtype, row.dense, columns, pack,
                 Types::round(dx, args.dinput_dtype));
  }
}

template <class A>
__device__ __forceinline__ const A* at_row(const void* base, int64_t row) {
  return base ? static_cast<const A*>(base) + row : nullptr;
}

// One pack of a part's sums, (kSums, cols), or of the gradients.
template <class Args, class A, class Columns>
__device__ __forceinline__ void store_sums(const Args& args, A* target, int64_t part, int64_t parts,
                                           const Columns& columns, auto pack,
                                           const A (&dweight)[kPack], const A (&dbias)[kPack],
                                           const A (&dgate)[kPack]) {
  if constexpr (kIsModulated<Args>) {
    if (parts == args.groups) {
      const int64_t offset = part * args.cols;
      store_values(args.dweight, args.dweight_dtype, offset, columns, pack, dweight);
      store_values(args.dbias, args.dbias_dtype, offset, columns, pack, dbias);
      store_values(args.dgate, args.gate_dtype, offset, columns, pack, dgate);
      return;
    }
  }
  if (args.dweight) store_pack(target, columns, pack, narrow<A>(dweight));
  if (args.dbias) store_pack(target + args.cols, columns, pack, narrow<A>(dbias));
  if constexpr (kIsModulated<Args>) {
    if (args.dgate) store_pack(target + 2 * args.cols, columns, pack, narrow<A>(dgate));
  }
}

}  // namespace onepass::cuda
