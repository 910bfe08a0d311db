// Rotary embedding of query and key: schema, checks, allocation.
#include "ops/rotary.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// What rotary_forward takes beside its query.
#define ONEPASS_ROTARY_OPTIONS(FIELD)                                                        \
  FIELD(OptionalTensor, key, "")                                                             \
  FIELD(Tensor, cos, "")                                                                     \
  FIELD(Tensor, sin, "")                                                                     \
  FIELD(OptionalTensor, positions, "")                                                       \
  FIELD(int64_t, rotary_dim, "")                                                             \
  FIELD(bool, interleaved, "")                                                               \
  FIELD(bool, transposed, "")                                                                \
  FIELD(bool, query_bshd, "") /* its output lies as (batch, tokens, heads, head_dim) does */ \
  FIELD(bool, key_bshd, "")

ONEPASS_DEFINE_OPTIONS(RotaryOptions, ONEPASS_ROTARY_OPTIONS);

constexpr const char* kOp = "rotary_embedding";

struct CheckedRotary {
  RotaryForward args{};
  TensorInfo query{};
  TensorInfo key{};
};

// (batch, heads, tokens, head_dim) of which all but the heads are query's.
void check_key(const CheckedAgainst& checked, const TensorInfo& query, const TensorInfo& key) {
  const int64_t heads = key.dims == 4 ? key.sizes[1] : query.sizes[1];
  const int64_t shape[] = {query.sizes[0], heads, query.sizes[2], query.sizes[3]};
  const DType dtype = checked.tensor("key", key, shape, 4);
  require(dtype == checked.first_dtype(), kOp, ": key must have dtype ",
          name_of(checked.first_dtype()), " like query, got ", name_of(dtype));
}

void check_tables(const RotaryOptions& options, const CheckedAgainst& checked,
                  RotaryForward& args) {
  const TensorInfo cos = input_of(kOp, "cos", options.cos);
  const TensorInfo sin = input_of(kOp, "sin", options.sin);
  args.rotary_dim = options.rotary_dim;
  require(args.rotary_dim >= 0 && args.rotary_dim % 2 == 0 && args.rotary_dim <= args.head_dim, kOp,
          ": rotary_dim must be even and at most head_dim, ", args.head_dim, ", got ",
          args.rotary_dim);
  checked.device("cos", cos);
  args.table_dtype = checked.dtype("cos", cos.scalar_type);
  const int64_t width = cos.dims > 0 ? cos.sizes[cos.dims - 1] : -1;
  require(width == args.rotary_dim || 2 * width == args.rotary_dim, kOp,
          ": cos must have a column for each of ", args.rotary_dim,
          " that are rotated, or for each pair, got shape ", shape_of(cos));
  args.half_width = width != args.rotary_dim;
  if (options.positions) {
    require(cos.dims == 2, kOp, ": cos must have 2 dimensions with positions, got shape ",
            shape_of(cos));
  } else {
    require((cos.dims == 2 || cos.dims == 3) && cos.sizes[cos.dims - 2] == args.tokens &&
                (cos.dims == 2 || cos.sizes[0] == 1 || cos.sizes[0] == args.batch),
            kOp, ": cos must have shape (", args.tokens, ", columns) or (", args.batch, ", ",
            args.tokens, ", columns), got ", shape_of(cos));
  }
  const DType sin_dtype = checked.tensor("sin", sin, cos.sizes, cos.dims);
  require(sin_dtype == args.table_dtype, kOp, ": sin must have dtype ", name_of(args.table_dtype),
          " like cos, got ", name_of(sin_dtype));
  args.rows = cos.sizes[cos.dims - 2];
}

// That of a single element means nothing, and could be one that is not aligned.
int64_t stride_of(const TensorInfo& info, int64_t d) {
  return info.sizes[d] > 1 ? info.strides[d] : 0;
}

void check_positions(const Tensor& positions, const CheckedAgainst& checked, RotaryForward& args) {
  const TensorInfo info = input_of(kOp, "positions", positions);
  checked.device("positions", info);
  args.wide_positions = is_int64(info.scalar_type);
  require(args.wide_positions || is_int32(info.scalar_type), kOp,
          ": positions must have dtype int64 or int32, got ", TypeName{info.scalar_type});
  const bool by_batch = info.dims == 2;
  require((by_batch || info.dims == 1) && info.sizes[info.dims - 1] == args.tokens &&
              (!by_batch || info.sizes[0] == 1 || info.sizes[0] == args.batch),
          kOp, ": positions must have shape (", args.tokens, ",) or (", args.batch, ", ",
          args.tokens, "), got ", shape_of(info));
  args.positions_stride = info.strides[info.dims - 1];
  args.positions_batch_stride = by_batch ? stride_of(info, 0) : 0;
}

