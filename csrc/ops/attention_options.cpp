#include "ops/attention_options.h"

#include "ops/check.h"

namespace onepass {

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
  if (args.mask.data) text << ", mask";
  if (args.alibi_slopes) text << ", ALiBi";
  if (args.sinks) text << ", sinks";
  if (args.softcap != 0.0) text << ", softcap " << args.softcap;
  if (args.seed) text << ", dropout " << args.dropout_p;
  if (args.allow_tf32) text << ", TF32 allowed";
}

}  // namespace onepass
