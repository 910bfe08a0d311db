"""onepass.nn.RotaryEmbedding: its tables, its call, and its behaviour in a model."""

import copy

import pytest
import torch

import onepass
from onepass import functional
from onepass.nn import RotaryEmbedding
from tests.rotary.cases import BOTH, Case
from tests.support.dtypes import BF16, F16, F32, F64


def rows(**changes) -> list[torch.Tensor]:
    tensors = Case(head_dim=48, **changes).tensors()
    return [tensors[name] for name in BOTH]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_first", [False, True])
def test_it_is_the_function_with_its_tables(seq_first, interleaved, dtype):
    """Of 48 columns 32 are rotated."""
    module = RotaryEmbedding(32, 500.0, 9, interleaved=interleaved, seq_first=seq_first).to(dtype)
    angles = torch.outer(torch.arange(9.0), 1.0 / 500.0 ** (torch.arange(0, 32, 2) / 32))
    assert torch.equal(module.cos, angles.cos()) and torch.equal(module.sin, angles.sin())
    query, key = rows(dtype=dtype, seq_first=seq_first)
    wide = F64 if dtype is F64 else F32
    options = {"interleaved": interleaved, "rotary_dim": 32, "seq_first": seq_first}
    tables = angles.cos().to(wide), angles.sin().to(wide)
    for positions in (None, torch.tensor([8, 0, 1, 5, 5]), torch.randint(9, (2, 5))):
        own = [t[:5] for t in tables] if positions is None else tables
        expected = functional.rotary_embedding(query, key, *own, **options, positions=positions)
        found = module(query, key, positions)
        assert all(map(torch.equal, found, expected))
        alone, none = module(query, positions=positions)
        assert torch.equal(alone, expected[0]) and none is None
    written = [x.clone() for x in (query, key)]
    found = module(*written, positions, inplace=True)
    assert found[0] is written[0] and all(map(torch.equal, written, expected))


@pytest.mark.parametrize(
    "change", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double().to(BF16)]
)
def test_tables_stay_float32(change):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), RotaryEmbedding(16, 100.0, 6))
    expected = copy.deepcopy(model[1])
    change(model)
    assert model[0].weight.dtype is not F32
    for name, buffer in expected.named_buffers():
        assert torch.equal(getattr(model[1], name), buffer)
    moved = model.to("meta")[1]
    assert {b.device.type for b in moved.buffers()} == {"meta"}


@pytest.mark.parametrize("inv_freq", [None, torch.rand(8, dtype=F64)], ids=["base", "given"])
def test_a_module_of_meta_is_filled(inv_freq):
    arguments = dict(base=100.0, max_position_embeddings=6, inv_freq=inv_freq)
    module, whole = (
        RotaryEmbedding(16, **arguments, device="meta"),
        RotaryEmbedding(16, **arguments),
    )
    assert {b.device.type for b in module.buffers()} == {"meta"}
    module.to_empty(device="cpu").reset_parameters()
    for name, buffer in whole.named_buffers():
        assert torch.equal(getattr(module, name), buffer)
    if inv_freq is not None:  # scaling is the caller's
        assert torch.equal(whole.inv_freq, inv_freq.float())
        assert torch.equal(whole.sin[3], (3 * inv_freq.float()).sin())


def test_nothing_is_saved():
    module = RotaryEmbedding(16, interleaved=True)
    assert not module.state_dict() and not list(module.parameters())
    assert [name for name, _ in module.named_buffers()] == ["inv_freq", "cos", "sin"]
    assert repr(module) == (
        "RotaryEmbedding(16, base=10000.0, max_position_embeddings=2048, interleaved=True)"
    )
    report = onepass.swap(module)
    assert not report.swapped and not report.skipped and not report.unknown


def test_errors():
    for dim in (0, -2, 3):
        with pytest.raises(ValueError, match=f"dim must be even and at least 2, got {dim}$"):
            RotaryEmbedding(dim)
    with pytest.raises(ValueError, match=r"inv_freq must have shape \(4,\), got \(8,\)$"):
        RotaryEmbedding(8, inv_freq=torch.ones(8))
    module = RotaryEmbedding(8, max_position_embeddings=4)
    message = "RotaryEmbedding: query must have at most max_position_embeddings tokens, 4, got 5$"
    with pytest.raises(RuntimeError, match=message):
        module(torch.ones(1, 2, 5, 8))
    with pytest.raises(RuntimeError, match="positions must lie between 0 and 3, the last row"):
        module(torch.ones(1, 2, 2, 8), positions=torch.tensor([3, 4]))
    with pytest.raises(RuntimeError, match="^rotary_embedding: query must have 4 dimensions"):
        module(torch.ones(5, 8))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph(backend):
    torch._dynamo.reset()
    module = RotaryEmbedding(32, max_position_embeddings=16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        query, key = rows(tokens=tokens)
        assert all(map(torch.equal, compiled(query, key), module(query, key)))


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_tables_of_transformers(base):
    """Numbers and the name of the buffer."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )  # fmt: skip
    theirs = llama.LlamaRotaryEmbedding(config)
    ours = RotaryEmbedding(32, base, config.max_position_embeddings)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    query, key = torch.randn(1, 2, 7, 32), torch.randn(1, 1, 7, 32)
    cos, sin = theirs(query, torch.arange(7)[None])
    expected = functional.rotary_embedding(query, key, cos, sin)
    assert all(map(torch.equal, ours(query, key), expected))