CheckedRotary check_rotary(const RotaryOptions& options, const Tensor& query) {
  CheckedRotary call{.query = input_of(kOp, "query", query)};
  RotaryForward& args = call.args;
  const CheckedAgainst checked(kOp, "query", call.query);
  require(call.query.dims == 4, kOp,
          ": query must have 4 dimensions, or 3 without a batch, got shape ", shape_of(call.query));
  args.dtype = checked.first_dtype();
  args.batch = call.query.sizes[0];
  args.query.heads = call.query.sizes[1];
  args.tokens = call.query.sizes[2];
  args.head_dim = call.query.sizes[3];
  if (options.key) {
    call.key = input_of(kOp, "key", *options.key);
    check_key(checked, call.query, call.key);
    args.key.heads = call.key.sizes[1];
  }
  check_tables(options, checked, args);
  if (options.positions) check_positions(*options.positions, checked, args);
  return call;
}

// Where that costs nothing; elsewhere a kernel reads no row that is not there.
void require_positions(const RotaryForward& args) {
  const int64_t sequences =
      args.positions_batch_stride ? args.batch : std::min<int64_t>(args.batch, 1);
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t t = 0; t < args.tokens; ++t) {
      const int64_t position = rotary_row(args, b, t);
      require(position >= 0 && position < args.rows, kOp, ": positions must lie between 0 and ",
              args.rows - 1, ", the last row of cos, got ", position);
    }
  }
}

// A last dimension that is not dense is copied, all else is read in place.
OptionalTensor with_dense_columns(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  const bool is_dense = info.sizes[info.dims - 1] <= 1 || info.strides[info.dims - 1] == 1;
  return is_dense ? tensor : contiguous_copy(tensor);
}

HeadStride strides_of(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  return {stride_of(info, 0), stride_of(info, 1), stride_of(info, 2)};
}

RotaryTable table_of(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  return {tensor.const_data_ptr(), info.dims == 3 ? stride_of(info, 0) : 0,
          stride_of(info, info.dims - 2)};
}

Dispatch describe(const RotaryForward& args) {
  std::ostringstream text;
  text << args.batch << " x " << args.query.heads;
  if (args.key.input) text << " + " << args.key.heads;
  text << " heads x " << args.tokens << " x " << args.head_dim << ", " << args.rotary_dim
       << " columns in " << (args.interleaved ? "neighbouring" : "distant") << " pairs, "
       << name_of(args.dtype) << ", cos " << name_of(args.table_dtype);
  return {.op = args.transposed ? "rotary_embedding_backward" : kOp, .arguments = text.str()};
}

std::tuple<Tensor, Tensor> rotary_forward(const RotaryOptions& options, const Tensor& query) {
  CheckedRotary call = check_rotary(options, query);
  RotaryForward& args = call.args;
  if (options.positions) {
    args.positions = options.positions->const_data_ptr();
    if constexpr (kHostReadsTensors) require_positions(args);
  }
  args.interleaved = options.interleaved;
  args.transposed = options.transposed;
  const Device device = call.query.device;
  const auto output = [&](const TensorInfo& like, bool bshd) {
    return empty_rows(like.sizes, 4, args.dtype, device, bshd);
  };
  Tensor query_out = output(call.query, options.query_bshd);
  Tensor key_out =
      options.key ? output(call.key, options.key_bshd) : empty_1d(0, args.dtype, device);
  const OptionalTensor dense_query = with_dense_columns(query);
  const OptionalTensor dense_key = options.key ? with_dense_columns(*options.key) : std::nullopt;
  const OptionalTensor cos = with_dense_columns(options.cos);
  const OptionalTensor sin = with_dense_columns(options.sin);
  const auto attach = [](RotatedHeads& heads, const Tensor& input, Tensor& output) {
    heads.input = input.const_data_ptr();
    heads.output = output.mutable_data_ptr();
    heads.input_stride = strides_of(input);
    heads.output_stride = strides_of(output);
  };
  attach(args.query, *dense_query, query_out);
  if (options.key) attach(args.key, *dense_key, key_out);
  args.cos = table_of(*cos);
  args.sin = table_of(*sin);
  const int64_t heads = args.query.heads + args.key.heads;
  if (args.batch * args.tokens * args.head_dim > 0 && heads > 0) {
    run_operator(backend().rotary_forward, args, device, [&] { return describe(args); });
  }
  return {query_out, key_out};
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void rotary_forward_check(const RotaryOptions& options, const Tensor& query) {
  check_rotary(options, query);
}

}  // namespace

#define ONEPASS_ROTARY_ARGUMENTS "(Tensor query" ONEPASS_SCHEMA(ONEPASS_ROTARY_OPTIONS) ")"

OperatorList rotary_operators() {
  return {
      // Its own backward: the transposed map on the gradients. key_out has size 0 without a key.
      entry<&Packed<&rotary_forward>::call>("rotary_forward" ONEPASS_ROTARY_ARGUMENTS
                                            " -> (Tensor query_out, Tensor key_out)"),
      entry<&Packed<&rotary_forward_check>::call>(
          "rotary_forward_check" ONEPASS_ROTARY_ARGUMENTS " -> ()", true),
  };
}

}  // namespace onepass
