// Sequences that are packed in a batch of 1, for scans that go chunk by chunk.
#pragma once

#include "core/math.h"
#include "ops/check.h"

namespace onepass {

// Sets what a scan's contract calls sequences and chunks: those that cu_seqlens cuts a batch of 1
// into, or the samples. `first`: the name of the tensor that `checked` compares to.
template <class Args>
void check_sequences(const char* op, const CheckedAgainst& checked, const char* first,
                     const OptionalTensor& cu_seqlens, int64_t chunk, Args& args) {
  args.sequences = args.batch;
  args.chunks = ceil_div(args.length, chunk);
  if (!cu_seqlens) return;
  const TensorInfo info = input_of(op, "cu_seqlens", *cu_seqlens);
  require(info.dims == 1 && info.sizes[0] > 0 && is(ScalarType::Int, info.scalar_type), op,
          ": cu_seqlens must be an int32 tensor of shape (sequences + 1,), got ", info, " of ",
          TypeName{info.scalar_type});
  checked.device("cu_seqlens", info);
  require(args.batch == 1, op, ": ", first, " must have a batch of 1 beside cu_seqlens, got ",
          args.batch);
  args.sequences = info.sizes[0] - 1;
  args.chunks += args.sequences;  // at most: each begins with a sequence
}

// Points the argument to the numbers, if there are any, and checks these.
template <class Args>
void put_sequences(const char* op, const char* first, const OptionalTensor& cu_seqlens, Args& args,
                   Copies& copies) {
  const int32_t* ends = args.cu_seqlens = dense_data_of<int32_t>(cu_seqlens, copies);
  if (!ends) return;
  require(ends[0] == 0, op, ": cu_seqlens must begin with 0, got ", ends[0]);
  for (int64_t i = 0; i < args.sequences; ++i) {
    require(ends[i] <= ends[i + 1], op, ": cu_seqlens must not decrease, got ", ends[i + 1],
            " after ", ends[i]);
  }
  require(ends[args.sequences] == args.length, op, ": cu_seqlens must end with the length of ",
          first, ", ", args.length, ", got ", ends[args.sequences]);
}

}  // namespace onepass
