"""Swapped models of torchtune: outputs, gradients, LoRA, caches, its loss."""

import pytest
import torch

import onepass
from onepass import numerics
from onepass._dispatch_log import record

pytest.importorskip(
    "torchtune", reason="torchtune is not installed, or its torchao", exc_type=ImportError
)
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

SIZES = dict(
    vocab_size=32, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64
)  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 32
KINDS = {"norm", "attention"}


def plain():
    return llama3(**SIZES)


def adapted():
    model = lora_llama3(
        ["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=2, lora_alpha=4, **SIZES
    )
    set_trainable_params(model, get_adapter_params(model))
    return model


def made(make, dtype=torch.float32, is_swapped=False):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)
    model = model.to(dtype)
    if is_swapped:
        assert {entry["kind"] for entry in onepass.swap(model).swapped} >= KINDS
    return model


def results(model):
    """The logits, the loss and all gradients."""
    with record() as calls:
        logits = model(TOKENS)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [logits.detach(), *torch.autograd.grad(loss, wanted)], calls


@pytest.mark.parametrize("make", [plain, adapted])
def test_gradients(make, torchs_products):
    ref, _ = results(made(make, torch.float64))
    base, _ = results(made(make))
    model = made(make, is_swapped=True)
    found, calls = results(model)
    onepass.unswap(model)
    assert torch.equal(results(model)[0][0], base[0])
    ours = {call["op"] for call in calls if "torch" not in call["level"]}
    # The gate between layers with adapters is torch's.
    assert len(ours) == (3 if make is plain else 2), ours
    numerics.assert_close(found[0], ref[0], base[0])
    numerics.assert_close(found[1:], ref[1:], base[1:])


def test_its_chunked_loss():
    def loss(model):
        loss = CEWithChunkedOutputLoss(4)
        model.set_num_output_chunks(4)
        found = loss(model(TOKENS), TOKENS.roll(-1, 1))
        return torch.autograd.grad(found, [p for p in model.parameters() if p.requires_grad])

    ref, base = loss(made(plain, torch.float64)), loss(made(plain))
    numerics.assert_close(loss(made(plain, is_swapped=True)), ref, base)


def test_caches():
    """A prompt and three more tokens, against torchtune's own caches."""

    def decoded(model):
        model.setup_caches(batch_size=2, dtype=next(model.parameters()).dtype)
        mask = torch.ones(64, 64, dtype=torch.bool).tril()
        logits = []
        with torch.no_grad():
            for positions in (range(9), (9,), (10,), (11,)):
                at = torch.tensor(positions)
                rows = mask[at][None].expand(2, -1, -1)
                logits.append(model(TOKENS[:, at], mask=rows, input_pos=at[None].expand(2, -1)))
        return torch.cat(logits, 1)

    ref, base = decoded(made(plain, torch.float64)), decoded(made(plain))
    numerics.assert_close(decoded(made(plain, is_swapped=True)), ref, base)
