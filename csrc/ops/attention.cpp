// Attention of dense, packed and paged sequences: schemas, allocation. The kernels are the back
// end's; every one of them is reached through the checks of attention_checks.h.
#include "ops/attention.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "ops/attention_checks.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

using Layout = AttentionLayout;
using Options = AttentionOptions;

// Where sequences lie, checked as far as their values can be read.
void attach_lengths(const AttentionChecks& checks, const Options& options, Attention& args,
                    Copies& copies) {
  args.cu_seq_q = dense_data_of<int32_t>(options.cu_seq_q, copies);
  args.cu_seq_k = dense_data_of<int32_t>(options.cu_seq_k, copies);
  args.seqused_k = dense_data_of<int32_t>(options.seqused_k, copies);
  args.block_table = dense_data_of<int32_t>(options.block_table, copies);
  checks.lengths(args);
}

void check_lengths(const AttentionChecks& checks, const Options& options) {
  Attention args = checks.args();
  Copies copies;
  attach_lengths(checks, options, args, copies);
}

// The arguments that both directions have; each adds its own.
Attention attach(const char* op, const AttentionChecks& checks, const Tensor& query,
                 const Tensor& key, const Tensor& value, const Options& options, Copies& copies) {
  Attention args = checks.args();
  attach_lengths(checks, options, args, copies);
  args.query = rows_of(query, checks.query_layout(), copies);
  args.key = rows_of(key, checks.key_layout(), copies);
  args.value = rows_of(value, checks.key_layout(), copies);
  attach_score_options(op, options, args, copies);
  return args;
}

// ---- allocation and calls ----------------------------------------------------------------------

// The shapes of the output, (batch, heads, seq_q, value_dim) or (total_q, heads, value_dim), and of
// the log-sum-exp, (batch, heads, seq_q) or (heads, total_q).
class ResultShapes {
 public:
  explicit ResultShapes(const AttentionChecks& checks)
      : dims_(checks.query().dims), of_packed_{checks.query().sizes[1], checks.query().sizes[0]} {
    std::copy_n(checks.query().sizes, dims_, sizes_);
    sizes_[dims_ - 1] = checks.args().value_dim;
  }
  Shape output() const { return {sizes_, dims_}; }
  Shape lse() const { return dims_ == 3 ? Shape(of_packed_) : Shape(sizes_, 3); }

 private:
  int64_t dims_;
  int64_t sizes_[4];
  int64_t of_packed_[2];
};

Dispatch describe(const char* op, const Attention& args) {
  return described(op, text_of_heads(args), ", ", args.cu_seq_q ? "up to " : "", args.seq_q,
                   " queries x ", args.seq_k, " keys", text_of_terms(args));
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Options& options, const Tensor& query,
                                                     const Tensor& key, const Tensor& value) {
  constexpr const char* op = "attention";
  const AttentionChecks checks(op, query, key, value, options);
  Copies copies;
  AttentionForward args{};
  static_cast<Attention&>(args) = attach(op, checks, query, key, value, options, copies);
  const TensorInfo& shape = checks.query();
  const ResultShapes shapes(checks);
  const DType accumulator = accumulator_of(args.dtype);
  Tensor output = empty_rows(shapes.output(), args.dtype, shape.device, options.out_bshd);
  Tensor lse = empty(shapes.lse(), accumulator, shape.device);
  Tensor lse_rest = empty(shapes.lse(), accumulator, shape.device);
  if (args.total_q * args.heads > 0) {
    args.output = rows_of(output, checks.query_layout(), copies);
    args.lse = lse.mutable_data_ptr();
    args.lse_rest = lse_rest.mutable_data_ptr();
    checks.tighten(args, Strided{});
    run_operator(backend().attention_forward, args, shape.device,
                 [&] { return describe(op, args); });
  }
  return {output, lse, lse_rest};
}

// The errors alone; also called before pages are gathered.
void check_forward(const Options& options, const Tensor& query, const Tensor& key,
                   const Tensor& value) {
  check_lengths(AttentionChecks("attention", query, key, value, options), options);
}

// Arguments of the backward beside query, key, value and the options.
struct Upstream {
  const OptionalTensor& doutput;
  const OptionalTensor& dlse;
  const Tensor& output;
  const Tensor& lse;
  const OptionalTensor& lse_rest;
  int64_t grad_mask;
};

constexpr const char* kBackward = "attention_backward";

