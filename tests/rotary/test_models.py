"""Against the compositions that models of transformers have, forward and backward.

Their result in their own dtype is the base of the numerics rule, in float64 the reference.
"""

import copy
import functools
import importlib

import pytest
import torch

from onepass import functional, numerics, reference
from tests.support.dtypes import BF16, F16, F32

pytest.importorskip("transformers", reason="compares with the models of transformers")

BATCH, HEADS, KEY_HEADS, TOKENS, HEAD_DIM = 2, 8, 2, 33, 64


def of_model(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def angles(rotary_dim: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=F32) / rotary_dim)
    positions = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) + 7])
    return positions[..., None] * frequency  # (batch, tokens, pairs)


def tables(rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """cos and sin with a number for each column, as the models' own modules return them."""
    angle = angles(rotary_dim)
    wide = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return [wide.cos().to(dtype), wide.sin().to(dtype)]


def moved_apart(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def llama(name, **options):
    def theirs(q, k, cos, sin):
        return of_model(name).apply_rotary_pos_emb(q, k, cos, sin)

    return theirs, functools.partial(functional.rotary_embedding, **options)


def deepseek_v3():
    """It reads neighbours as pairs and writes halves: the same numbers in another order."""

    def theirs(q, k, cos, sin):
        return of_model("deepseek_v3").apply_rotary_pos_emb_interleave(q, k, cos, sin)

    def ours(q, k, cos, sin):
        pairs = cos.shape[-1] // 2
        tables = cos[..., :pairs], sin[..., :pairs]
        turned = functional.rotary_embedding(q, k, *tables, interleaved=True, rotary_dim=2 * pairs)
        return [moved_apart(x) for x in turned]

    return theirs, ours


def deepseek_v2():
    """Complex numbers, in float32 at most; their tables have one number for each pair."""

    def theirs(q, k, cos, sin):
        return of_model("deepseek_v2").apply_rotary_emb(q, k, torch.complex(cos, sin)[..., ::2])

    def ours(q, k, cos, sin):
        return functional.rotary_embedding(
            q, k, cos[..., ::2], sin[..., ::2], interleaved=True, rotary_dim=cos.shape[-1]
        )

    return theirs, ours


# (theirs, ours), rotary_dim, whether their tables repeat neighbours
MODELS = {
    "llama": (llama("llama"), HEAD_DIM, False),
    "gemma3": (llama("gemma3"), HEAD_DIM, False),
    "gpt_neox": (llama("gpt_neox"), HEAD_DIM // 4, False),
    "cohere": (llama("cohere", interleaved=True), HEAD_DIM, True),
    "deepseek_v3": (deepseek_v3(), HEAD_DIM, False),
    "deepseek_v2": (deepseek_v2(), HEAD_DIM, True),
}


def compare(text: str, dtype, tokens_first: bool, tables: list, functions: tuple, norms=()) -> None:
    """Outputs, and gradients of rows and of the weights of norms, by functions of (query, key, cos,
    sin, *norms): ours, what is exact in float64, and the model's."""
    rows = []
    for heads in (HEADS, KEY_HEADS):
        x = torch.randn(BATCH, heads, TOKENS, HEAD_DIM).to(dtype)
        rows.append(x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x)
    upstream = [torch.randn(x.shape).to(dtype) for x in rows]

    def results(function, wide=False):
        given = [x.double() if wide else x for x in (*rows, *tables)]
        modules = [copy.deepcopy(norm).to(torch.float64 if wide else dtype) for norm in norms]
        leaves = [x.detach().requires_grad_() for x in given[:2]]
        outputs = function(*leaves, *given[2:], *modules)
        leaves += [module.weight for module in modules]
        pairs = [g.to(x.dtype) for g, x in zip(upstream, outputs, strict=True)]
        return [*outputs, *torch.autograd.grad(outputs, leaves, pairs)]

    ours, exact, theirs = functions
    found = zip(results(ours), results(exact, wide=True), results(theirs), strict=True)
    for number, each in enumerate(found):
        assert each[0].dtype is dtype
        numerics.assert_close(*each, f"{text} {dtype} result {number}")


@pytest.mark.isa
@pytest.mark.grid(2)
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_as_the_model_does(name, dtype, tokens_first):
    (theirs, ours), rotary_dim, repeats = MODELS[name]
    cos_and_sin = tables(rotary_dim, repeats, F32 if name == "deepseek_v2" else dtype)
    exact = theirs
    if name in ("cohere", "deepseek_v2", "gemma3"):  # some compute in float32 for any input
        exact = _formula(repeats)
    compare(name, dtype, tokens_first, cos_and_sin, (ours, exact, theirs))


def _formula(interleaved: bool):
    def formula(q, k, cos, sin):
        return reference.rotary.rotary_embedding(q, k, cos, sin, interleaved=interleaved)

    return formula


@pytest.mark.isa
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    "name, cls, offset", [("qwen3", "Qwen3RMSNorm", 0.0), ("gemma3", "Gemma3RMSNorm", 1.0)]
)
def test_norms_as_the_model_has_them(name, cls, offset, dtype, tokens_first):
    """Weights that are not 1, or not 0. The models' norms compute in float32 for any input: the
    formula is exact."""
    norms = [getattr(of_model(name), cls)(HEAD_DIM, eps=1e-6) for _ in range(2)]
    with torch.no_grad():
        for module in norms:
            module.to(dtype).weight.add_(torch.randn(HEAD_DIM) / 4)

    def theirs(q, k, cos, sin, *modules):
        q, k = (norm(x) for norm, x in zip(modules, (q, k), strict=True))
        return of_model(name).apply_rotary_pos_emb(q, k, cos, sin)

    def fused(function):
        def of(q, k, cos, sin, query_norm, key_norm):
            weights = {"query_weight": query_norm.weight, "key_weight": key_norm.weight}
            return function(q, k, cos, sin, **weights, eps=1e-6, weight_offset=offset)

        return of

    ours, exact = map(fused, (functional.rotary_embedding, reference.rotary.rotary_embedding))
    cos_and_sin = tables(HEAD_DIM, False, dtype)
    compare(name, dtype, tokens_first, cos_and_sin, (ours, exact, theirs), norms)
