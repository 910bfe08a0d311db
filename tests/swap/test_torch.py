"""Swapped models inside torch: encoders, autocast, compile, export, DDP, FSDP, checkpointing."""

import copy
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.fx
from torch import nn

import onepass
from tests.swap.foreign_norms import OnePlusRMS
from tests.swap.reported import names, operators, types

pytestmark = pytest.mark.usefixtures("probed_once")


class Block(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.2):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.foreign = OnePlusRMS(width)
        self.mlp = nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x) + self.foreign(x)))


def reasons(report) -> set[str]:
    return {entry["reason"] for entry in report.skipped}


# ---------------------------------------------------------------- nn.TransformerEncoder

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def encoder(layer_cls=nn.TransformerEncoderLayer, nested: bool = True, **options):
    layer = layer_cls(16, 2, 32, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return model


class PlainLayer(nn.TransformerEncoderLayer):
    """A subclass that never takes the fast path, and so meets nested tensors without a mask."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        src = self.norm1(src + self.dropout1(src))
        return self.norm2(src + self.linear2(self.dropout(self.activation(self.linear1(src)))))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("nested", [False, True], ids=["dense", "nested"])
@pytest.mark.parametrize(
    ("layer_cls", "kinds", "options"),
    [
        (nn.TransformerEncoderLayer, None, {}),
        (nn.TransformerEncoderLayer, "attention", {}),
        (nn.TransformerEncoderLayer, None, {"norm_first": True}),
        (nn.TransformerEncoderLayer, None, {"activation": "gelu", "layer_norm_eps": 1e-3}),
        (PlainLayer, None, {}),
    ],
    ids=["post-norm", "attention alone", "pre-norm", "gelu", "subclass"],
)
@pytest.mark.filterwarnings("ignore:.*nested tensor", "ignore:enable_nested_tensor")
def test_encoder_in_eval_equals_stock_on_valid_rows(
    layer_cls, kinds, options, nested, grad, slow_products
):
    model = encoder(layer_cls, nested, **options).eval()
    stock = copy.deepcopy(model)
    report = onepass.swap(model, kinds=kinds)
    x, is_plain = torch.randn(2, 5, 16), layer_cls is PlainLayer
    if kinds is None:
        assert len(report.swapped) == (16 if is_plain else 18)
    noted = [note for note in report.notes if note.startswith("layers.*: in inference too")]
    assert is_plain or "padding comes back as zeros" in noted[0]
    with torch.set_grad_enabled(grad):
        expected, y = (m(x, src_key_padding_mask=PADDING) for m in (stock, model))
        found = operators(lambda: model(x, src_key_padding_mask=PADDING))
    assert sum("attention" in name for name in found) == (0 if is_plain else 2)
    assert is_plain or sum("norm" in name for name in found) == (4 if kinds is None else 0)
    torch.testing.assert_close(y[~PADDING], expected[~PADDING], rtol=1e-5, atol=1e-5)
    if nested and not grad and not options.get("norm_first"):
        assert (y[PADDING] == 0).all() and (expected[PADDING] == 0).all()


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_hooked_encoder_hands_nested_tensors_to_the_stock_forward():
    model = encoder().eval()
    stock = copy.deepcopy(model)
    onepass.swap(model, kinds=("norm", "dropout"))
    seen = []
    for m in (stock, model):  # a hook on a submodule turns the layer's fast path off, not nesting
        m.layers[1].norm1.register_forward_hook(lambda _, args, y: seen.append(args[0].is_nested))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected, y = (m(x, src_key_padding_mask=PADDING) for m in (stock, model))
    assert seen == [True, True]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_encoder_fast_path_is_reported():
    report = onepass.swap(nn.ModuleDict({"encoder": encoder()}), kinds="norm")
    (note,) = (note for note in report.notes if note.startswith("encoder.layers.*"))
    assert "in eval mode without gradients" in note and "nested" in note
    others = onepass.swap(encoder(PlainLayer), kinds="norm").notes
    assert not any("eval mode" in note for note in others)
    assert not onepass.swap(encoder(), include="nothing.*", kinds="norm").notes[1:]
    notes = onepass.swap(model := encoder(), exclude="layers.?").notes
    assert any(note.startswith("layers.*: in eval mode without gradients") for note in notes)
    onepass.unswap(model)
    assert not any("without gradients" in note for note in onepass.swap(model).notes)


def test_jagged_nested_tensors_run_the_stock_forward():
    norm = nn.LayerNorm(16)
    x = torch.nested.nested_tensor(
        [torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged, requires_grad=True
    )
    expected = norm(x)
    onepass.swap(norm)
    y = norm(x)
    assert y.is_nested and torch.equal(y.values(), expected.values())


# ---------------------------------------------------------------- autocast, compile, export


def test_compiled_under_autocast():
    torch._dynamo.reset()
    model = Block()
    onepass.swap(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16)
    results = []
    for m in (model, compiled):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        y.float().square().sum().backward()
        results.append((y, *(parameter.grad for parameter in model.parameters())))
    for eager, graph in zip(*results, strict=True):
        assert eager.dtype == graph.dtype
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)


def test_unswap_is_seen_by_compiled_code():
    torch._dynamo.reset()
    model = Block().eval()
    onepass.swap(model)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    x = torch.randn(3, 16)
    compiled(x)
    onepass.unswap(model)
    with onepass._dispatch_log.record() as calls:
        compiled(x)
    assert counter.frame_count == 2 and not calls


class Calls(nn.Module):
    def forward(self, x):
        q, k, v = x.unflatten(-1, (2, 8)).transpose(1, 2), x.unsqueeze(1), x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, k[..., :8], value=v[..., 8:])


class AllKinds(Block):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.calls = Calls()
        self.rms = nn.RMSNorm(16)

    def forward(self, x):
        x = self.layer(super().forward(x))
        x = self.rms(x + self.mha(x, x, value=x, need_weights=False)[0])
        return self.calls(x)


def test_symbolic_traces_call_what_was_swapped():
    """torch.fx traces, as feature extractors and quantizers make them."""
    model, x = AllKinds().eval(), torch.randn(2, 5, 16)
    traced = torch.fx.symbolic_trace(model).graph  # of stock
    expected = model(x)
    onepass.swap(model)
    with onepass._dispatch_log.record() as calls:
        swapped = model(x)
    graph_module = torch.fx.symbolic_trace(model)
    called = {node.target for node in graph_module.graph.nodes if node.op == "call_module"}
    assert called >= {"norm", "foreign", "drop", "mha", "layer", "rms"}
    assert called - {"foreign"} == {node.target for node in traced.nodes if "module" in node.op}
    with onepass._dispatch_log.record() as traced_calls:
        assert torch.equal(graph_module(x), swapped)
    assert list(traced_calls) == list(calls)
    torch.testing.assert_close(swapped, expected)
    assert torch.equal(copy.deepcopy(graph_module)(x), swapped)
    assert len(onepass.unswap(model)) == len(onepass.swap(model).swapped)


def test_compiled_models_are_refused():
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Dropout(0.1), OnePlusRMS(8)))
    before = types(model)
    report = onepass.swap(torch.compile(model, backend="eager"))
    assert reasons(report) == {"is inside a compiled module; swap before torch.compile"}
    assert len(report.skipped) == 3 and types(model) == before
    assert any("its root is inside a compiled module" in note for note in report.notes)
    model[1].compile(backend="eager")
    report = onepass.swap(model)
    assert reasons(report) == {"is compiled by module.compile(); swap before that"}
    assert [entry["name"] for entry in report.swapped] == ["0"]
    with pytest.raises(RuntimeError, match="strict.*compiled by"):
        onepass.swap(model, strict=True)


def test_torchscript_modules_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.LayerNorm(8)))
    report = onepass.swap(nn.Sequential(scripted, nn.LayerNorm(8)))
    assert [entry["name"] for entry in report.swapped] == ["1"] and not report.skipped


# ---------------------------------------------------------------- distributed


@pytest.mark.parametrize("order", ["swap first", "wrap first"])
def test_ddp(group, order, torchs_products):
    model = Block(p=0.0)
    stock = copy.deepcopy(model)
    if order == "swap first":
        onepass.swap(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    if order == "wrap first":
        report = onepass.swap(ddp)
        assert names(report.swapped) == {"module.norm", "module.foreign", "module.drop"}
    x = torch.randn(4, 16)
    ddp(x).square().sum().backward()
    stock(x).square().sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5
        )
    assert len(onepass.unswap(ddp)) == 3


def test_fully_shard_after_the_swap_works_and_forbids_unswap(group, torchs_products):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Block(p=0.0)
    stock = copy.deepcopy(model)
    report = onepass.swap(model)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 16)
    with onepass._dispatch_log.record() as calls:
        model(x).square().sum().backward()
    assert sum("backward" not in call["op"] for call in calls) == 2
    stock(x).square().sum().backward()
    for name, parameter in stock.named_parameters():
        got = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-5)
    before = types(model)
    with pytest.raises(RuntimeError, match="unswap: model must have .* 'norm', which is sharded"):
        onepass.unswap(model)
    with pytest.raises(RuntimeError, match="verify: modules must have the classes of the swap"):
        report.verify(x)
    assert types(model) == before


def test_sharded_models_are_refused(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(OnePlusRMS(8)), nn.Dropout(0.1))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    report = onepass.swap(model)
    assert [entry["name"] for entry in report.swapped] == ["0", "2"]
    assert reasons(report) == {"is sharded (FSDP); swap before sharding"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(
            nn.Sequential(nn.LayerNorm(8)), device_id=torch.device("cpu")
        )
    report = onepass.swap(wrapped)
    assert not report.swapped and reasons(report) == {"is sharded (FSDP); swap before sharding"}


def test_distributed_tensors_run_our_forward(group, monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(onepass._policy.small_calls, "LEAST_NORM", {})
    norm = nn.LayerNorm(16)
    onepass.swap(norm)
    x = torch.randn(4, 16)
    expected = norm(x)
    for name, parameter in list(norm.named_parameters()):
        setattr(norm, name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    with onepass._dispatch_log.record() as calls:
        y = norm(distribute_tensor(x, mesh, [Replicate()]))
    assert torch.equal(y.full_tensor(), expected)
    assert [(c["op"], "torch" in c["level"]) for c in calls] == [("layer_norm", False)]
    norm = nn.LayerNorm(4)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight, mesh, [Replicate()]))
    (entry,) = onepass.swap(nn.Sequential(nn.LayerNorm(4), norm)).skipped
    assert entry["reason"] == "its weight is a DTensor"
