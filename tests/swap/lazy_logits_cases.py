"""Small models of transformers, as they are and with a swapped loss, and comparisons."""

import copy

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from tests.swap.reported import losses as count  # noqa: F401

transformers = pytest.importorskip("transformers", reason="its models are swapped")

from onepass.integrations.transformers.lazy_logits import LazyLogits  # noqa: E402

VOCABULARY, WIDTH = 600, 16
SIZES = dict(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
GEMMA = dict(num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0)
MODELS = {
    "Llama": SIZES,
    "GPT2": dict(n_embd=WIDTH, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "Phi": SIZES,  # a bias
    "Gemma2": {**SIZES, **GEMMA},
    "Granite": {**SIZES, "logits_scaling": 3.0},
    "Cohere": {**SIZES, "logit_scale": 0.25},
    "ModernBert": {**SIZES, **dict.fromkeys(("bos_token_id", "eos_token_id"), 1)},
}
MADE_AT_ONCE = {  # whose logits are not lazy
    "Bert": SIZES,
    "T5": dict(d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0),
}
HEADS = {  # the others': ForCausalLM
    "GPT2": "LMHeadModel",
    "ModernBert": "ForMaskedLM",
    "Bert": "ForMaskedLM",
    "T5": "ForConditionalGeneration",
}


def make(name: str = "Llama") -> nn.Module:
    config = getattr(transformers, f"{name}Config")
    sizes = {**MODELS, **MADE_AT_ONCE}[name]
    config = config(vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, name + HEADS.get(name, "ForCausalLM"))(config)
    if name in MADE_AT_ONCE:
        return model.eval()  # they have dropout
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)  # a softcap and a factor show
    return model


def labelled(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[:, :2] = -100
    return dict(input_ids=ids, labels=labels)


def pair(name: str = "Llama", lazy_logits: bool = True) -> tuple[nn.Module, nn.Module, dict]:
    """(swapped, stock, a batch)"""
    stock = make(name)
    model = copy.deepcopy(stock)
    onepass.swap(model, kinds="loss", lazy_logits=lazy_logits, strict=True)
    return model, stock, labelled()


def waits(logits: torch.Tensor) -> bool:
    return isinstance(logits, LazyLogits) and logits._source.value is None


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))


def assert_same(model: nn.Module, stock: nn.Module, batch: dict, of=lambda out: out.loss) -> None:
    """The same loss, over several batches, and the same gradients."""
    exact = copy.deepcopy(stock).double()
    batches = [batch]
    # Few numbers are near a loss: of eight draws, torch's may be the nearest each time.
    for _ in range(15):
        ids = torch.randint(1, VOCABULARY, batch["input_ids"].shape)
        batches.append({**batch, "input_ids": ids})
    runs = [[of(m(**given)) for given in batches] for m in (model, exact, stock)]
    numerics.assert_close(*(torch.stack(run).detach() for run in runs))
    found = zip((model, exact, stock), runs, strict=True)
    for got, ref, base in zip(*(gradients(m, run[0]) for m, run in found), strict=True):
        assert (got is None) == (base is None)
        if base is not None:
            assert got.dtype == base.dtype
            numerics.assert_close(got, ref, base)


def assert_same_gradients(found: list[torch.Tensor | None], stock: nn.Module, step) -> None:
    """The gradients that step(stock) leaves in the parameters."""
    for m in (stock, exact := copy.deepcopy(stock).double()):
        step(m)
    for got, ref, base in zip(found, exact.parameters(), stock.parameters(), strict=True):
        assert (got is None) == (base.grad is None)
        if got is not None:
            numerics.assert_close(got, ref.grad, base.grad)


def assert_same_steps(model: nn.Module, stock: nn.Module, step) -> None:
    step(model)
    assert_same_gradients([parameter.grad for parameter in model.parameters()], stock, step)
