"""swap, kind "attention": softmax(q k^T) v that is written by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import numerics
from onepass._policy import small_calls
from onepass.swapping import by_hand_proof
from onepass.swapping.by_hand import fate
from tests.swap import attention_by_hand as cases
from tests.swap.attention_by_hand import TOKENS, WIDTH, NanoGPT, assert_same, swapped, tokens
from tests.swap.reported import operators

BY_HAND = [*cases.TAKEN, *cases.LEFT]
READ = "computes attention by hand, and runs as it was written: its scores are read by max"


F32, BF16 = torch.float32, torch.bfloat16
# (class, dtype, autocast's)
IN_16_BITS = [(cls, BF16, {}) for cls in cases.TAKEN if cls is not cases.Alibi]
AUTOCAST = (cases.NanoGPT, cases.T5, cases.Gemma2, cases.Padded)
IN_16_BITS += [(cls, F32, dict(dtype=BF16)) for cls in AUTOCAST]


@pytest.mark.parametrize(
    ("cls", "dtype", "autocast"), [*((cls, F32, {}) for cls in cases.TAKEN), *IN_16_BITS]
)
def test_taken(cls, dtype, autocast):
    """One call of attention computes what was written, in training and inference, the first call
    too; those of the proof are not the model's."""
    stock, ours = (module.to(dtype) for module in swapped(cls))
    x, batches = tokens(dtype=dtype), (4, 2, 4, 4, *[4] * 8 * (dtype is F32))
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        assert operators(lambda: ours(x), "attention") == ["attention"]
    assert_same(stock, ours, [tokens(batch, dtype) for batch in batches], **autocast)
    if (cls, dtype, autocast) not in IN_16_BITS:
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(x), stock.eval()(x))
    assert (fate(ours).taken >= 1 + len(batches)) and not fate(ours).reason


@pytest.mark.parametrize("cls", cases.LEFT)
def test_left_alone(cls, monkeypatch):
    """Other code computes as it was written, and says why: for good, but for what one call has."""
    monkeypatch.setattr(small_calls, "LEAST_KEYS", 1)  # as for users
    stock, ours = swapped(cls)
    assert_same(stock, ours, [tokens() for _ in range(4)])
    assert fate(ours).taken == 0 and fate(ours).reason
    assert fate(ours).is_left is (cls not in cases.OF_ONE_CALL), fate(ours).reason


DROPPING = (cases.NanoGPT, cases.T5, cases.SoftmaxModule)


@pytest.mark.parametrize("cls", DROPPING)
def test_dropout(cls):
    """Drops weights in training, by the seed; the mean over draws is the output without."""
    ours = cls(p=0.25)
    onepass.swap(ours, kinds=None if cls is cases.NanoGPT else ("attention",))
    x = tokens(1)
    torch.manual_seed(3)
    first = ours(x)
    torch.manual_seed(3)
    assert torch.equal(ours(x), first)
    assert not torch.equal(ours(x), first)
    draws = ours(x.repeat(400, 1, 1)).mean(0)
    assert fate(ours).taken == 4 and not fate(ours).reason
    expected = ours.eval()(x)[0]
    assert (draws - expected).abs().max() < 0.15 * expected.abs().max()
    ours.train()(x).sum().backward()


def test_probabilities_that_are_kept():
    """What a module keeps of its weights is computed when it is read."""
    stock, ours = swapped(cases.Annotated)
    x = tokens()
    stock(x), ours(x)
    torch.testing.assert_close(ours.attn.mean(0), stock.attn.mean(0))
    assert ours.attn.shape == stock.attn.shape and ours.attn.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(ours.attn.square().sum(), ours.qkv.weight)[0],
        torch.autograd.grad(stock.attn.square().sum(), stock.qkv.weight)[0],
    )
    with torch.no_grad():
        assert not ours.attn.log().requires_grad
    assert ours.attn.log().requires_grad
    assert "tensor" in repr(ours.attn) and ours.attn.tolist()
    torch.testing.assert_close(copy.deepcopy(ours.attn.detach()), stock.attn.detach())
    for use in (ours.attn.retain_grad, lambda: ours.attn.register_hook(print)):
        with pytest.raises(RuntimeError, match="probabilities of attention by hand must"):
            use()
    ours(x)
    assert (fate(ours).taken, fate(ours).reason) == (2, "")


def test_hooks_on_probabilities():
    """What was not given to one call of attention gets its gradient."""
    stock, ours = swapped(cases.NanoGPT)
    seen = []
    for module in (stock, ours):
        module.drop.register_forward_hook(lambda m, args, y: y.register_hook(seen.append) and None)
    assert_same(stock, ours, [tokens() for _ in range(4)])
    assert len(seen) == 3 * 4 and fate(ours).reason == "its scores are read by register_hook"


