// Runs a direction of the attention spike on tensors from files: `attention_spike CASE`, see
// case.h.
#include "attention_spike.cuh"

#include "case.h"
#include "core/visit.h"
#include "cuda/launch.cuh"

namespace onepass::cuda::attention_spike {
namespace {

// ---- plan and run -------------------------------------------------------------------------------

// f<T, kHeadDim>() of the call.
template <class F>
void visit(const Attention& args, F&& f) {
  visit_bool(args.dtype == DType::kBFloat16, [&]<bool kBFloat16>() {
    using T = std::conditional_t<kBFloat16, BFloat16, Float16>;
    visit_bool(args.head_dim == 32,
               [&]<bool kNarrow>() { f.template operator()<T, kNarrow ? 32 : 64>(); });
  });
}

Plan plan_forward(const AttentionForward& args, const Machine&) {
  Plan plan{};
  plan.kernel_name = "attention_forward_kernel";
  plan.splits = args.batch * args.heads * ((args.seq_q + kQueries - 1) / kQueries);
  return plan;
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  visit(args, [&]<class T, int kHeadDim>() {
    launch<attention_forward_kernel<T, kHeadDim>>(
        {.blocks = static_cast<unsigned>(plan.splits),
         .threads = kThreads,
         .shared_bytes = Tile<T, kHeadDim>::bytes(kQueries + 4 * kForwardKeys<kHeadDim>)},
        context.stream, args);
  });
}

Plan plan_backward(const AttentionBackward& args, const Machine&) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  Plan plan{};
  plan.zeroed_bytes = rows * args.head_dim * static_cast<int64_t>(sizeof(float));  // dquery_sums
  plan.workspace_bytes = plan.zeroed_bytes + rows * static_cast<int64_t>(sizeof(float));  // delta
  plan.kernel_name = "attention_backward_kernel";
  plan.splits = args.kv_heads;
  return plan;
}

void run_backward(const AttentionBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  float* dquery_sums = static_cast<float*>(workspace);
  float* delta = dquery_sums + rows * args.head_dim;
  visit(args, [&]<class T, int kHeadDim>() {
    launch<attention_delta_kernel<T>>(
        {.blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps), .threads = kThreads},
        context.stream, args, delta);
    launch<attention_backward_kernel<T, kHeadDim>>(
        {.blocks = static_cast<unsigned>(plan.splits),
         .threads = kThreads,
         .shared_bytes = Tile<T, kHeadDim>::bytes(2 * kQueries + 2 * kBackwardKeys) +
                         Tile<T, kBackwardKeys>::bytes(2 * kQueries)},
        context.stream, args, static_cast<const float*>(delta), dquery_sums);
  });
}

Operator<AttentionForward> attention_forward() { return {plan_forward, run_forward}; }
Operator<AttentionBackward> attention_backward() { return {plan_backward, run_backward}; }

// ---- arguments from files -----------------------------------------------------------------------

void get_tensor(const Case& call, const std::string& name, Tensor& tensor) {
  call.get(name.c_str(), tensor.data);
  if (!tensor.data) return;
  call.get((name + "_batch_stride").c_str(), tensor.batch_stride);
  call.get((name + "_head_stride").c_str(), tensor.head_stride);
  call.get((name + "_row_stride").c_str(), tensor.row_stride);
}

#define GET_TENSOR(field) get_tensor(call, #field, args.field)

void get_attention(const Case& call, Attention& args) {
  GET_TENSOR(query), GET_TENSOR(key), GET_TENSOR(value), GET_TENSOR(bias), GET(seed);
  GET(batch), GET(heads), GET(kv_heads), GET(seq_q), GET(seq_k), GET(head_dim);
  GET(window_left), GET(window_right), GET(query_offset), GET(key_offset), GET(batch_offset);
  GET(head_offset), GET(total_heads), GET(scale), GET(dropout_p), GET(dtype), GET(bottom_right);
}

AttentionForward forward_of(const Case& call) {
  AttentionForward args{};
  get_attention(call, args);
  GET_TENSOR(output), GET(lse);
  return args;
}

AttentionBackward backward_of(const Case& call) {
  AttentionBackward args{};
  get_attention(call, args);
  GET_TENSOR(output), GET_TENSOR(doutput), GET(lse), GET(dlse);
  GET_TENSOR(dquery), GET_TENSOR(dkey), GET_TENSOR(dvalue), GET_TENSOR(dbias);
  return args;
}

}  // namespace
}  // namespace onepass::cuda::attention_spike

int main(int argc, char** argv) {
  using namespace onepass;
  namespace spike = cuda::attention_spike;
  return run_case(argc, argv, [](const Case& call, const std::string& op) {
    if (op == "attention_forward") run(spike::attention_forward(), spike::forward_of(call));
    if (op == "attention_backward") run(spike::attention_backward(), spike::backward_of(call));
    call.count("philox_calls", spike::philox_calls);
  });
}
