// Rotary embedding of query and key, with optional norms of their rows before it: schema, checks,
// allocation.
#include "ops/rotary.h"

#include <tuple>

#include "ops/in_place.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// Arguments of every operator.
#define ONEPASS_ROTARY_TABLES(FIELD)   \
  FIELD(Tensor, cos, "")               \
  FIELD(Tensor, sin, "")               \
  FIELD(OptionalTensor, positions, "") \
  FIELD(int64_t, rotary_dim, "")       \
  FIELD(bool, interleaved, "")
// A result lies as (batch, tokens, heads, head_dim) does.
#define ONEPASS_ROTARY_LAYOUTS(FIELD) \
  FIELD(bool, query_bshd, "")         \
  FIELD(bool, key_bshd, "")
#define ONEPASS_ROTARY_NORMS(FIELD)                                              \
  FIELD(OptionalTensor, query_weight, "=None") /* of the RMS norm of its rows */ \
  FIELD(OptionalTensor, key_weight, "=None")                                     \
  FIELD(OptionalDouble, eps, "=None") /* given with a weight */                  \
  FIELD(double, weight_offset, "=0.0")

// The arguments of rotary_forward besides query, and of rotary_forward_inplace besides query and
// key.
#define ONEPASS_ROTARY_OPTIONS(FIELD) \
  FIELD(OptionalTensor, key, "")      \
  ONEPASS_ROTARY_TABLES(FIELD)        \
  FIELD(bool, transposed, "")         \
  ONEPASS_ROTARY_LAYOUTS(FIELD)       \
  ONEPASS_ROTARY_NORMS(FIELD)
#define ONEPASS_ROTARY_INPLACE_OPTIONS(FIELD) \
  ONEPASS_ROTARY_TABLES(FIELD)                \
  ONEPASS_ROTARY_NORMS(FIELD)

// The arguments of rotary_backward besides dquery_out. query and key are those of the forward,
// given with their weights; the order in memory is that of their gradients.
#define ONEPASS_ROTARY_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, dkey_out, "")          \
  FIELD(OptionalTensor, query, "")             \
  FIELD(OptionalTensor, key, "")               \
  ONEPASS_ROTARY_TABLES(FIELD)                 \
  ONEPASS_ROTARY_LAYOUTS(FIELD)                \
  FIELD(OptionalTensor, query_weight, "")      \
  FIELD(OptionalTensor, key_weight, "")        \
  FIELD(double, eps, "")                       \
  FIELD(double, weight_offset, "")             \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(RotaryOptions, ONEPASS_ROTARY_OPTIONS);
