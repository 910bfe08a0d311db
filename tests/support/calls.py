"""One small call of every public function, module, optimizer and raw operator, by name.

`tensors()` are its tensor arguments, the same at every call; `run(**tensors)` takes any of them and
returns a flat list of tensors; `stock`, where torch has the function, returns what torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import functional

F32 = torch.float32
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 5, 7, 8
PAGES, PAGE = 6, 4
RAW = torch.ops.onepass
LAYOUT_COLUMNS = 18  # of csrc/ops/optimizer_table.h
STEP_COLUMN, MOMENT_COLUMN = 2, 4


@dataclass(frozen=True)
class Call:
    name: str
    tensors: Callable[[], dict[str, Tensor]]
    run: Callable[..., list[Tensor]]
    stock: Callable[..., list[Tensor]] | None = None
    written: tuple[str, ...] = ()  # in place
    optional: tuple[str, ...] = ()  # may be None
    differentiable: bool = False
    composed: bool = False  # of torch's operators beside ours: their errors and rounding count
    lists: tuple[str, ...] = ()  # arguments that are lists of tensors, given by their first


def flat(results) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, tuple | list):
        return [tensor for result in results for tensor in flat(result)]
    return []


def _calls() -> list[Call]:
    return [*_norms(), *_dropouts(), *_attention(), *_decoding(), *_modules(), *_optimizers()]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def sixteenths(*shape: int) -> Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(sum(shape))) / 16


def ints(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- norms and dropout ---------------------------------------------------------------------------


def _norms():
    def plain():
        return {"input": randn(6, 40), "weight": randn(40), "bias": randn(40, seed=1)}

    def no_bias():
        return {"input": randn(6, 40), "weight": randn(40)}

    def added(bias=True):
        own = plain() if bias else no_bias()
        return own | {"residual": randn(6, 40, seed=2)}

    def public(name, tensors, stock=None):
        def run(input, weight, bias=None, residual=None):
            more = () if residual is None else (residual,)
            keywords = {} if bias is None else {"bias": bias}
            extra = {} if residual is None else {"dropout_p": 0.3}
            norm = getattr(functional, name)
            return flat(norm(input, *more, (40,), weight, eps=1e-5, **keywords, **extra))

        optional = ("weight", "bias")
        return Call(
            f"functional.{name}", tensors, run, stock, optional=optional, differentiable=True
        )

    yield public(
        "layer_norm", plain, lambda input, weight, bias: [F.layer_norm(input, (40,), weight, bias)]
    )
    yield public(
        "rms_norm", no_bias, lambda input, weight: [F.rms_norm(input, (40,), weight, 1e-5)]
    )
    yield public("add_layer_norm", added)
    yield public("add_rms_norm", lambda: added(False))

    def forward(op):
        def run(input, residual, weight, bias, seed):
            rest = ((40,), 0, 1e-5, 0.0, 0.3, torch.bfloat16, torch.bfloat16, True)
            return flat(op(input, residual, weight, bias, seed, *rest))

        return run

    def with_seed():
        return added() | {"seed": torch.tensor([3, 4])}

    optional = ("weight", "bias")
    for op in (RAW.norm_forward, RAW.norm_forward_check):
        yield Call(f"ops.{op.__name__}", with_seed, forward(op), optional=optional)

    def backward_tensors():
        x = randn(6, 40, seed=3)
        own = {"doutput": randn(6, 40), "dresidual_out": randn(6, 40, seed=1), "x": x}
        own |= {"weight": randn(40), "bias": randn(40, seed=1), "seed": torch.tensor([3, 4])}
        return own | {"mean": x.mean(1), "rstd": x.var(1, False).add(1e-5).rsqrt()}

    def backward(op):
        def run(doutput, dresidual_out, x, weight, bias, seed, mean, rstd):
            rest = ((40,), 0, 0.0, 0.3, F32, F32, 15)
            tensors = (doutput, dresidual_out, x, weight, bias, seed, mean, rstd)
            return flat(op(*tensors, *rest))

        return run

    optional = ("doutput", "dresidual_out", "weight", "bias")
    for op in (RAW.norm_backward, RAW.norm_backward_check):
        yield Call(f"ops.{op.__name__}", backward_tensors, backward(op), optional=optional)


def _dropouts():
    def one():
        return {"input": randn(6, 40)}

    def two():
        return {"input": randn(6, 40), "residual": randn(6, 40, seed=1)}

    def dropout(input):
        return [functional.dropout(input, 0.4)]

    def inplace(input):
        return [functional.dropout(input, 0.4, inplace=True)]

    def add_dropout(input, residual):
        return [functional.add_dropout(input, residual, 0.4)]

    def stock(inplace):
        return lambda input: [F.dropout(input, 0.4, inplace=inplace)]

    yield Call("functional.dropout", one, dropout, stock(False), differentiable=True)
    yield Call("functional.dropout inplace", one, inplace, stock(True), written=("input",))
    yield Call(
        "functional.add_dropout", two, add_dropout, optional=("residual",), differentiable=True
    )

    def raw(op):
        def run(input, residual, seed):
            return flat(op(input, residual, seed, 0.4, None))

        return run

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    for op in (RAW.dropout_forward, RAW.dropout_forward_check):
        yield Call(f"ops.{op.__name__}", seeded, raw(op), optional=("residual",))


# ---- attention -----------------------------------------------------------------------------------


def _dense():
    return {
        "query": randn(BATCH, HEADS, ROWS, DIM),
        "key": randn(BATCH, KV_HEADS, KEYS, DIM),
        "value": randn(BATCH, KV_HEADS, KEYS, DIM, seed=1),
    }


def _packed():
    return {
        "query": randn(ROWS, HEADS, DIM),
        "key": randn(KEYS, KV_HEADS, DIM),
        "value": randn(KEYS, KV_HEADS, DIM, seed=1),
        "cu_seq_q": ints(0, 2, ROWS),
        "cu_seq_k": ints(0, 3, KEYS),
    }


def _paged():
    own = _packed()
    del own["cu_seq_k"]
    own["key"] = randn(PAGES, PAGE, KV_HEADS, DIM)
    own["value"] = randn(PAGES, PAGE, KV_HEADS, DIM, seed=1)
    tables = {"block_table": ints([1, 4], [0, 2]), "seqused_k": ints(3, 6)}
    return own | tables


def _terms(dims=4):
    """What is added to scores, and the mask."""
    return {
        "bias": randn(1, HEADS, ROWS, KEYS, seed=4),
        "mask": randn(BATCH, 1, ROWS, KEYS, seed=5) > -1,
        "alibi_slopes": randn(HEADS, seed=6).abs(),
        "sinks": randn(HEADS, seed=7),
    }


def _attention():
    terms = ("alibi_slopes", "sinks")

    def dense(query, key, value, attn_mask, alibi_slopes, sinks):
        return flat(
            functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                0.2,
                enable_gqa=True,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                return_lse=True,
            )  # fmt: skip
        )

    def plain(query, key, value, attn_mask):
        sdpa = functional.scaled_dot_product_attention
        return [sdpa(query, key, value, attn_mask, enable_gqa=True)]

    def stock(query, key, value, attn_mask):
        return [F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)]

    def with_terms():
        found = _terms()
        return _dense() | {"attn_mask": found["bias"]} | {name: found[name] for name in terms}

    def masked():
        return _dense() | {"attn_mask": _terms()["mask"]}

    sdpa = "functional.scaled_dot_product_attention"
    optional = ("attn_mask", *terms)
    yield Call(f"{sdpa} with options", with_terms, dense, optional=optional, differentiable=True)
    yield Call(sdpa, masked, plain, stock, optional=("attn_mask",), differentiable=True)

    def varlen(query, key, value, cu_seq_q, cu_seq_k=None, **options):
        lengths = (cu_seq_q, cu_seq_k, 3, 6)
        more = {"enable_gqa": True, "return_lse": True, **options}
        return flat(functional.varlen_attention(query, key, value, *lengths, **more))

    def packed_terms():
        return _packed() | {name: _terms()[name] for name in terms}

    yield Call(
        "functional.varlen_attention", packed_terms, varlen, optional=terms, differentiable=True
    )
    yield Call("functional.varlen_attention paged", _paged, varlen, optional=("block_table",))

    def raw(op, **options):
        def run(query, key, value, **tensors):
            return flat(op(query, key, value, **tensors, scale=0.3, **options))

        return run

    everything = (*_terms(), "cu_seq_k", "seqused_k", "block_table")

    def raw_dense():
        lengths = {"seqused_k": ints(6, 7), "seed": torch.tensor([3, 4])}
        return _dense() | _terms() | lengths

    for name in ("attention_forward", "attention_forward_check"):
        op, long = getattr(RAW, name), {"max_q": 3, "max_k": 6}
        yield Call(f"ops.{name}", raw_dense, raw(op, dropout_p=0.2), optional=everything)
        yield Call(f"ops.{name} packed", _packed, raw(op, **long), optional=everything)
        yield Call(f"ops.{name} paged", _paged, raw(op, **long), optional=everything)

    def backward_tensors():
        own = raw_dense()
        results = RAW.attention_forward(**own, scale=0.3, dropout_p=0.2)
        own |= dict(zip(("output", "lse", "lse_rest"), results, strict=True))
        upstream = {"doutput": randn(*own["query"].shape), "dlse": randn(*own["lse"].shape)}
        return upstream | own

    def backward(op, **more):
        def run(doutput, dlse, query, key, value, output, lse, lse_rest, **tensors):
            saved = (doutput, dlse, query, key, value, output, lse, lse_rest)
            grad_mask = 7 + 8 * (tensors.get("bias") is not None)
            return flat(op(*saved, **tensors, **more, grad_mask=grad_mask, scale=0.3))

        return run

    def packed_backward_tensors():
        own = _packed()
        results = RAW.attention_forward(**own, scale=0.3, max_q=3, max_k=6)
        own |= dict(zip(("output", "lse", "lse_rest"), results, strict=True))
        return {"doutput": randn(*own["query"].shape), "dlse": randn(*own["lse"].shape)} | own

    optional = ("doutput", "dlse", "lse_rest", *everything)
    for name in ("attention_backward", "attention_backward_check"):
        op, packed = getattr(RAW, name), packed_backward_tensors
        yield Call(f"ops.{name}", backward_tensors, backward(op, dropout_p=0.2), optional=optional)
        yield Call(f"ops.{name} packed", packed, backward(op, **long), optional=optional)

    def merge_tensors():
        parts, rows = (2, BATCH, HEADS, ROWS), {}
        return rows | {"outputs": randn(*parts, DIM), "lses": randn(*parts)}

    def merge(outputs, lses):
        return flat(functional.merge_attention_states(outputs, lses))

    yield Call(
        "functional.merge_attention_states",
        merge_tensors,
        merge,
        differentiable=True,
        composed=True,
    )


# ---- decoding ------------------------------------------------------------------------------------


def _decoding():
    def cached(new=True):
        own = {
            "query": randn(BATCH, HEADS, 1, DIM),
            "k_cache": randn(BATCH, KV_HEADS, KEYS, DIM),
            "v_cache": randn(BATCH, KV_HEADS, KEYS, DIM, seed=1),
        }
        if new:
            own["key"] = randn(BATCH, KV_HEADS, 1, DIM, seed=2)
            own["value"] = randn(BATCH, KV_HEADS, 1, DIM, seed=3)
        return own | {"cache_seqlens": ints(3, 5), **extras()}

    def extras():
        return {
            "cache_leftpad": ints(0, 1),
            "cache_batch_idx": ints(1, 0),
            "alibi_slopes": randn(HEADS, seed=6).abs(),
            "sinks": randn(HEADS, seed=7),
        }

    def rotary():
        return {"rotary_cos": randn(KEYS + 1, DIM // 2), "rotary_sin": randn(KEYS + 1, DIM // 2)}

    def paged(new=True):
        own = cached(new)
        del own["cache_batch_idx"], own["cache_leftpad"]
        own["k_cache"] = randn(PAGES, PAGE, KV_HEADS, DIM)
        own["v_cache"] = randn(PAGES, PAGE, KV_HEADS, DIM, seed=1)
        return own | {"block_table": ints([1, 4], [0, 2])}

    optional = ("cache_seqlens", "block_table", *extras(), *rotary())
    caches = ("k_cache", "v_cache")

    def public(query, k_cache, v_cache, key=None, value=None, **tensors):
        decode = functional.attention_with_kv_cache
        return flat(decode(query, k_cache, v_cache, key, value, return_lse=True, **tensors))

    def with_rotary():
        return cached() | rotary()

    name = "functional.attention_with_kv_cache"
    yield Call(name, with_rotary, public, written=caches, optional=(*optional, "key", "value"))
    yield Call(f"{name} paged", paged, public, written=caches, optional=(*optional, "key", "value"))
    yield Call(f"{name} reading", lambda: cached(False), public, optional=optional)

    def raw(op):
        def run(query, k_cache, v_cache, *new, **tensors):
            new = [tensors.pop(name) for name in ("key", "value") if name in tensors]
            return flat(op(query, k_cache, v_cache, *new, **tensors, scale=0.3))

        return run

    for name, op in ((n, getattr(RAW, n)) for n in ("attention_decode", "attention_decode_check")):
        yield Call(f"ops.{name}", lambda: cached(False), raw(op), optional=optional)
        yield Call(f"ops.{name} paged", lambda: paged(False), raw(op), optional=optional)
    for name in ("attention_decode_append", "attention_decode_append_check"):
        of = {"optional": optional, "written": () if name.endswith("check") else caches}
        yield Call(f"ops.{name}", with_rotary, raw(getattr(RAW, name)), **of)
        yield Call(f"ops.{name} paged", paged, raw(getattr(RAW, name)), **of)


# ---- modules -------------------------------------------------------------------------------------


def _modules():
    """The parameters, too, are arguments: of torch.func.functional_call."""

    def call(name, make, inputs, stock=True, composed=False):
        def module_of(namespace):
            torch.manual_seed(0)
            return make(namespace)

        def tensors():
            own = {k.replace(".", "/"): v.detach() for k, v in parameters(module_of(onepass.nn))}
            return inputs() | own

        def parameters(module):
            return list(module.named_parameters())

        def run_in(namespace):
            def run(**tensors):
                module, names = module_of(namespace), set(inputs())
                own = {k.replace("/", "."): v for k, v in tensors.items() if k not in names}
                given = [v for k, v in tensors.items() if k in names]
                torch.manual_seed(1)
                return flat(torch.func.functional_call(module, own, tuple(given)))

            return run

        runs = run_in(onepass.nn), run_in(torch.nn) if stock else None
        optional = () if stock else ("second", "weight", "bias")
        return Call(
            f"nn.{name}", tensors, *runs, optional=optional, differentiable=True, composed=composed
        )

    def one():
        return {"input": randn(BATCH, ROWS, 16)}

    def two():
        return one() | {"second": randn(BATCH, ROWS, 16, seed=1)}

    def three():
        return two() | {"third": randn(BATCH, ROWS, 16, seed=2)}

    yield call("LayerNorm", lambda nn: nn.LayerNorm(16), one)
    yield call("RMSNorm", lambda nn: nn.RMSNorm(16), one)
    yield call("AddLayerNorm", lambda nn: nn.AddLayerNorm(16, dropout_p=0.2), two, False)
    yield call("AddRMSNorm", lambda nn: nn.AddRMSNorm(16, dropout_p=0.2), two, False)
    yield call("Dropout", lambda nn: nn.Dropout(0.3), one)

    sizes, first = (16, 2, 32, 0.0), {"batch_first": True}
    products = {"composed": True}
    yield call(
        "MultiheadAttention", lambda nn: nn.MultiheadAttention(16, 2, **first), three, **products
    )
    yield call(
        "TransformerEncoderLayer",
        lambda nn: nn.TransformerEncoderLayer(*sizes, **first),
        one,
        **products,
    )
    yield call(
        "TransformerDecoderLayer",
        lambda nn: nn.TransformerDecoderLayer(*sizes, **first),
        two,
        **products,
    )


# ---- optimizers ----------------------------------------------------------------------------------


def _optimizers():
    def gradients():  # their squares are summed without rounding, in any order
        return {"gradients": sixteenths(6, 40), "other": sixteenths(33)}

    def norm(gradients, other):
        return [RAW.gradient_norm([gradients, other])]

    def clip(gradients, other):
        return [RAW.clip_grad_norm([gradients, other], 0.5, 2.0, False)]

    listed = {"lists": ("gradients",)}
    yield Call("ops.gradient_norm", gradients, norm, **listed)
    written = ("gradients", "other")
    yield Call("ops.clip_grad_norm", gradients, clip, written=written, **listed)

    def table_tensors():
        layout = torch.full((1, LAYOUT_COLUMNS), -1)
        layout[0, :2] = 0
        columns = (STEP_COLUMN, 1, 0), (MOMENT_COLUMN, 0, 0), (MOMENT_COLUMN + 2, 0, 240)
        for column, number, offset in columns:
            layout[0, column], layout[0, column + 1] = number, offset
        own = {"params": randn(6, 40), "states": torch.zeros(480), "steps": torch.zeros(1)}
        return own | {"layout": layout}

    def table(params, states, steps, layout):
        number = RAW.optimizer_table([params], [states, steps], layout)
        RAW.optimizer_table_release(steps, number)
        return []

    def step_tensors():
        hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.1, 0, 0, 1, 0, 0, 0]], dtype=torch.float64)
        numbers = {"norm": torch.tensor(0.5, dtype=torch.float64)}
        numbers |= {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
        own = table_tensors()
        del own["layout"]
        return own | {"gradients": randn(6, 40, seed=1), "hyper": hyper, **numbers}

    def step(params, states, steps, gradients, hyper, norm=None, **numbers):
        number = RAW.optimizer_table([params], [states, steps], table_tensors()["layout"])
        try:
            more = {"max_norm": None if norm is None else 0.1, "norm": norm, **numbers}
            if not RAW.optimizer_step(0, number, [gradients], hyper, zero_gradients=True, **more):
                raise RuntimeError("optimizer_step: table must not be stale, got one that is")
        finally:
            RAW.optimizer_table_release(steps, number)
        return []

    def release(state):
        tensors = table_tensors()
        table = [tensors["params"]], [tensors["states"], tensors["steps"]], tensors["layout"]
        RAW.optimizer_table_release(state, RAW.optimizer_table(*table))
        return []

    named = {"lists": ("params", "states")}
    yield Call("ops.optimizer_table", table_tensors, table, **named)
    # Of a state the device counts alone, so that an empty one will do.
    yield Call("ops.optimizer_table_release", lambda: {"state": torch.zeros(0)}, release)
    written = ("params", "states", "steps", "gradients")
    optional = ("norm", "grad_scale", "found_inf", "device_hyper")
    yield Call("ops.optimizer_step", step_tensors, step, written=written, optional=optional)

    def of_class(name, **settings):
        def tensors():
            return {"param": randn(6, 40), "grad": randn(6, 40, seed=1)}

        def run_by(namespace, name, settings):
            def run(param, grad):
                param = param.detach().requires_grad_()
                optimizer = getattr(namespace, name)([param], lr=0.1, **settings)
                param.grad = grad
                # One where gradients are zeroed: a skipped step does that too, and a second one
                # may be refused.
                for _ in range(1 if settings.get("zero_grads") else 2):
                    optimizer.step()
                return []

            return run

        # Lion, which torch lacks, takes what SGD takes.
        stock = run_by(torch.optim, name if hasattr(torch.optim, name) else "SGD", {})
        run, text = run_by(onepass.optim, name, settings), " ".join(settings)
        return Call(f"optim.{name} {text}".strip(), tensors, run, stock, written=("param", "grad"))

    for name in ("AdamW", "Adam", "SGD", "Lion"):
        yield of_class(name)
        yield of_class(name, max_grad_norm=0.1, zero_grads=True)

    def clipped(by):
        def run(grad):
            param = torch.zeros_like(grad, requires_grad=True)
            param.grad = grad
            return [by([param], 0.5)]

        return run

    def pair():
        return {"param": randn(6, 40), "grad": randn(6, 40, seed=1)}

    run, stock = clipped(onepass.optim.clip_grad_norm_), clipped(torch.nn.utils.clip_grad_norm_)
    of = {"written": ("grad",), "composed": True}  # torch's own where there are gaps
    yield Call("optim.clip_grad_norm_", lambda: {"grad": randn(6, 40)}, run, stock, **of)

    def fused(param, grad):
        param = param.detach().requires_grad_()
        param.grad = grad
        onepass.optim.fuse(torch.optim.AdamW([param], lr=0.1)).step()
        return []

    def unfused(param, grad):
        param = param.detach().requires_grad_()
        param.grad = grad
        torch.optim.AdamW([param], lr=0.1).step()
        return []

    yield Call("optim.fuse", pair, fused, unfused, written=("param", "grad"))


CALLS = {call.name: call for call in _calls()}
