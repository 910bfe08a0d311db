"""Ring attention in models of transformers, and under torch's context_parallel."""

import copy
import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn

import onepass
from onepass import numerics
from onepass.distributed import gather_sequence, shard_sequence
from onepass.distributed.sequence import LAYOUTS
from tests.distributed.dtensors import mesh_of
from tests.distributed.ranks import distributed, on_ranks, run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from onepass.integrations.transformers import register_ring  # noqa: E402

pytestmark = [*distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

BATCH, LENGTH, WORDS = 2, 16, 50
SMALL = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=9),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
        experts_implementation="eager",
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


def build(name, implementation="eager"):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation=implementation
    )
    return model.float()


def data():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(model, tokens, targets, **named):
    """(logits, loss, gradients by name)"""
    output = model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False, **named)
    output.loss.backward()
    return output.logits.detach(), output.loss.detach(), [p.grad for p in model.parameters()]


def in_one_process(name, dtype):
    """The loss as the mean of two means, which rounds as often as on two processes."""
    model = build(name).to(dtype)
    tokens, targets = data()
    logits, loss, gradients = trained(model, tokens, targets)
    halves = [
        nn.functional.cross_entropy(logits[:, half].flatten(0, 1), targets[:, half].flatten())
        for half in (slice(None, None, 2), slice(1, None, 2))
    ]
    return logits, torch.stack([sum(halves) / 2, loss]), gradients


def on_a_ring(model, layout):
    """The same, gathered and averaged, of a model whose attention is the ring's."""
    split = functools.partial(shard_sequence, layout=layout)
    tokens, targets = (split(tensor, 1) for tensor in data())
    positions = split(torch.arange(LENGTH), 0)[None].expand(BATCH, -1)
    logits, loss, gradients = trained(model, tokens, targets, position_ids=positions)
    for tensor in (loss, *gradients):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return gather_sequence(logits, 1, layout=layout), loss, gradients


def body(name, layout, swapped):
    model = build(name)
    if swapped:
        assert onepass.swap(model).swapped
    model.set_attn_implementation(register_ring(layout=layout, name=f"onepass_ring_{layout}"))
    found = on_a_ring(model, layout)
    reference, base = in_one_process(name, torch.float64), in_one_process(name, torch.float32)
    found = (found[0], found[1].expand(2), found[2])
    for what, *results in zip(("logits", "loss", "gradients"), found, reference, base, strict=True):
        numerics.assert_close(*results, case=f"{name}, {layout}: {what}")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.grid
def test_a_model_on_two_processes_is_that_of_one(name, swapped):
    run(2, body, name, "zigzag", swapped)


def test_contiguous_parts():
    run(2, body, "mistral", "contiguous", False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_processes(layout):
    run(4, body, "gemma2", layout, True)


@on_ranks(2)
def test_bidirectional_attention():
    small = {name: size for name, size in SMALL.items() if "key_value" not in name}
    config = transformers.BertConfig(
        **small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    tokens = data()[0]
    reference, base = (
        copy.deepcopy(model).to(t)(tokens)[0] for t in (torch.float64, torch.float32)
    )
    model.set_attn_implementation(register_ring())
    positions = shard_sequence(torch.arange(LENGTH), 0)[None].expand(BATCH, -1)
    found = model(shard_sequence(tokens, 1), position_ids=positions)[0]
    numerics.assert_close(gather_sequence(found, 1), reference.detach(), base.detach())


@on_ranks(2)
def test_what_is_refused():
    register_ring()
    tokens = shard_sequence(data()[0], 1)
    positions = shard_sequence(torch.arange(LENGTH), 0)[None].expand(BATCH, -1)
    llama = build("llama", "sdpa")
    llama.set_attn_implementation("onepass_ring")

    def refused(match, model=llama, **named):
        named = {"input_ids": tokens, "position_ids": positions, "use_cache": False} | named
        with pytest.raises(ValueError, match=match):
            model(**named)
        dist.barrier()

    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    refused("attention_mask must mask nothing, got one with padding", attention_mask=padding)
    llama(tokens, torch.ones_like(tokens), position_ids=positions, use_cache=False)
    four = torch.zeros(BATCH, 1, LENGTH // 2, LENGTH // 2)
    refused("attention_mask must be None, got one of shape", attention_mask=four)
    refused("position_ids must be those of this process's part", position_ids=None)
    packed = positions.clone()
    packed[:, -3:] = torch.arange(3)
    refused("a mask must be causal, with a window or full, got another", position_ids=packed)
    cache = transformers.DynamicCache(config=llama.config)
    llama(tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    refused("use_cache must be False", past_key_values=cache, use_cache=True)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout must be 'zigzag' or 'contiguous', got 'striped'"):
        register_ring(layout="striped")


@on_ranks(2)
def test_inside_torchs_context_parallel():
    """torch shards as "zigzag" does; its own F.scaled_dot_product_attention is unused."""
    from torch.distributed.tensor.experimental import context_parallel

    model = build("llama")
    reference, base = (in_one_process("llama", of) for of in (torch.float64, torch.float32))
    model.set_attn_implementation(register_ring())
    tokens, targets = data()
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    buffers = [tokens, targets, positions]
    own = [shard_sequence(tensor, 1) for tensor in buffers]
    with context_parallel(mesh_of((2,)), buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        assert all(torch.equal(a, b) for a, b in zip(buffers, own, strict=True))
        logits, loss, _ = trained(model, tokens, targets, position_ids=positions)
    assert tokens.shape == (BATCH, LENGTH)  # given back
    dist.all_reduce(loss)
    numerics.assert_close(gather_sequence(logits, 1), reference[0], base[0])
    numerics.assert_close((loss / 2).expand(2), reference[1], base[1])