ONEPASS_DEFINE_OPTIONS(RotaryInplaceOptions, ONEPASS_ROTARY_INPLACE_OPTIONS);
ONEPASS_DEFINE_OPTIONS(RotaryBackwardOptions, ONEPASS_ROTARY_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantQuery = 1;
constexpr int64_t kWantKey = 2;
constexpr int64_t kWantQueryWeight = 4;
constexpr int64_t kWantKeyWeight = 8;

// The operator, and its names of the tensors that it rotates.
struct Names {
  const char* op;
  const char* query;
  const char* key;
};
constexpr Names kForwardNames = {"rotary_embedding", "query", "key"};
constexpr const char* kVerb = "rotated";  // in place
constexpr Names kBackwardNames = {"rotary_embedding_backward", "dquery_out", "dkey_out"};

template <class Options>
bool has_norms(const Options& options) {
  return options.query_weight || options.key_weight;
}

template <class Args>
struct CheckedRotary {
  Args args{};
  TensorInfo query{};
  TensorInfo key{};
};

// (batch, heads, tokens, head_dim) of which all but the heads are query's.
void check_key(const Names& names, const CheckedAgainst& checked, const TensorInfo& query,
               const TensorInfo& key) {
  const int64_t heads = key.dims == 4 ? key.sizes[1] : query.sizes[1];
  const int64_t shape[] = {query.sizes[0], heads, query.sizes[2], query.sizes[3]};
  checked.tensor_of(names.key, key, shape, checked.first_dtype(), names.query);
}

template <class Options>
void check_tables(const char* op, const Options& options, const CheckedAgainst& checked,
                  RotaryForward& args) {
  const TensorInfo cos = input_of(op, "cos", options.cos);
  const TensorInfo sin = input_of(op, "sin", options.sin);
  args.rotary_dim = options.rotary_dim;
  require(args.rotary_dim >= 0 && args.rotary_dim % 2 == 0 && args.rotary_dim <= args.head_dim, op,
          ": rotary_dim must be even and at most head_dim, ", args.head_dim, ", got ",
          args.rotary_dim);
  checked.device("cos", cos);
  args.table_dtype = checked.dtype("cos", cos.scalar_type);
  const int64_t width = cos.dims > 0 ? cos.sizes[cos.dims - 1] : -1;
  require(width == args.rotary_dim || 2 * width == args.rotary_dim, op,
          ": cos must have a column for each of ", args.rotary_dim,
          " that are rotated, or for each pair, got shape ", cos);
  args.half_width = width != args.rotary_dim;
  if (options.positions) {
    require(cos.dims == 2, op, ": cos must have 2 dimensions with positions, got shape ", cos);
  } else {
    require((cos.dims == 2 || cos.dims == 3) && cos.sizes[cos.dims - 2] == args.tokens &&
                (cos.dims == 2 || cos.sizes[0] == 1 || cos.sizes[0] == args.batch),
            op, ": cos must have shape (", args.tokens, ", columns) or (", args.batch, ", ",
            args.tokens, ", columns), got ", cos);
  }
  checked.tensor_of("sin", sin, cos, args.table_dtype, "cos");
  args.rows = cos.sizes[cos.dims - 2];
}

// The stride of a dimension with one element means nothing, and need not be aligned.
int64_t stride_of(const TensorInfo& info, int64_t d) {
  return info.sizes[d] > 1 ? info.strides[d] : 0;
}

void check_positions(const char* op, const Tensor& positions, const CheckedAgainst& checked,
                     RotaryForward& args) {
  const TensorInfo info = input_of(op, "positions", positions);
  checked.device("positions", info);
  args.wide_positions = is(ScalarType::Long, info.scalar_type);
  require(args.wide_positions || is(ScalarType::Int, info.scalar_type), op,
          ": positions must have dtype int64 or int32, got ", TypeName{info.scalar_type});
  const bool by_batch = info.dims == 2;
  require((by_batch || info.dims == 1) && info.sizes[info.dims - 1] == args.tokens &&
              (!by_batch || info.sizes[0] == 1 || info.sizes[0] == args.batch),
          op, ": positions must have shape (", args.tokens, ",) or (", args.batch, ", ",
          args.tokens, "), got ", info);
  args.positions_stride = info.strides[info.dims - 1];
  args.positions_batch_stride = by_batch ? stride_of(info, 0) : 0;
}

template <class Args, class Options>
CheckedRotary<Args> check_rotary(const Names& names, const Options& options, const Tensor& query,
                                 const OptionalTensor& key) {
  const char* const op = names.op;
  CheckedRotary<Args> call{.query = input_of(op, names.query, query)};
  RotaryForward& args = call.args;
  const CheckedAgainst checked(op, names.query, call.query);
  require(call.query.dims == 4, op, ": ", names.query,
          " must have 4 dimensions, or 3 without a batch, got shape ", call.query);
  args.dtype = checked.first_dtype();
  args.batch = call.query.sizes[0];
  args.query.heads = call.query.sizes[1];
  args.tokens = call.query.sizes[2];
  args.head_dim = call.query.sizes[3];
  if (key) {
    call.key = input_of(op, names.key, *key);
    check_key(names, checked, call.query, call.key);
    args.key.heads = call.key.sizes[1];
  }
  check_tables(op, options, checked, args);
  if (options.positions) check_positions(op, *options.positions, checked, args);
  const Shape row(&args.head_dim, 1);
  args.query.weight_dtype = checked.tensor("query_weight", options.query_weight, row);
  require(key || !options.key_weight, op, ": key_weight must be given with ", names.key,
          " only, got one without");
  args.key.weight_dtype = checked.tensor("key_weight", options.key_weight, row);
  if constexpr (!kHostReadsTensors) {
    require(!has_norms(options) || args.head_dim <= kMostNormedColumns, op, ": ", names.query,
            " must have a head_dim of at most ", kMostNormedColumns, " with a weight on CUDA, got ",
            args.head_dim);
  }
  args.interleaved = options.interleaved;
  args.weight_offset = options.weight_offset;
  return call;
}

template <class Options>
CheckedRotary<RotaryForward> check_rows_and_norms(const Options& options, const Tensor& query,
                                                  const OptionalTensor& key) {
  const char* const op = kForwardNames.op;
  auto call = check_rotary<RotaryForward>(kForwardNames, options, query, key);
  const bool has_weight = has_norms(options);
  require(has_weight || !options.eps, op, ": eps must be given with a weight only, got ",
          options.eps.value_or(0.0), " without");
  require(!has_weight || options.eps, op, ": eps must be given with a weight, got none");
  require(has_weight || options.weight_offset == 0.0, op,
          ": weight_offset must be 0 without a weight, got ", options.weight_offset);
  call.args.eps = options.eps.value_or(0.0);
  return call;
}

CheckedRotary<RotaryForward> check_forward(const RotaryOptions& options, const Tensor& query) {
  auto call = check_rows_and_norms(options, query, options.key);
  require(!has_norms(options) || !options.transposed, kForwardNames.op,
          ": transposed must be False with a weight, got True");
  call.args.transposed = options.transposed;
  return call;
}

CheckedRotary<RotaryForward> check_inplace(const RotaryInplaceOptions& options, const Tensor& query,
                                           const OptionalTensor& key) {
  auto call = check_rows_and_norms(options, query, key);
  call.args.in_place = true;
  const char* const op = kForwardNames.op;
  const auto check_place = [&](const char* name, const TensorInfo& info) {
    require_dense_rows(op, name, info, kVerb);
    require_own_places(op, name, info, kVerb);
  };
  check_place("query", call.query);
  if (key) check_place("key", call.key);
  // A lazy clone of torch's, which shares its memory until it is written, gets its own here.
  const auto written = [&](const Tensor& tensor, const TensorInfo& info) {
    return Place{mutable_data_of(tensor.get()), info, size_of(call.args.dtype)};
  };
  const Place of_query = written(query, call.query);
  const Place of_key = key ? written(*key, call.key) : Place{};
  if (key) require_apart(op, "key", of_key, "query", of_query, kVerb);
  const auto read = [&](const char* name, const Place& place) {
    require_apart(op, name, place, "query", of_query, kVerb);
    if (key) require_apart(op, name, place, "key", of_key, kVerb);
  };
  const auto read_numbers = [&](const char* name, const OptionalTensor& tensor) {
    if (tensor) read(name, place_of(*tensor));
  };
  read_numbers("cos", options.cos);
  read_numbers("sin", options.sin);
  if (options.positions) {
    const Tensor& positions = *options.positions;
    const int64_t bytes = call.args.wide_positions ? 8 : 4;
    read("positions", {positions.const_data_ptr(), info_of(positions), bytes});
  }
  read_numbers("query_weight", options.query_weight);
  read_numbers("key_weight", options.key_weight);
  return call;
}

// x of a tensor whose gradient is `d`, of its shape and dtype.
void check_normed(const char* name, const OptionalTensor& x, const OptionalTensor& weight,
                  const CheckedAgainst& checked, const TensorInfo& d) {
  if (!weight) return;
  const char* const op = kBackwardNames.op;
  require(x.has_value(), op, ": ", name, " must be given with its weight, got none");
  checked.tensor_of(name, *x, d, checked.first_dtype(), "dquery_out");
}

CheckedRotary<RotaryBackward> check_backward(const RotaryBackwardOptions& options,
                                             const Tensor& dquery_out) {
  auto call = check_rotary<RotaryBackward>(kBackwardNames, options, dquery_out, options.dkey_out);
  const CheckedAgainst checked(kBackwardNames.op, "dquery_out", call.query);
  check_normed("query", options.query, options.query_weight, checked, call.query);
  check_normed("key", options.key, options.key_weight, checked, call.key);
  call.args.eps = options.eps;
  call.args.transposed = true;
  return call;
}

// Checked where that costs nothing; elsewhere a kernel reads no row that does not exist.
[[maybe_unused]] void require_positions(const char* op, const RotaryForward& args) {
  const int64_t sequences =
      args.positions_batch_stride ? args.batch : std::min<int64_t>(args.batch, 1);
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t t = 0; t < args.tokens; ++t) {
      const int64_t position = rotary_row(args, b, t);
      require(position >= 0 && position < args.rows, op, ": positions must lie between 0 and ",
              args.rows - 1, ", the last row of cos, got ", position);
    }
  }
}

