#include "ops/attention_options.h"

#include <algorithm>
#include <iterator>

#include "ops/attention_checks.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// Whether the sizes are those of `full`, or 1 in its first `broadcast` dimensions.
bool fits(const Shape& sizes, const Shape& full, int64_t broadcast) {
  bool found = sizes.dims == full.dims;
  for (int64_t d = 0; found && d < full.dims; ++d) {
    found = sizes.sizes[d] == full.sizes[d] || (d < broadcast && sizes.sizes[d] == 1);
  }
  return found;
}

void check_broadcast(const char* op, const char* name, const CheckedAgainst& checked,
                     const Attention& args, const TensorInfo& info) {
  const int64_t full[] = {args.batch, args.heads, args.seq_q, args.seq_k};
  require(fits(info, full, 3), op, ": ", name, " must have shape ", Shape(full),
          " or 1 in place of all sizes but the last, got ", info);
  checked.device(name, info);
}

int64_t blocks_of(int64_t rows, int64_t block) { return rows / block + (rows % block != 0); }

// A block mask: for each block a number (no keys, all keys, or a tile), and the tiles.
void check_blocks(const char* op, const CheckedAgainst& checked, const AttentionOptions& options,
                  const TensorInfo& tiles, Attention& args) {
  const TensorInfo blocks = input_of(op, "block_mask", *options.block_mask);
  require(kHostReadsTensors, op,
          ": block_mask must not be given on CUDA, where torch's flex_attention takes a BlockMask, "
          "got one");
  require(!options.cu_seq_q, op, ": block_mask must not be given with cu_seq_q, got one");
  require(tiles.dims == 3 && tiles.sizes[1] > 0 && tiles.sizes[2] > 0, op,
          ": mask must have shape (tiles, rows, cols) with block_mask, got ", tiles);
  args.block_q = tiles.sizes[1];
  args.block_k = tiles.sizes[2];
  const int64_t full[] = {args.batch, args.heads, blocks_of(args.seq_q, args.block_q),
                          blocks_of(args.seq_k, args.block_k)};
  require(fits(blocks, full, 2), op, ": block_mask must have shape ", Shape(full),
          " or 1 in place of the first two sizes, got ", blocks);
  require(is(ScalarType::Int, blocks.scalar_type), op, ": block_mask must have dtype int32, got ",
          TypeName{blocks.scalar_type});
  checked.device("block_mask", blocks);
}

void attach_blocks(const char* op, const Tensor& block_mask, const Tensor& tiles, Attention& args,
                   Copies& copies) {
  const TensorInfo shape = info_of(block_mask);
  const int32_t* blocks = dense_data_of<int32_t>(block_mask, copies);
  const int64_t count = flat_info_of(block_mask).numel;
  const int64_t last = kFirstTile + info_of(tiles).sizes[0] - 1;
  for (int64_t i = 0; i < count; ++i) {
    require(blocks[i] >= 0 && blocks[i] <= last, op, ": block_mask must hold numbers from 0 to ",
            last, ", got ", blocks[i]);
  }
  const int64_t of_head = shape.sizes[2] * shape.sizes[3];
  args.blocks = {const_cast<int32_t*>(blocks), shape.sizes[0] == 1 ? 0 : shape.sizes[1] * of_head,
                 shape.sizes[1] == 1 ? 0 : of_head, shape.sizes[3]};
  args.mask = {const_cast<void*>(dense_data_of(tiles, copies)), 0, args.block_q * args.block_k,
               args.block_k};
}

// An option that has a gradient, and where that goes.
struct Differentiable {
  OptionalTensor AttentionOptions::* option;
  void (*attach)(AttentionBackward& args, const Tensor& gradient, Copies& copies);
};

// In the order of dterms.
constexpr Differentiable kDifferentiable[] = {
    {&AttentionOptions::bias,
     [](AttentionBackward& args, const Tensor& gradient, Copies& copies) {
       args.dbias = rows_of(gradient, AttentionLayout::kDense, copies);
       args.dbias_numel = flat_info_of(gradient).numel;
     }},
    {&AttentionOptions::sinks, [](AttentionBackward& args, const Tensor& gradient,
                                  Copies&) { args.dsinks = gradient.mutable_data_ptr(); }},
    {&AttentionOptions::alibi_slopes,
     [](AttentionBackward& args, const Tensor& gradient, Copies&) {
       args.dslopes = static_cast<float*>(gradient.mutable_data_ptr());
     }},
};

int64_t bit_of(const Differentiable& of) { return 2 * kWantValue << (&of - kDifferentiable); }

}  // namespace

