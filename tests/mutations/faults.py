"""The faults: one expression each, and the tests that should notice it."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of a file that occurs there once, what stands in its place, and the tests."""

    file: str
    before: str
    after: str
    tests: str

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith("csrc/")


def _of(prefix: str, tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    return [Fault(f"{prefix}{file}", before, after, tests) for file, before, after in faults]


FAULTS = [
    *_of(
        "csrc/cpu/norm/",
        "tests/norm tests/all_families",
        ("forward.cpp", "squares / n - correction * correction", "squares / n"),
        ("forward.cpp", "first_element + tile", "tile"),
        ("forward.cpp", "std::min(end, (group + 1) * args.tokens)", "end"),
        ("backward.cpp", "scaled_->branch && scale[r].row != A(0)", "scaled_->branch != nullptr"),
        ("backward.cpp", "kRms ? v : v - mean", "v"),
    ),
    *_of(
        "csrc/cpu/group_norm/",
        "tests/group_norm tests/all_families",
        ("forward.cpp", "again || !(off * off > 0.25 * (squares / n - off * off))", "true"),
        ("backward.cpp", "dz ? args.channels : args.doutput_stride.pixel", "args.channels"),
    ),
    *_of(
        "csrc/cpu/",
        "tests/rotary",
        ("rotary.cpp", "products * rows.rstd[0] / static_cast<A>(args.head_dim)", "products"),
        (
            "rotary.cpp",
            "heads.output ? static_cast<T*>(heads.output) + at(heads.output_stride)\n"
            "                              : static_cast<void*>(scratch.unwanted)",
            "static_cast<void*>(scratch.unwanted)",
        ),
    ),
    *_of(
        "csrc/cpu/",
        "tests/loss",
        ("loss.cpp", "std::exp(sums.maximum - largest)", "1.0"),
        ("loss.cpp", "logits_below<double>(sums, largest)", "sums.logits"),
        ("loss.cpp", "weight ? of_tile[2] : static_cast<double>(count)", "double(count)"),
        ("loss.cpp", "1 - tangent * tangent", "1.0"),
        ("loss.cpp", "weight ? of_class * load<A>(weight + j, lanes) : of_class", "of_class"),
        ("loss.cpp", "target != args.ignore_index", "target >= 0"),
    ),
    *_of(
        "csrc/cpu/",
        "tests/dropout tests/norm",
        ("dropout.cpp", "row * args.cols + tile", "tile"),
        (
            "random.h",
            "value < static_cast<int32_t>(dropout.threshold)",
            "value <= static_cast<int32_t>(dropout.threshold)",
        ),
    ),
    *_of(
        "csrc/cpu/linear/",
        "tests/linear tests/loss",
        ("product.cpp", "k > 0 || args_.accumulate ? out : nullptr", "k > 0 ? out : nullptr"),
        (
            "product.cpp",
            "args_.bias ? scratch_.bias + j : nullptr",
            "args_.bias ? scratch_.bias : nullptr",
        ),
        (
            "few_rows.h",
            "add ? load<A>(to, count) + sum[r][v] : sum[r][v] + first",
            "sum[r][v] + first",
        ),
        ("few_rows.h", "is_odd ? nullptr : row + right_step", "row + right_step"),
        ("codes.h", "total[v] * static_cast<uint32_t>(-M::kLeftOffset)", "total[v] * 0u"),
        ("codes.h", "first_element + i * depth + k", "first_element + k"),
        ("codes.h", "if (largest >= kInfinity) {", "if (false) {"),
        ("quantized.cpp", ".start = cell == 0 ? starts_ + at : nullptr", ".start = starts_ + at"),
        ("quantized.cpp", "smaller(other, scale) * larger(other, scale)", "(other * scale)"),
        ("quantized.cpp", "add(of_column);", "(void)of_column;"),
    ),
    *_of(
        "csrc/cpu/linear/",
        "tests/quantized_linear",
        ("few_rows_of_codes.h", "(k / weight.group + 1) * weight.group, depth", "depth"),
        ("few_rows_of_codes.h", "*sums = sum_of_lanes<float>(sum);", "*sums = 0;"),
        ("weight_codes.h", "2 * (i % 4) + i / 4", "i"),
        ("weight_codes.h", "if (first + k >= end) load_group", "if (end == 0) load_group"),
        ("weight_codes.h", "words << (32 - kBits - kBits * i)", "words"),
        ("codes_by_codes.cpp", "halves[i + j / 2 + j % 2 * 2]", "halves[i + j]"),
        ("codes_by_codes.cpp", "if (std::isnan(strip.left_scales[i]))", "if (false)"),
        ("weight_codes.h", "(columns - 1) / n * n", "0"),
    ),
    *_of(
        "csrc/cpu/",
        "tests/gate tests/linear",
        (
            "activation.h",
            "kActivation == Activation::kRelu2 ? upstream * (x_ + x_) : upstream",
            "upstream",
        ),
        ("activation.h", "(x[i] < 0 ? e : 1.0) / (1.0 + e)", "1.0 / (1.0 + e)"),
    ),
    *_of(
        "csrc/cpu/",
        "tests/causal_conv tests/all_families",
        ("causal_conv.cpp", "args_.initial_state ? state_[s + width - 1] : zeros_", "zeros_"),
        ("causal_conv.cpp", "of_inputs ? piece.end + before : piece.end", "piece.end"),
        ("causal_conv.cpp", "sums && t < piece.end", "sums != nullptr"),
        (
            "causal_conv_update.cpp",
            "state[(i + args_.tokens) * step]",
            "state[i * step]",
        ),
    ),
    *_of(
        "csrc/cpu/selective_scan/",
        "tests/selective_scan",
        ("backward.cpp", "g[i] * scratch.h[i][t]", "g[i] * scratch.h[i][t + 1]"),
        (
            "backward.cpp",
            "fma<A>(dproduct, u, load<A>(scratch.dstep[t] + c))",
            "dproduct * u",
        ),
        (
            "update.cpp",
            "channels.head / (args.heads / args.groups)",
            "channels.head % args.groups",
        ),
    ),
    *_of(
        "csrc/cpu/mamba_chunk_scan/",
        "tests/mamba_chunk_scan",
        (
            "forward.cpp",
            "args.initial_states || begin > sequence.begin",
            "begin > sequence.begin",
        ),
        ("forward.cpp", "steps.to_after[t] * steps.step[t]", "steps.step[t]"),
    ),
    *_of(
        "csrc/cpu/delta_rule/",
        "tests/delta_rule",
        (
            "forward.cpp",
            "args.initial_state || begin > sequence.begin",
            "begin > sequence.begin",
        ),
        ("chunk.h", "kUpper ? system[s][t] : system[t][s]", "system[t][s]"),
        ("chunk.h", "return g < least ? least : g", "return g"),
        ("backward_pairs.h", "chunk.left[0] * through", "through"),
        ("backward_pairs.h", "        passed += passing[t - s];\n", ""),
        ("update.cpp", "head / (args.heads / args.key_heads)", "head % args.key_heads"),
    ),
    *_of(
        "python/onepass/",
        "tests/swap/test_scan.py tests/swap/test_scan_models.py",
        ("swapping/copies.py", "(ours if function is proven else function)", "ours"),
        (
            "integrations/transformers/scans.py",
            "torch.promote_types(dtype, term.dtype)",
            "dtype",
        ),
        (
            "integrations/transformers/scans.py",
            "last_state[-1:] if cu_seqlens is not None else last_state",
            "last_state",
        ),
        (
            "integrations/transformers/scans.py",
            "(final_state if cu_seqlens is None else final_state[-1:])",
            "final_state",
        ),
        (
            "integrations/transformers/scans.py",
            "torch.promote_types(value.dtype, query.dtype)",
            "value.dtype",
        ),
        (
            "integrations/transformers/scans.py",
            'named["cu_seqlens"] = named["cu_seq_lens_q"]',
            "pass",
        ),
        ("integrations/transformers/scans.py", 'del packed["cu_seqlens"]', "pass"),
    ),
    *_of(
        "csrc/cpu/optimizer/",
        "tests/optim tests/optimizer",
        (
            "update.h",
            "fma<A>(square_root<A>(top), inverse_root_, eps_)",
            "fma<A>(square_root<A>(top) + eps_, inverse_root_, Vec<A>{})",
        ),
        (
            "update.h",
            "first ? g : fma<A>(momentum, on.template load_moment<0>(i, lanes), gain * g)",
            "fma<A>(momentum, on.template load_moment<0>(i, lanes), gain * g)",
        ),
        ("update.h", "u < Vec<A>{} ? -step : u", "u < Vec<A>{} ? -step : Vec<A>{}"),
        ("update.h", "top > v || top != top ? top : v", "top > v ? top : v"),
        (
            "step.cpp",
            "t.moment_type == MomentType::kBFloat16Stochastic && which == kSecondMoment",
            "false",
        ),
        ("gradients.cpp", "std::isfinite(sum) ? sum : wide_sum(g, count, order)", "sum"),
        ("tiles.h", "kHalf == NoiseHalf::kLow ? word & 0xffffu : word >> 16", "word & 0xffffu"),
    ),
    *_of(
        "csrc/cpu/attention/",
        "tests/attention_decode",
        ("decode.cpp", "scale * to.sum[i * apart]", "to.sum[i * apart]"),
        ("decode.cpp", "args_.rotary_by_row ? query : 0", "int64_t{0}"),
        (
            "decode.cpp",
            "chunk == 0 ? keys_.old : std::max(keys_.old, begin)",
            "std::max(keys_.old, begin)",
        ),
        ("decode.cpp", "args_.cache_batch_idx ? args_.cache_batch_idx[batch_] : batch_", "batch_"),
        (
            "decode.cpp",
            "multiply_each(scores, s_.scales + kMostChunk, count)",
            "multiply_each(scores, s_.scales, count)",
        ),
        ("decode.cpp", "rows_in<float>(args_.value_scale);", "rows_in<float>(args_.key_scale);"),
        ("rows.h", "std::clamp(code, -kMostCode, kMostCode)", "code"),
    ),
    *_of(
        "csrc/cpu/attention/",
        "tests/attention",
        ("backward.cpp", "near.without(doubtful.without(seen))", "near"),
        ("backward.cpp", "args_.dbias.head_stride != 0 ? group : 1", "int64_t{1}"),
        ("backward_scores.h", "terms.of_product(ds, derivative, seen)", "ds"),
        ("backward_scores.h", "dbias_ && args_.dbias.row_stride == 0", "false"),
        ("backward_scores.h", "(score - (difference + of.lse)) - of.lse_rest", "Vec<float>{}"),
        ("scores.h", "sum * scale + std::exp(sink - larger)", "sum * scale"),
        ("scores.h", "args.alibi_batch_stride != 0", "false"),
        ("forward.cpp", "sum == 0.0f ? 0.0f : lost_in_sum(maximum, logarithm)", "0.0f"),
        (
            "forward.cpp",
            "key < begin || tile.zeros.has(key) ? nullptr : values(k0 + key)",
            "values(k0 + key)",
        ),
    ),
    *_of(
        "python/onepass/",
        "tests/distributed",
        ("_ops/entry.py", "if type(first) not in _PLAIN and is_dtensor(first):", "if False:"),
        ("_random.py", "return seed if adjust is None else adjust(seed)", "return seed"),
        ("_ops/differentiation.py", "return float.fromhex(float(number).hex())", "return number"),
        (
            "_dtensor/plans.py",
            "                spec.placements,\n                value.shape,",
            "                value.shape,",
        ),
        ("_dtensor/plans.py", "if gradient.placements != ctx.placements:", "if False:"),
        (
            "_dtensor/rules.py",
            'counts = target != call["ignore_index"]',
            "counts = target == target",
        ),
    ),
    *_of(
        "python/onepass/",
        "tests/all_families tests/norm tests/linear",
        ("_random.py", "torch.default_generator.set_state(_drawn.before)", "pass"),
        (
            "_ops/differentiation.py",
            "        if are_transforms_active():\n            return True",
            "        pass",
        ),
        (
            "_ops/differentiation.py",
            "return torch.is_grad_enabled() or forward_ad._current_level >= 0",
            "return torch.is_grad_enabled()",
        ),
        ("_ops/autograd.py", 'lines = ["ctx.set_materialize_grads(False)"]', "lines = []"),
        ("_ops/autograd.py", "if self.partial and x not in of_partial:", "if False:"),
        ("_ops/operator.py", 'saving=call("True"),', 'saving=call("False"),'),
        (
            "_ops/decomposition.py",
            "if any(given.get(name) is not None for name in unless):",
            "if False:",
        ),
        ("_mapping.py", " or not given.isdisjoint(unless):", ":"),
        ("_mapping.py", "lambda tensor: None if _is_absent(tensor) else 0", "lambda tensor: 0"),
        (
            "_ops/fake_checks.py",
            "return not isinstance(value, _SYMBOLIC) or value.node.has_hint()",
            "return not isinstance(value, _SYMBOLIC)",
        ),
        ("numerics.py", "ok = error <= bound and bias <= bias_bound", "ok = error <= bound"),
    ),
    *_of(
        "python/onepass/",
        "tests/swap tests/faults/test_swap_interrupts.py",
        ("swapping/engine.py", "        LEFT_OUT.pop(item.module, None)", "        pass"),
        ("swapping/engine.py", 'if lazy_logits and asked and "loss" not in asked:', "if False:"),
        (
            "swapping/engine.py",
            "return work(journal, *args, **options)\n        except BaseException:",
            "return work(journal, *args, **options)\n        except Exception:",
        ),
        (
            "swapping/verify.py",
            "if exact is not None and not _finite_alike(exact.tensors, stock.tensors):",
            "if False:",
        ),
        ("swapping/verify.py", "left &= changed", "pass"),
        ("swapping/sample.py", "module.training, precision_of(module)", "module.training, None"),
        (
            "swapping/by_hand_proof.py",
            "if verdict.max_error > bounds * verdict.bound or verdict.bias > verdict.bias_bound:",
            "if False:",
        ),
    ),
    *_of(
        "python/onepass/optim/",
        "tests/optim tests/distributed",
        ("step.py", "masters.reseed_changed(table)", "pass"),
        ("step.py", "            table.step_tables.clear()", "            pass"),
        (
            "step.py",
            "if table.layouts != layouts_of(params) or not table.states_stayed():",
            "if table.layouts != layouts_of(params):",
        ),
        ("optimizer.py", 'options["stochastic_moments"] = self._rounds_moments()', "pass"),
        (
            "ema.py",
            "local(param).detach().clone() for param in averages",
            "local(param).detach() for param in averages",
        ),
    ),
]