HeadStride strides_of(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  return {stride_of(info, 0), stride_of(info, 1), stride_of(info, 2)};
}

const void* rows_of(const Tensor& given, HeadStride& stride, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  stride = strides_of(tensor);
  return tensor.const_data_ptr();
}

RotaryTable table_of(const Tensor& given, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  const TensorInfo info = info_of(tensor);
  return {tensor.const_data_ptr(), info.dims == 3 ? stride_of(info, 0) : 0,
          stride_of(info, info.dims - 2)};
}

// The arguments besides the rows, copied where necessary.
template <class Options>
void put_options([[maybe_unused]] const char* op, const Options& options, RotaryForward& args,
                 Copies& copies) {
  args.cos = table_of(options.cos, copies);
  args.sin = table_of(options.sin, copies);
  if (options.positions) {
    args.positions = options.positions->const_data_ptr();
    if constexpr (kHostReadsTensors) require_positions(op, args);
  }
  args.query.weight = dense_data_of(options.query_weight, copies);
  args.key.weight = dense_data_of(options.key_weight, copies);
}

Dispatch describe(const char* op, const RotaryForward& args) {
  const char* const normed = !args.key.weight ? "query" : !args.query.weight ? "key" : "both";
  return described(op, args.batch, " x ", args.query.heads,
                   when(args.key.heads > 0, " + ", args.key.heads), " heads x ", args.tokens, " x ",
                   args.head_dim, ", ", args.rotary_dim, " columns in ",
                   args.interleaved ? "neighbouring" : "distant", " pairs, ",
                   when(args.query.weight || args.key.weight, "after RMS norms of ", normed, ", "),
                   args.dtype, ", cos ", args.table_dtype, when(args.in_place, ", in place"));
}

