// Attention of dense, packed and paged sequences: schemas, allocation. The kernels are the back
// end's; every one of them is reached through the checks of attention_checks.h.
#include "ops/attention.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "ops/attention_checks.h"
#include "ops/attention_memory.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

using Layout = AttentionLayout;
using Options = AttentionOptions;

// Where sequences lie, checked as far as their values can be read.
void attach_lengths(const AttentionChecks& checks, const Options& options, Attention& args,
                    Copies& copies) {
  args.cu_seq_q = elements_of<int32_t>(options.cu_seq_q, copies);
  args.cu_seq_k = elements_of<int32_t>(options.cu_seq_k, copies);
  args.seqused_k = elements_of<int32_t>(options.seqused_k, copies);
  args.block_table = elements_of<int32_t>(options.block_table, copies);
  checks.lengths(args);
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

DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Of the log-sum-exp: (batch, heads, seq_q) or (heads, total_q).
struct StatisticShape {
  StatisticShape(const Attention& args, Layout layout) {
    if (layout == Layout::kPacked) {
      dims = 2;
      sizes[0] = args.heads, sizes[1] = args.total_q;
    } else {
      dims = 3;
      sizes[0] = args.batch, sizes[1] = args.heads, sizes[2] = args.seq_q;
    }
  }
  int64_t sizes[3];
  int64_t dims;
};

Dispatch describe(const char* op, const Attention& args) {
  std::ostringstream text;
  describe_heads(text, args);
  text << ", " << (args.cu_seq_q ? "up to " : "") << args.seq_q << " queries x " << args.seq_k
       << " keys";
  describe_terms(text, args);
  return {.op = op, .arguments = text.str()};
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Options& options, const Tensor& query,
                                                     const Tensor& key, const Tensor& value) {
  constexpr const char* op = "attention";
  const AttentionChecks checks(op, query, key, value, options);
  Copies copies;
  AttentionForward args{};
  static_cast<Attention&>(args) = attach(op, checks, query, key, value, options, copies);
  const TensorInfo& shape = checks.query();
  int64_t sizes[4];
  std::copy(shape.sizes, shape.sizes + shape.dims, sizes);
  sizes[shape.dims - 1] = args.value_dim;
  Tensor output = empty_rows(sizes, shape.dims, args.dtype, shape.device, options.out_bshd);
  const StatisticShape statistic(args, checks.query_layout());
  Tensor lse = empty(statistic.sizes, statistic.dims, accumulator_of(args.dtype), shape.device);
  Tensor lse_rest =
      empty(statistic.sizes, statistic.dims, accumulator_of(args.dtype), shape.device);
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

// The errors alone: on the meta device, where the fake gives the shapes, and before pages are
// gathered.
void attention_forward_check(const Options& options, const Tensor& query, const Tensor& key,
                             const Tensor& value) {
  const AttentionChecks checks("attention", query, key, value, options);
  Attention args = checks.args();
  Copies copies;
  attach_lengths(checks, options, args, copies);
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
  const TensorInfo& query = checks.query();
  const DType dtype = checks.args().dtype;
  const DType accumulator = accumulator_of(dtype);
  int64_t sizes[4];
  std::copy(query.sizes, query.sizes + query.dims, sizes);
  sizes[query.dims - 1] = checks.args().value_dim;
  const StatisticShape statistic(checks.args(), checks.query_layout());
  const auto check = [&](const char* name, const Tensor& tensor, const int64_t* shape, int64_t dims,
                         DType wanted) {
    const DType got = checks.checked().tensor(name, input_of(kBackward, name, tensor), shape, dims);
    require(got == wanted, kBackward, ": ", name, " must have dtype ", name_of(wanted), ", got ",
            name_of(got));
  };
  check("output", given.output, sizes, query.dims, dtype);
  check("lse", given.lse, statistic.sizes, statistic.dims, accumulator);
  if (given.lse_rest) {
    check("lse_rest", *given.lse_rest, statistic.sizes, statistic.dims, accumulator);
  }
  if (given.doutput) check("doutput", *given.doutput, sizes, query.dims, dtype);
  if (given.dlse) check("dlse", *given.dlse, statistic.sizes, statistic.dims, accumulator);
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> attention_backward(
    const Options& options, const OptionalTensor& doutput, const OptionalTensor& dlse,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& lse, const OptionalTensor& lse_rest, int64_t grad_mask, bool deterministic) {
  const AttentionChecks checks(kBackward, query, key, value, options);
  check_upstream(checks, options, {doutput, dlse, output, lse, lse_rest, grad_mask});
  const Layout layout = checks.query_layout();
  const TensorInfo& query_shape = checks.query();
  const DType dtype = checks.args().dtype;

  Copies copies;
  AttentionBackward args{};
  static_cast<Attention&>(args) = attach(kBackward, checks, query, key, value, options, copies);
  Tensor dquery = empty_gradient(grad_mask & kWantQuery, query, options.out_bshd);
  Tensor dkey = empty_gradient(grad_mask & kWantKey, key, options.out_bshd);
  Tensor dvalue = empty_gradient(grad_mask & kWantValue, value, options.out_bshd);
  std::vector<Tensor> dterms = empty_score_gradients(options, query, grad_mask);
  const bool empty_call = args.total_q * args.heads == 0;
  if (options.seqused_k) {  // rows that are no keys
    for (Tensor* gradient : {&dkey, &dvalue}) torch::stable::zero_(*gradient);
  }
  if (empty_call) {
    for (Tensor* gradient : {&dquery, &dkey, &dvalue}) torch::stable::zero_(*gradient);
    for (Tensor& gradient : dterms) torch::stable::zero_(gradient);
    return {dquery, dkey, dvalue, dterms};
  }

  const OptionalTensor upstream = doutput ? doutput : zeros_like(output, dtype);
  args.doutput = rows_of(*upstream, layout, copies);
  args.output = rows_of(output, layout, copies);
  args.lse = elements_of<void>(lse, copies);
  args.lse_rest = elements_of<void>(lse_rest, copies);
  args.dlse = elements_of<void>(dlse, copies);
  const auto rows_if = [&](bool wanted, const Tensor& tensor, Layout rows) {
    return wanted ? rows_of(tensor, rows, copies) : Strided{};
  };
  args.dquery = rows_if(grad_mask & kWantQuery, dquery, layout);
  args.dkey = rows_if(grad_mask & kWantKey, dkey, layout);
  args.dvalue = rows_if(grad_mask & kWantValue, dvalue, layout);
  attach_score_gradients(grad_mask, dterms, args, copies);
  args.deterministic = deterministic;
  checks.tighten(args, args.dbias);
  run_operator(backend().attention_backward, args, query_shape.device,
               [&] { return describe(kBackward, args); });
  return {dquery, dkey, dvalue, dterms};
}

void attention_backward_check(const Options& options, const OptionalTensor& doutput,
                              const OptionalTensor& dlse, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& output, const Tensor& lse,
                              const OptionalTensor& lse_rest, int64_t grad_mask, bool) {
  const AttentionChecks checks(kBackward, query, key, value, options);
  check_upstream(checks, options, {doutput, dlse, output, lse, lse_rest, grad_mask});
  Attention args = checks.args();
  Copies copies;
  attach_lengths(checks, options, args, copies);
}

}  // namespace

#define ONEPASS_ATTENTION_ARGUMENTS                                                  \
  "(Tensor query, Tensor key, Tensor value, *" ONEPASS_SCHEMA(ONEPASS_SCORE_OPTIONS) \
      ONEPASS_SCHEMA(ONEPASS_ATTENTION_OPTIONS) ")"
#define ONEPASS_ATTENTION_BACKWARD_ARGUMENTS                                                       \
  "(Tensor? doutput, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor " \
  "lse, Tensor? lse_rest=None, *, int grad_mask, bool deterministic=False" ONEPASS_SCHEMA(         \
      ONEPASS_SCORE_OPTIONS) ONEPASS_SCHEMA(ONEPASS_ATTENTION_OPTIONS) ")"

OperatorList attention_operators() {
  return {
      // lse_rest is the rounding error of lse; the backward takes it.
      entry<&Packed<&attention_forward>::call>("attention_forward" ONEPASS_ATTENTION_ARGUMENTS
                                               " -> (Tensor output, Tensor lse, Tensor lse_rest)"),
      entry<&Packed<&attention_forward_check>::call>(
          "attention_forward_check" ONEPASS_ATTENTION_ARGUMENTS " -> ()", true),
      // dterms: of the options that have gradients; the list may grow. grad_mask: 1 dquery, 2 dkey,
      // 4 dvalue, 8, 16, ... dterms; the others have size 0.
      entry<&Packed<&attention_backward>::call>(
          "attention_backward" ONEPASS_ATTENTION_BACKWARD_ARGUMENTS
          " -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dterms)"),
      entry<&Packed<&attention_backward_check>::call>(
          "attention_backward_check" ONEPASS_ATTENTION_BACKWARD_ARGUMENTS " -> ()", true),
  };
}

}  // namespace onepass