def test_a_function_around_all_outputs():
    """As DDP has it: outputs that are not used get no gradient in it, those that are get theirs."""

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *outputs):
            ctx.set_materialize_grads(False)
            return tuple(output.clone() for output in outputs)

        @staticmethod
        def backward(ctx, *gradients):
            return gradients

    stock, ours = swapped(cases.Annotated)
    x = tokens()
    for loss_of in (lambda y, attn: y.sum(), lambda y, attn: y.sum() + attn.square().sum()):
        for module in (stock, ours):
            module.zero_grad()
            loss_of(*Sink.apply(module(x), module.attn)).backward()
        for one, other in zip(stock.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize("way", cases.UNFOLLOWED)
def test_code_that_autograd_does_not_follow(way):
    """It reads numbers, and the gradient that it gives goes on to query, key and terms."""
    stock, ours = swapped(cases.Unfollowed)
    stock.way = ours.way = way
    assert_same(stock, ours, [tokens() for _ in range(3)])
    assert fate(ours).reason.startswith("its scores are read by ")


def test_a_gradient_from_code_that_reads_nothing_raises():
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            return torch.ones(scores.shape)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    _, ours = swapped(cases.SoftmaxModule)
    ours.softmax.forward = Constant.apply
    with pytest.raises(RuntimeError, match="must be read by the code that gives them a gradient"):
        ours(tokens()).sum().backward()


def test_gradients_of_a_mask_alone():
    """Scores require a gradient if only what is added to them does."""
    seen = []

    class Watched(cases.Swin):
        def attend(self, q, k, v):
            scores = q.detach() @ k.detach().mT
            seen.append(scores.requires_grad)
            seen.append((scores + self.relative).requires_grad)
            return (scores + self.relative).softmax(-1) @ v

    stock, ours = swapped(Watched)
    x = tokens()
    for module in (stock, ours):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours.relative.grad, stock.relative.grad)
    assert seen == 2 * [False, True] and fate(ours).taken == 1


OLD = (cases.NanoGPT, cases.T5, cases.Read, cases.by_hand(cases.without_keys))


@pytest.mark.parametrize(
    ("cls", "use_reentrant"), [*((cls, False) for cls in BY_HAND), *((cls, True) for cls in OLD)]
)
def test_checkpoint(cls, use_reentrant):
    """The first call of a module may be in a checkpoint, whose recomputation must save the same."""
    stock, ours = swapped(cls)
    x = tokens().requires_grad_()
    for module in (ours, stock):
        module.zero_grad()
        checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(ours.qkv.weight.grad, stock.qkv.weight.grad)
    assert bool(fate(ours).taken) == (cls in cases.TAKEN)


class Masked(cases.Base):
    """Its mask is an attribute."""

    blocked = None
    is_read = False

    def attend(self, q, k, v):
        if self.blocked is None:
            raise ValueError("no mask")
        scores = (q @ k.mT * 0.3).masked_fill(self.blocked, -1e9)
        if self.is_read:
            scores = scores - scores.amax(-1, keepdim=True)
        return scores.softmax(-1) @ v


def test_a_query_without_keys_in_one_batch():
    """That call runs as it was written, and others are taken; errors decide nothing."""
    stock, ours = swapped(Masked)
    for _ in range(4):
        with pytest.raises(ValueError, match="no mask"):
            ours(tokens())
    none, all = (torch.full((cases.TOKENS,), blocked) for blocked in (False, True))
    for blocked, taken in ((all, 0), (all, 0), (all, 0), (none, 1), (all, 1), (none, 2)):
        stock.blocked = ours.blocked = blocked
        x = tokens()
        torch.testing.assert_close(ours(x), stock(x))
        assert fate(ours).taken == taken
        assert bool(fate(ours).reason) == (not taken)


@pytest.mark.parametrize("how", ["no keys", "read"])
def test_checkpoint_before_calls_that_are_not_taken(how):
    """What is recomputed saves what was saved."""
    _, ours = swapped(Masked)
    x = tokens().requires_grad_()
    mask = ours.blocked = torch.zeros(cases.TOKENS, dtype=torch.bool)
    y = checkpoint(ours, x, use_reentrant=False)
    ours.blocked, ours.is_read = (~mask, False) if how == "no keys" else (mask, True)
    for _ in range(3):
        ours(x)
    ours.blocked, ours.is_read = mask, False
    y.sum().backward()
    assert fate(ours).taken == 2  # torch stops the recomputation before its end