bool is_empty(const RotaryForward& args) {
  return args.batch * args.tokens * args.head_dim == 0 || args.query.heads + args.key.heads == 0;
}

std::tuple<Tensor, Tensor> rotary_forward(const RotaryOptions& options, const Tensor& query) {
  auto call = check_forward(options, query);
  RotaryForward& args = call.args;
  Copies copies;
  put_options(kForwardNames.op, options, args, copies);
  const Device device = call.query.device;
  const auto output = [&](const Tensor& input, const TensorInfo& info, bool bshd,
                          RotatedHeads& heads) {
    Tensor made = empty_rows(info, args.dtype, device, bshd);
    heads.input = rows_of(input, heads.input_stride, copies);
    heads.output = made.mutable_data_ptr();
    heads.output_stride = strides_of(made);
    return made;
  };
  Tensor query_out = output(query, call.query, options.query_bshd, args.query);
  Tensor key_out = options.key ? output(*options.key, call.key, options.key_bshd, args.key)
                               : empty_1d(0, args.dtype, device);
  if (!is_empty(args)) {
    const char* const op = args.transposed ? kBackwardNames.op : kForwardNames.op;
    run_operator(backend().rotary_forward, args, device, [&] { return describe(op, args); });
  }
  return {query_out, key_out};
}