void check_score_options(const char* op, const CheckedAgainst& checked,
                         const AttentionOptions& options, Attention& args) {
  const int64_t of_heads[] = {args.batch, args.heads};
  const Shape heads(&args.heads, 1);
  if (options.bias) {
    const TensorInfo bias = input_of(op, "bias", *options.bias);
    check_broadcast(op, "bias", checked, args, bias);
    args.bias_dtype = checked.dtype("bias", bias.scalar_type);
  }
  if (options.mask) {
    const TensorInfo mask = input_of(op, "mask", *options.mask);
    if (options.block_mask) {
      check_blocks(op, checked, options, mask, args);
      checked.device("mask", mask);
    } else {
      check_broadcast(op, "mask", checked, args, mask);
    }
    require(is(ScalarType::Bool, mask.scalar_type), op, ": mask must have dtype bool, got ",
            TypeName{mask.scalar_type});
  } else {
    require(!options.block_mask, op, ": mask must be given with block_mask, got none");
  }
  if (options.alibi_slopes) {
    const TensorInfo slopes = input_of(op, "alibi_slopes", *options.alibi_slopes);
    require(Shape(slopes) == heads || Shape(slopes) == of_heads, op,
            ": alibi_slopes must have shape ", heads, " or ", Shape(of_heads), ", got ", slopes);
    require(dtype_of(slopes.scalar_type) == DType::kFloat32, op,
            ": alibi_slopes must have dtype float32, got ", TypeName{slopes.scalar_type});
    checked.device("alibi_slopes", slopes);
    args.alibi_batch_stride = slopes.dims == 2 ? args.heads : 0;
  }
  if (options.sinks) {
    const TensorInfo sinks = input_of(op, "sinks", *options.sinks);
    require(Shape(sinks) == heads, op, ": sinks must have shape ", heads, ", got ", sinks);
    args.sinks_dtype = require_dtype(op, "sinks", sinks.scalar_type);
    require(args.sinks_dtype == args.dtype || args.sinks_dtype == DType::kFloat32, op,
            ": sinks must have dtype float32 or query's ", args.dtype, ", got ", args.sinks_dtype);
    checked.device("sinks", sinks);
  }

  const auto window = [op](const char* name, int64_t keys) {
    require(keys >= -1, op, ": ", name, " must be at least -1, got ", keys);
    return keys < 0 ? kNoLimit : std::min(keys, kNoLimit);
  };
  args.window_left = window("window_left", options.window_left);
  args.window_right = window("window_right", options.window_right);

  require_softcap(op, options.softcap);
  args.softcap = options.softcap;

  checked.dropout("dropout_p", options.dropout_p, options.seed);
  args.dropout_p = options.dropout_p;

  args.scale = options.scale;
  args.allow_tf32 = options.allow_tf32;
  args.rounds_factors = options.round_factors;
}

void attach_score_options(const char* op, const AttentionOptions& options, Attention& args,
                          Copies& copies) {
  if (options.bias) args.bias = rows_of(*options.bias, AttentionLayout::kDense, copies);
  if (options.block_mask) {
    attach_blocks(op, *options.block_mask, *options.mask, args, copies);
  } else if (options.mask) {
    args.mask = rows_of(*options.mask, AttentionLayout::kDense, copies);
  }
  args.alibi_slopes = dense_data_of<float>(options.alibi_slopes, copies);
  args.sinks = dense_data_of(options.sinks, copies);
  args.seed = seed_of(options.seed);
}

int64_t score_gradients(const AttentionOptions& options) {
  int64_t bits = 0;
  for (const Differentiable& of : kDifferentiable) {
    if (options.*of.option) bits |= bit_of(of);
  }
  return bits;
}

std::vector<Tensor> empty_score_gradients(const AttentionOptions& options, const Tensor& query,
                                          int64_t grad_mask) {
  std::vector<Tensor> dterms;
  dterms.reserve(std::size(kDifferentiable));
  for (const Differentiable& of : kDifferentiable) {
    const OptionalTensor& option = options.*of.option;
    dterms.push_back(empty_gradient(grad_mask & bit_of(of), option ? *option : query, false));
  }
  return dterms;
}

void attach_score_gradients(int64_t grad_mask, const std::vector<Tensor>& dterms,
                            AttentionBackward& args, Copies& copies) {
  for (const Differentiable& of : kDifferentiable) {
    if (grad_mask & bit_of(of)) of.attach(args, dterms[&of - kDifferentiable], copies);
  }
}

std::string text_of_heads(const Attention& args) {
  return text_of(args.batch, " x ", args.heads, " heads",
                 when(args.kv_heads != args.heads, " on ", args.kv_heads));
}

std::string text_of_terms(const Attention& args) {
  const bool has_left = args.window_left != kNoLimit, has_right = args.window_right != kNoLimit;
  const bool is_causal = !has_left && args.window_right == 0;
  return text_of(
      ", head_dim ", args.head_dim, when(args.value_dim != args.head_dim, " and ", args.value_dim),
      ", ", args.dtype, when(args.block_table, ", pages of ", args.page_size),
      when(is_causal, ", causal"), when(has_left, ", ", args.window_left, " keys back"),
      when(has_right && !is_causal, ", ", args.window_right, " ahead"),
      when(args.bias.data, ", bias ", args.bias_dtype),
      when(args.blocks.data || args.mask.data, ", mask"),
      when(args.blocks.data, " of blocks of ", args.block_q, " x ", args.block_k),
      when(args.alibi_slopes, ", ALiBi"), when(args.sinks, ", sinks"),
      when(args.softcap != 0.0, ", softcap ", args.softcap),
      when(args.seed, ", dropout ", args.dropout_p), when(args.allow_tf32, ", TF32 allowed"),
      when(args.rounds_factors, ", rounding allowed"));
}

}  // namespace onepass