def test_fewer_keys_than_columns(monkeypatch):
    """Such calls do not gain, and run as they were written."""
    monkeypatch.setattr(small_calls, "LEAST_KEYS", 1)
    stock, ours = swapped(cases.Shortest)
    for count, taken in ((4, 0), (7, 0), (12, 1), (7, 1), (8, 2)):
        x = tokens()[:, :count]
        assert torch.equal(ours(x), stock(x)) == (count < 8)
        assert type(ours.attend(*ours.split(x))) is torch.Tensor
        assert fate(ours).taken == taken
        assert bool(fate(ours).reason) == (not taken)


def test_float64_runs_as_written():
    """It says so, until the module is cast."""
    stock, ours = swapped(cases.Shortest)
    x = tokens()
    assert torch.equal(ours.double()(x.double()), stock.double()(x.double()))
    assert (fate(ours).taken, fate(ours).reason) == (0, "its query and key are float64")
    ours.float()(x)
    assert (fate(ours).taken, fate(ours).reason) == (1, "")


def small_numbers(module, std: float = 0.02):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)


def one_offset(module):
    """The gradient of the query is less exact then, in torch's own call as well."""
    with torch.no_grad():
        module.qkv.bias += 1.0


NUMBERS = {  # the width of heads, the input's shape, draws, and the parameters
    "keys that share an offset": (64, (4, 256, 64), 3, one_offset),
    "small": (cases.HEAD_DIM, (4, cases.TOKENS, WIDTH), 8, small_numbers),  # two draws fail for 4
    "small, of many keys": (cases.HEAD_DIM, (1, 4096, WIDTH), 1, small_numbers),
    "of many keys": (
        cases.HEAD_DIM,
        (1, 4096, WIDTH),
        1,
        lambda module: small_numbers(module, 0.3),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_no_proof_fails_by_its_numbers(name, monkeypatch):
    head_dim, shape, draws, change = NUMBERS[name]
    for seed in range(draws):
        torch.manual_seed(seed)
        monkeypatch.setattr(by_hand_proof, "_PROVEN", {})
        _, ours = swapped(cases.Shortest, width=shape[-1], inner=cases.HEADS * head_dim)
        change(ours)
        with torch.set_grad_enabled(shape[1] < 4096):
            ours(torch.randn(shape))
        assert fate(ours).taken == 1 and not fate(ours).reason, (seed, fate(ours).reason)


@pytest.mark.parametrize("factor", [1.001, 1.1])
def test_a_call_that_computes_another_thing_is_refused(factor, monkeypatch):
    one_call = by_hand_proof._as_one_call
    monkeypatch.setattr(by_hand_proof, "_PROVEN", {})
    monkeypatch.setattr(by_hand_proof, "_as_one_call", lambda *given: one_call(*given) * factor)
    stock, ours = swapped(cases.Shortest)
    assert_same(stock, ours, [tokens()])
    assert fate(ours).taken == 0
    assert "differs from that of one call of attention" in fate(ours).reason


def test_branch_that_runs():
    """A class with both branches is taken by the one that runs, and can change it."""
    stock, ours = swapped(cases.TwoBranches)
    x = tokens()
    torch.testing.assert_close(ours(x), stock(x))
    assert fate(ours).taken == 0
    stock.flash = ours.flash = False
    torch.testing.assert_close(ours(x), stock(x))
    assert fate(ours).taken == 1


def test_report():
    """It says what is known before the first call, and after it."""
    model = nn.ModuleDict({"a": cases.NanoGPT(), "b": cases.Read(), "c": cases.TwoBranches()})
    note = "a, b, c: softmax(q k^T) v by hand becomes one call of attention, once"
    for dry_run in (True, False):
        report = onepass.swap(model, kinds="attention", dry_run=dry_run)
        assert [entry["name"] for entry in report.swapped] == ["a", "b", "c"]
        assert note in str(report)
    x = tokens()
    for module in model.values():
        module(x)
    assert "c: softmax(q k^T) v by hand becomes one call" in str(report)
    assert [entry["name"] for entry in report.swapped] == ["a", "c"]
    assert [(e["name"], e["reason"]) for e in report.skipped] == [("b", READ)]
    assert report.to_dict()["skipped"][0]["type"].endswith("Read")
    later = onepass.swap(model, kinds="attention")
    assert [entry["name"] for entry in later.swapped] == ["a", "b", "c"]
    assert "runs as it was written" in later.summary()
    assert any("read by max" in e["reason"] for e in onepass.explain(model["b"], x).not_accelerated)


def test_report_of_a_branch_that_stays():
    """A class with both branches whose own is not taken: that is said beside the other."""
    model = nn.Sequential(cases.ReadBranch())
    report = onepass.swap(model, kinds="attention")
    model(tokens())
    assert [entry["name"] for entry in report.swapped] == ["0"] and not report.skipped
    assert f"0: {READ}" in report.details() and "becomes one call" not in report.details()
    explained = onepass.explain(model, tokens()).not_accelerated
    assert [line["reason"] for line in explained if line["name"] == "0"] == [READ]
    model[0].flash = True
    assert operators(lambda: model(tokens())) == ["attention"]


def test_on_a_gpu(monkeypatch):
    """It stays as it is, and is named."""
    weight = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(cases.Base, "parameters", lambda self: iter([weight]))
    model = nn.Sequential(cases.NanoGPT(), cases.TwoBranches())
    (left,) = onepass.swap(model, kinds="attention", dry_run=True).unknown
    assert left["name"] == "0"
    assert left["reason"].startswith("softmax(q k^T) v by hand, which is left as it is on cuda")


def test_make_fx():
    stock, ours = swapped(cases.NanoGPT)
    x = tokens()
    ours(x)
    torch.testing.assert_close(make_fx(ours)(x)(x), stock(x))


def test_transforms_run_as_written():
    stock, ours = swapped(cases.NanoGPT)
    x = tokens()
    torch.testing.assert_close(torch.func.vmap(ours)(x[None]), stock(x)[None])
    tangent = torch.randn_like(x)
    for got, expected in zip(
        *(torch.func.jvp(module, (x,), (tangent,)) for module in (ours, stock)), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert fate(ours).taken == 0


def test_double_backward():
    stock, ours = swapped(cases.NanoGPT)

    def second(module, x):
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    inputs = [tokens(1) for _ in range(4)]
    exact = copy.deepcopy(stock).double()
    numerics.assert_close(
        [second(ours, x) for x in inputs],
        [second(exact, x.double()) for x in inputs],
        [second(stock, x) for x in inputs],
    )


def test_memory_grows_with_the_tokens():
    """No matrix of scores is kept for the backward."""
    _, ours = swapped(cases.Shortest)
    ours(tokens())
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    x = torch.randn(1, 1024, cases.WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(x)
    assert max(saved) < 4 * cases.HEADS * 1024 * 1024 / 8


@pytest.mark.parametrize(("cls", "is_masked"), [(cases.NanoGPT, True), (cases.Shortest, False)])
def test_small_calls_run_as_written(monkeypatch, cls, is_masked):
    """Bounds are those of modules with masks until the first call shows that there are none."""
    masked, without = 2**12, 2**14
    monkeypatch.setattr(small_calls, "LEAST_MASKED_BY_HAND", {torch.float32: (masked, masked)})
    monkeypatch.setattr(small_calls, "LEAST_BY_HAND", {torch.float32: (without, without)})
    monkeypatch.setattr(small_calls, "MOST_THREADS", 1)
    _, ours = swapped(cls)
    sizes = {batch: batch * cases.TOKENS**2 * cases.WIDTH for batch in (1, 4, 8)}
    assert sizes[1] < masked < sizes[4] < without < sizes[8]
    counts = []
    for batch in (1, 4, 4, 8):
        ours(tokens(batch))
        counts.append(fate(ours).taken)
    assert counts == ([0, 1, 2, 3] if is_masked else [0, 1, 1, 2])
    with small_calls.all_gain():
        ours(tokens(1))
    assert fate(ours).taken == counts[-1] + 1


# ---- inside torch.compile it runs as it was written, and is told ---------------------------------

LOST = "inside torch.compile attention by hand runs as it was written"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), NanoGPT()

    def forward(self, x):
        return x + self.attention(self.norm(x))


def explained(model):
    """(operators that ran, reasons by the end of the name)"""
    torch._dynamo.reset()
    found = onepass.explain(model, torch.randn(2, TOKENS, WIDTH))
    reasons = {e["name"].removeprefix("_orig_mod."): e["reason"] for e in found.not_accelerated}
    return {call["op"] for call in found.calls}, reasons


@pytest.mark.parametrize("how", ["around", "in place"])
def test_explain_names_what_compilation_loses(how):
    model = compiled = Block()
    onepass.swap(model, kinds="attention")
    if how == "in place":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    operators, reasons = explained(compiled)
    assert "attention" not in operators
    assert reasons["attention"].startswith(LOST)
    assert reasons["norm"] == "not swapped: onepass.swap(model) before torch.compile"


def test_a_module_that_is_left_out_of_compilation_is_taken():
    model = Block()
    (note,) = [note for note in onepass.swap(model).notes if LOST in note]
    assert note.startswith(f"attention: {LOST}; ") and "torch.compiler.disable" in note
    model.attention.forward = torch.compiler.disable(model.attention.forward)
    operators, reasons = explained(torch.compile(model, backend="eager"))
    assert "attention" in operators and not reasons
    assert not any(LOST in note for note in onepass.swap(nn.LayerNorm(8)).notes)