void rotary_forward_inplace(const RotaryInplaceOptions& options, const Tensor& query,
                            const OptionalTensor& key) {
  auto call = check_inplace(options, query, key);
  RotaryForward& args = call.args;
  if (is_empty(args)) return;
  if (args.rotary_dim == 0 && !has_norms(options)) return;
  Copies copies;
  put_options(kForwardNames.op, options, args, copies);
  const auto here = [](const Tensor& tensor, RotatedHeads& heads) {
    heads.input = heads.output = mutable_data_of(tensor.get());
    heads.input_stride = heads.output_stride = strides_of(tensor);
  };
  here(query, args.query);
  if (key) here(*key, args.key);
  run_operator(backend().rotary_forward, args, call.query.device,
               [&] { return describe(kForwardNames.op, args); });
}

using BackwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

BackwardResults rotary_backward(const RotaryBackwardOptions& options, const Tensor& dquery_out) {
  auto call = check_backward(options, dquery_out);
  RotaryBackward& args = call.args;
  Copies copies;
  put_options(kBackwardNames.op, options, args, copies);
  const Device device = call.query.device;
  // The gradients of a tensor's rows and of its weight.
  const auto gradients = [&](const OptionalTensor& d, const TensorInfo& info,
                             const OptionalTensor& x, const OptionalTensor& weight, bool bshd,
                             bool wants_rows, bool wants_weight, RotatedHeads& heads,
                             NormedHeads& norm) {
    const bool has_rows = args.batch * heads.heads * args.tokens > 0;
    const DType weight_dtype = weight ? heads.weight_dtype : args.dtype;
    const Shape row(&args.head_dim, 1);
    const bool sums = weight && wants_weight;
    Tensor dweight = empty_if(sums && has_rows, row, weight_dtype, device, norm.dweight);
    if (sums && !has_rows) dweight = zeros(row, weight_dtype, device);
    Tensor rows = empty_1d(0, args.dtype, device);
    if (d && wants_rows) {
      rows = empty_rows(info, args.dtype, device, bshd);
      heads.output = rows.mutable_data_ptr();
      heads.output_stride = strides_of(rows);
    }
    if (!d || (!wants_rows && !norm.dweight)) {
      heads = {};  // no gradient is wanted
      return std::pair{rows, dweight};
    }
    heads.input = rows_of(*d, heads.input_stride, copies);
    if (weight) norm.x = rows_of(*x, norm.x_stride, copies);
    return std::pair{rows, dweight};
  };
  const int64_t mask = options.grad_mask;
  const auto [dquery, dquery_weight] =
      gradients(dquery_out, call.query, options.query, options.query_weight, options.query_bshd,
                mask & kWantQuery, mask & kWantQueryWeight, args.query, args.query_norm);
  const auto [dkey, dkey_weight] =
      gradients(options.dkey_out, call.key, options.key, options.key_weight, options.key_bshd,
                mask & kWantKey, mask & kWantKeyWeight, args.key, args.key_norm);
  if (!is_empty(args)) {
    run_operator(backend().rotary_backward, args, device,
                 [&] { return describe(kBackwardNames.op, args); });
  }
  return {dquery, dkey, dquery_weight, dkey_weight};
}

}  // namespace

OperatorList rotary_operators() {
  return {
      // Its own backward without weights: the transposed map on the gradients. key_out has size 0
      // without a key.
      entry<&rotary_forward, &check_forward>("rotary_forward",
                                             "Tensor query" ONEPASS_SCHEMA(ONEPASS_ROTARY_OPTIONS),
                                             "(Tensor query_out, Tensor key_out)"),
      // The same rows, written where they lie.
      entry<&rotary_forward_inplace, &check_inplace>(
          "rotary_forward_inplace",
          "Tensor(a!) query, Tensor(b!)? key" ONEPASS_SCHEMA(ONEPASS_ROTARY_INPLACE_OPTIONS), "()"),
      // With weights. grad_mask: 1 dquery, 2 dkey, 4 dquery_weight, 8 dkey_weight.
      entry<&rotary_backward, &check_backward>(
          "rotary_backward", "Tensor dquery_out" ONEPASS_SCHEMA(ONEPASS_ROTARY_BACKWARD_OPTIONS),
          "(Tensor dquery, Tensor dkey, Tensor dquery_weight, Tensor dkey_weight)"),
  };
}

}  // namespace onepass