void check_upstream(const AttentionChecks& checks, const Options& options, const Upstream& given) {
  require(!options.block_table, kBackward, ": block_table must not be given, got one");
  const int64_t possible = kWantQuery | kWantKey | kWantValue | score_gradients(options);
  require((given.grad_mask & ~possible) == 0, kBackward,
          ": grad_mask must ask for gradients of what is given only, ", possible, ", got ",
          given.grad_mask);
  const CheckedAgainst& checked = checks.checked();
  const DType dtype = checks.args().dtype;
  const ResultShapes shapes(checks);
  const auto check_lse = [&](const char* name, const Tensor& tensor) {
    checked.tensor_of(name, tensor, shapes.lse(), checked.accumulator());
  };
  checked.tensor_of("output", given.output, shapes.output(), dtype);
  check_lse("lse", given.lse);
  if (given.lse_rest) check_lse("lse_rest", *given.lse_rest);
  if (given.doutput) checked.tensor_of("doutput", *given.doutput, shapes.output(), dtype);
  if (given.dlse) check_lse("dlse", *given.dlse);
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> attention_backward(
    const Options& options, const OptionalTensor& doutput, const OptionalTensor& dlse,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& lse, const OptionalTensor& lse_rest, int64_t grad_mask, bool deterministic) {
  const AttentionChecks checks(kBackward, query, key, value, options);
  check_upstream(checks, options, {doutput, dlse, output, lse, lse_rest, grad_mask});
  const Layout layout = checks.query_layout();
  const Device device = checks.query().device;

  Copies copies;
  AttentionBackward args{};
  static_cast<Attention&>(args) = attach(kBackward, checks, query, key, value, options, copies);
  Tensor dquery = empty_gradient(grad_mask & kWantQuery, query, options.out_bshd);
  Tensor dkey = empty_gradient(grad_mask & kWantKey, key, options.out_bshd);
  Tensor dvalue = empty_gradient(grad_mask & kWantValue, value, options.out_bshd);
  std::vector<Tensor> dterms = empty_score_gradients(options, query, grad_mask);
  if (options.seqused_k) {  // rows that are no keys
    for (Tensor* gradient : {&dkey, &dvalue}) set_to_zero(*gradient);
  }
  if (args.total_q * args.heads == 0) {
    for (Tensor* gradient : {&dquery, &dkey, &dvalue}) set_to_zero(*gradient);
    for (Tensor& gradient : dterms) set_to_zero(gradient);
    return {dquery, dkey, dvalue, dterms};
  }

  const Tensor upstream = doutput ? *doutput : zeros(info_of(output), args.dtype, device);
  args.doutput = rows_of(upstream, layout, copies);
  args.output = rows_of(output, layout, copies);
  args.lse = dense_data_of(lse, copies);
  args.lse_rest = dense_data_of(lse_rest, copies);
  args.dlse = dense_data_of(dlse, copies);
  const auto rows_if = [&](bool wanted, const Tensor& tensor, Layout rows) {
    return wanted ? rows_of(tensor, rows, copies) : Strided{};
  };
  args.dquery = rows_if(grad_mask & kWantQuery, dquery, layout);
  args.dkey = rows_if(grad_mask & kWantKey, dkey, layout);
  args.dvalue = rows_if(grad_mask & kWantValue, dvalue, layout);
  attach_score_gradients(grad_mask, dterms, args, copies);
  args.deterministic = deterministic;
  checks.tighten(args, args.dbias);
  run_operator(backend().attention_backward, args, device,
               [&] { return describe(kBackward, args); });
  return {dquery, dkey, dvalue, dterms};
}

void check_backward(const Options& options, const OptionalTensor& doutput,
                    const OptionalTensor& dlse, const Tensor& query, const Tensor& key,
                    const Tensor& value, const Tensor& output, const Tensor& lse,
                    const OptionalTensor& lse_rest, int64_t grad_mask, bool) {
  const AttentionChecks checks(kBackward, query, key, value, options);
  check_upstream(checks, options, {doutput, dlse, output, lse, lse_rest, grad_mask});
  check_lengths(checks, options);
}

}  // namespace

#define ONEPASS_ATTENTION_ARGUMENTS \
  ONEPASS_SCHEMA(ONEPASS_SCORE_OPTIONS) ONEPASS_SCHEMA(ONEPASS_ATTENTION_OPTIONS)

OperatorList attention_operators() {
  return {
      // lse_rest is the rounding error of lse; the backward takes it.
      entry<&attention_forward, &check_forward>(
          "attention_forward",
          "Tensor query, Tensor key, Tensor value, *" ONEPASS_ATTENTION_ARGUMENTS,
          "(Tensor output, Tensor lse, Tensor lse_rest)"),
      // dterms: of the options that have gradients; the list may grow. grad_mask: 1 dquery, 2 dkey,
      // 4 dvalue, 8, 16, ... dterms; the others have size 0.
      entry<&attention_backward, &check_backward>(
          "attention_backward",
          "Tensor? doutput, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output, "
          "Tensor lse, Tensor? lse_rest=None, *, int grad_mask, "
          "bool deterministic=False" ONEPASS_ATTENTION_ARGUMENTS,
          "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dterms)"),
  };
}

}  // namespace onepass
