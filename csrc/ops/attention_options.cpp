#include "ops/attention_options.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "ops/attention_memory.h"
#include "ops/check.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

void check_broadcast(const char* op, const char* name, const CheckedAgainst& checked,
                     const Attention& args, const TensorInfo& info) {
  const int64_t full[] = {args.batch, args.heads, args.seq_q, args.seq_k};
  bool fits = info.dims == 4 && info.sizes[3] == full[3];
  for (int64_t d = 0; fits && d < 3; ++d) fits = info.sizes[d] == full[d] || info.sizes[d] == 1;
  require(fits, op, ": ", name, " must have shape ", Shape{full, 4},
          " or 1 in place of all sizes but the last, got ", shape_of(info));
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
          ": mask must have shape (tiles, rows, cols) with block_mask, got ", shape_of(tiles));
  args.block_q = tiles.sizes[1];
  args.block_k = tiles.sizes[2];
  const int64_t full[] = {args.batch, args.heads, blocks_of(args.seq_q, args.block_q),
                          blocks_of(args.seq_k, args.block_k)};
  bool fits = blocks.dims == 4 && std::equal(full + 2, full + 4, blocks.sizes + 2);
  for (int64_t d = 0; fits && d < 2; ++d) fits = blocks.sizes[d] == full[d] || blocks.sizes[d] == 1;
  require(fits, op, ": block_mask must have shape ", Shape{full, 4},
          " or 1 in place of the first two sizes, got ", shape_of(blocks));
  require(is_int32(blocks.scalar_type), op, ": block_mask must have dtype int32, got ",
          TypeName{blocks.scalar_type});
  checked.device("block_mask", blocks);
}

void attach_blocks(const char* op, const Tensor& block_mask, const Tensor& tiles, Attention& args,
                   Copies& copies) {
  const TensorInfo shape = info_of(block_mask);
  const int32_t* blocks = elements_of<int32_t>(block_mask, copies);
  const int64_t count = flat_info_of(block_mask).numel;
  const int64_t last = kFirstTile + info_of(tiles).sizes[0] - 1;
  for (int64_t i = 0; i < count; ++i) {
    require(blocks[i] >= 0 && blocks[i] <= last, op, ": block_mask must hold numbers from 0 to ",
            last, ", got ", blocks[i]);
  }
  const int64_t of_head = shape.sizes[2] * shape.sizes[3];
  args.blocks = {const_cast<int32_t*>(blocks), shape.sizes[0] == 1 ? 0 : shape.sizes[1] * of_head,
                 shape.sizes[1] == 1 ? 0 : of_head, shape.sizes[3]};
  args.mask = {const_cast<void*>(elements_of<void>(tiles, copies)), 0, args.block_q * args.block_k,
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
    require(is_bool(mask.scalar_type), op, ": mask must have dtype bool, got ",
            TypeName{mask.scalar_type});
  } else {
    require(!options.block_mask, op, ": mask must be given with block_mask, got none");
  }
  if (options.alibi_slopes) {
    const TensorInfo slopes = input_of(op, "alibi_slopes", *options.alibi_slopes);
    require((slopes.dims == 1 && slopes.sizes[0] == args.heads) ||
                (slopes.dims == 2 && std::equal(of_heads, of_heads + 2, slopes.sizes)),
            op, ": alibi_slopes must have shape ", Shape{of_heads + 1, 1}, " or ",
            Shape{of_heads, 2}, ", got ", shape_of(slopes));
    require(dtype_of(slopes.scalar_type) == DType::kFloat32, op,
            ": alibi_slopes must have dtype float32, got ", TypeName{slopes.scalar_type});
    checked.device("alibi_slopes", slopes);
    args.alibi_batch_stride = slopes.dims == 2 ? args.heads : 0;
  }
  if (options.sinks) {
    const TensorInfo sinks = input_of(op, "sinks", *options.sinks);
    require(sinks.dims == 1 && sinks.sizes[0] == args.heads, op, ": sinks must have shape ",
            Shape{of_heads + 1, 1}, ", got ", shape_of(sinks));
    args.sinks_dtype = require_dtype(op, "sinks", sinks.scalar_type);
    require(args.sinks_dtype == args.dtype || args.sinks_dtype == DType::kFloat32, op,
            ": sinks must have dtype float32 or query's ", name_of(args.dtype), ", got ",
            name_of(args.sinks_dtype));
    checked.device("sinks", sinks);
  }

  require(options.window_left >= -1, op, ": window_left must be at least -1, got ",
          options.window_left);
  require(options.window_right >= -1, op, ": window_right must be at least -1, got ",
          options.window_right);
  const auto limit = [](int64_t window) {
    return window < 0 ? kNoLimit : std::min(window, kNoLimit);
  };
  args.window_left = limit(options.window_left);
  args.window_right = limit(options.window_right);

  const float softcap = static_cast<float>(options.softcap);  // as kernels take it
  require(options.softcap == 0.0 || (softcap > 0.0f && std::isfinite(softcap)), op,
          ": softcap must be 0 or a positive number that float32 holds, got ", options.softcap);
  args.softcap = options.softcap;

  checked.dropout(options.dropout_p, options.seed);
  args.dropout_p = options.dropout_p;

  args.scale = options.scale;
  args.allow_tf32 = options.allow_tf32;
}

void attach_score_options(const char* op, const AttentionOptions& options, Attention& args,
                          Copies& copies) {
  if (options.bias) args.bias = rows_of(*options.bias, AttentionLayout::kDense, copies);
  if (options.block_mask) {
    attach_blocks(op, *options.block_mask, *options.mask, args, copies);
  } else if (options.mask) {
    args.mask = rows_of(*options.mask, AttentionLayout::kDense, copies);
  }
  args.alibi_slopes = elements_of<float>(options.alibi_slopes, copies);
  args.sinks = elements_of<void>(options.sinks, copies);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
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

void describe_heads(std::ostream& text, const Attention& args) {
  text << args.batch << " x " << args.heads << " heads";
  if (args.kv_heads != args.heads) text << " on " << args.kv_heads;
}

void describe_terms(std::ostream& text, const Attention& args) {
  text << ", head_dim " << args.head_dim;
  if (args.value_dim != args.head_dim) text << " and " << args.value_dim;
  text << ", " << name_of(args.dtype);
  if (args.block_table) text << ", pages of " << args.page_size;
  if (args.window_left == kNoLimit && args.window_right == 0) {
    text << ", causal";
  } else {
    if (args.window_left != kNoLimit) text << ", " << args.window_left << " keys back";
    if (args.window_right != kNoLimit) text << ", " << args.window_right << " ahead";
  }
  if (args.bias.data) text << ", bias " << name_of(args.bias_dtype);
  if (args.blocks.data) {
    text << ", mask of blocks of " << args.block_q << " x " << args.block_k;
  } else if (args.mask.data) {
    text << ", mask";
  }
  if (args.alibi_slopes) text << ", ALiBi";
  if (args.sinks) text << ", sinks";
  if (args.softcap != 0.0) text << ", softcap " << args.softcap;
  if (args.seed) text << ", dropout " << args.dropout_p;
  if (args.allow_tf32) text << ", TF32 allowed";
}

}  // namespace onepass
