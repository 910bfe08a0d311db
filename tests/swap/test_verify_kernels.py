"""Report.verify finds every operator whose results are wrong by a hundredth; its verdict says which
kernels it is about, and when it can say nothing."""

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass import _dispatch_log
from onepass._policy import small_calls
from onepass.swapping import classes
from onepass.swapping.matchers import KINDS
from onepass.tools.model import GPT, Sizes
from tests.swap import attention_by_hand
from tests.swap.test_verify import broken
from tests.test_conventions import declared_ops

pytestmark = pytest.mark.usefixtures("probed_once")


class Wrong(TorchDispatchMode):
    """Scales the results of one operator of onepass, and notes which there are."""

    def __init__(self, name: str | None = None, factor: float = 1.01):
        super().__init__()
        self.name, self.factor, self.seen = name, factor, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace != "onepass":
            return result
        name = function._schema.name.removeprefix("onepass::")
        self.seen.add(name)
        if name != self.name:
            return result
        return pytree.tree_map_only(torch.Tensor, self._scaled, result)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x if x.is_floating_point() else x


def gpt():
    tokens = torch.randint(0, 256, (2, 32))
    sizes = Sizes(layers=1, heads=2, width=32, block=32, batch=2)
    return GPT(sizes, dropout=0.1), (tokens, tokens)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 1), torch.randn(2, 16, 32)


def llama():
    from tests.swap import small_models  # which skips without transformers

    ids = torch.arange(32).reshape(2, 16)
    model = small_models.transformers.LlamaForCausalLM(small_models.CONFIG)
    return model, {"input_ids": ids, "labels": ids}


def images():
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 1)
    ), torch.randn(2, 3, 8, 8)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.loss = nn.Linear(16, 64), nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.loss(self.linear(x), target)


def losses():
    return Classifier(), (torch.randn(32, 16), torch.arange(32))


def by_hand():
    return attention_by_hand.NanoGPT(0.2), torch.randn(2, 12, 16)


def adaptive():
    from tests.swap import small_models  # which skips without transformers

    return small_models.adaptive(), (torch.randn(2, 9, 64), torch.randn(2, 64))


def lazy():
    from tests.swap import lazy_logits_cases

    return lazy_logits_cases.make("Llama"), lazy_logits_cases.labelled()


# What each model runs at least: in any mode, and in training.
EXPECTED = {
    gpt: {"norm_forward", "attention_forward", "linear_forward"},
    encoder: {"attention_forward", "linear_epilogue_forward"},
    llama: {"norm_forward", "gate_forward", "rotary_forward"},
    images: {"group_norm_forward"},
    losses: {"linear_forward", "loss_forward"},
    by_hand: {"attention_forward", "linear_forward"},
    adaptive: {"modulated_norm_forward"},
    lazy: {"linear_loss"},
}
IN_TRAINING = {gpt: {"dropout_forward"}}
MODES = [*((make, True) for make in EXPECTED), (encoder, False)]


@pytest.fixture
def all_kinds_gain(slow_products, every_loss_gains, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_ROWS", 1)


@pytest.mark.parametrize(("make", "training"), MODES)
def test_every_operator_that_is_wrong_is_found(make, training, all_kinds_gain):
    torch.manual_seed(0)
    model, batch = make()
    model.train(training)
    is_lazy = make is lazy
    report = onepass.swap(model, kinds="loss" if is_lazy else KINDS, lazy_logits=is_lazy)
    with Wrong() as mode:
        result = report.verify(batch)
    assert result.ok and result.dropout_off == ""
    assert mode.seen >= EXPECTED[make] | (IN_TRAINING.get(make, set()) if training else set())
    # All of them once; in other models those that these are here for.
    own = mode.seen if (make, training) == (gpt, True) else _with_backwards(EXPECTED[make])
    missed = []
    for name in sorted(mode.seen & own):
        with Wrong(name):
            if report.verify(batch).ok is not False:
                missed.append(name)
    assert missed == [], f"of {sorted(mode.seen & own)}"


def _with_backwards(names: set[str]) -> set[str]:
    return names | {f"{name.removesuffix('_forward')}_backward" for name in names}


def test_every_kind_is_here():
    """Of the operators that swapped modules call, each is expected of a model above."""
    expected = set().union(*EXPECTED.values(), *IN_TRAINING.values())
    declared = {name.removeprefix("onepass::") for name in declared_ops()}
    forward = {name for name in declared if name.endswith(("_forward", "linear_loss"))}
    by_hand = {"branch_forward", "causal_conv1d_forward", "quantized_linear_forward"}
    by_hand |= {"selective_scan_forward", "mamba_chunk_scan_forward", "delta_rule_forward"}
    assert expected == forward - by_hand  # no swap calls these


class Norm(nn.Module):
    def __init__(self, then=lambda y: y):
        super().__init__()
        self.norm, self.then = nn.LayerNorm(64), then

    def forward(self, x):
        return self.then(self.norm(x))


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


# ---- the loss -----------------------------------------------------------------------------------


def test_what_was_differentiated_is_named():
    for then in (torch.sum, lambda y: (y, y.sum()), lambda y: (y, y.detach().sum(), y.sum())):
        result = onepass.swap(Norm(then)).verify(X)
        assert str(result).startswith("same: loss ") and not result.projected
    result = onepass.swap(Norm()).verify(X)
    assert str(result).startswith("same: a random projection of the output ")
    assert result.projected and result.to_dict()["projected"]
    assert "projection" not in str(onepass.swap(Norm()).verify(X, loss_fn=torch.sum))


def test_a_loss_function_of_another_kind():
    report = onepass.swap(Norm())
    with pytest.raises(RuntimeError, match="loss_fn must be given by its name, got a function"):
        report.verify(X, lambda y: y.sum())
    for loss in (None, 1.0, torch.ones(2)):
        with pytest.raises(RuntimeError, match="verify: loss_fn must return a scalar tensor, got"):
            report.verify(X, loss_fn=lambda y, loss=loss: loss)


# ---- kernels ------------------------------------------------------------------------------------


def test_kernels_are_listed():
    result = onepass.swap(Norm()).verify(X)
    assert result and result.ok is True
    assert result.kernels == {"layer_norm": 1, "layer_norm_backward": 1}
    assert result.larger_kernels == {} and result.not_run == ()
    assert 0.0 < result.shares["layer_norm"] <= 1.0
    share = f"{result.shares['layer_norm']:.2g} of its bound"
    assert f"; ran 1 x layer_norm ({share})" in str(result) and "\n" not in str(result)
    assert result.to_dict()["shares"] == result.shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_kernels_are_held_to_their_formulas(dtype):
    sizes = Sizes(layers=1, heads=2, width=32, block=32, batch=2)
    model, tokens = GPT(sizes, dropout=0.1).to(dtype), torch.randint(0, 256, (2, 32))
    report = onepass.swap(model, kinds=("norm", "attention", "dropout"))
    found = report.verify(tokens, tokens).shares
    assert set(found) == {"layer_norm", "attention", "dropout"} and max(found.values()) <= 1.0
    for name, operator in (("layer_norm", "norm"), ("attention", "attention"), ("dropout",) * 2):
        with Wrong(f"{operator}_forward", 1.02):  # which rounding to 16 bits may hide
            wrong = report.verify(tokens, tokens).shares
        assert wrong[name] > 1.0 and max(wrong[n] for n in wrong if n != name) <= 1.0


def test_calls_that_are_too_small_are_verified_as_larger_ones(users_bounds):
    report = onepass.swap(Norm())
    result = report.verify(X)
    assert result.ok and result.kernels == {}
    assert result.larger_kernels == {"layer_norm": 1, "layer_norm_backward": 1}
    assert "; run as in a larger batch 1 x layer_norm" in str(result)
    assert [call["level"] for call in onepass.explain(report._model, X).calls] == ["torch's own"]
    for name in ("norm_forward", "norm_backward"):  # which small calls do not reach
        with Wrong(name):
            assert report.verify(X).ok is False


def test_a_gpt_with_dropout_is_verified_by_the_kernels_that_train_it(users_bounds):
    tokens = torch.randint(0, 256, (2, 32))
    model = GPT(Sizes(layers=2, heads=2, width=32, block=32, batch=2), dropout=0.1)
    report = onepass.swap(model)
    result = report.verify(tokens, tokens)
    assert result.ok and result.kernels["attention"] == 2 and result.kernels["dropout"] == 10
    assert "attention" not in result.larger_kernels and result.not_run == ()
    with _dispatch_log.record() as calls:
        model(tokens, tokens).backward()
    trained = Counter(call["op"] for call in calls if call["level"] != _dispatch_log.TORCH)
    assert result.kernels == trained
    model.eval()
    result = report.verify(tokens, tokens)
    assert result.ok and result.kernels == {} and result.larger_kernels["attention"] == 2
    assert "drop" in result.not_run and result.dropout_off == ""


def test_without_a_kernel_there_is_nothing_to_verify():
    for model in (nn.Sequential(nn.Conv1d(4, 4, 1)), nn.Sequential(nn.Linear(64, 8))):
        result = onepass.swap(model, kinds="norm").verify(X)
        assert not result and result.ok is None and result.reason == "no kernel of onepass ran"
        said = "nothing to verify: no kernel of onepass ran; a random projection "
        assert str(result).startswith(said)
        assert json.loads(json.dumps(result.to_dict()))["ok"] is None


def test_a_difference_without_a_kernel_is_a_difference(monkeypatch):
    report = onepass.swap(Norm())
    wrong = lambda self, x: 1.1 * self.weight * x + self.bias  # noqa: E731
    monkeypatch.setattr(classes.LayerNormForward, "forward", wrong)
    result = report.verify(X)
    assert not result and result.ok is False and result.kernels == {}


def test_swapped_modules_that_are_not_called_are_named():
    model = Norm()
    model.others = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
    result = onepass.swap(model).verify(X)
    assert result.ok and result.not_run == ("others.0", "others.1", "others.2")
    assert str(result).endswith("; swapped and not run others.*")


def test_dropouts_which_are_off_are_named():
    model = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout(0.1))
    report = onepass.swap(model)
    model[1].eval()
    result = report.verify(X)
    assert result.ok and result.not_run == ("1",) and result.to_dict()["not_run"] == ["1"]
    assert "2 x dropout" in str(result) and ", backward too" in str(result)
    assert str(result).endswith("; swapped and not run 1")
    assert onepass.swap(model.eval()).verify(X).not_run == ("1", "3")
    not_swapped = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1)).eval()
    assert onepass.swap(not_swapped, kinds="norm").verify(X).not_run == ()


# ---- digits -------------------------------------------------------------------------------------

SILENT = {
    "zero": lambda y: 0.0 * y.square().sum(),
    "underflow": lambda y: (1e-30 * y) ** 3,
    "denormal": lambda y: 1e-42 * y.square().sum(),
    "constant": lambda y: (0.0 * y + 3.0).sum(),
    "nan": lambda y: torch.nan * y.sum(),
    "infinite": lambda y: torch.inf * y.square().sum(),
}


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("with_loss", [False, True])
def test_values_without_digits_cannot_tell(name, with_loss, monkeypatch):
    report = onepass.swap(Norm(SILENT[name]))
    loss_fn = (lambda y: y.sum()) if with_loss else None
    result = report.verify(X, loss_fn=loss_fn)
    assert result.ok is None and result.kernels
    assert str(result).startswith("cannot tell: loss and gradients have no digits to compare (")
    assert "allowed" not in str(result)
    if name in ("zero", "denormal", "underflow"):
        broken(monkeypatch, classes.LayerNormForward, torch.nan)
        assert report.verify(X, loss_fn=loss_fn).ok is False


def test_frozen_outputs_without_digits_cannot_tell():
    model = Norm(SILENT["underflow"]).requires_grad_(False)
    result = onepass.swap(model).verify(X)
    assert str(result).startswith("cannot tell: outputs have no digits to compare (")


@pytest.mark.parametrize("frozen", [False, True])
def test_one_number_that_never_changes_cannot_tell(frozen):
    """Without a gradient it is told by its exact value in float32, too."""
    for after, ok in ((lambda y: 0.0 * y.detach().sum() + 3.0, None), (lambda y: y.std(), True)):
        model = Norm(after).requires_grad_(not frozen)
        result = onepass.swap(model).verify(X)
        assert result.ok is ok
    result = onepass.swap(Norm(lambda y: 0.0 * y.detach().sum() + 3.0)).verify(X)
    assert result.reason == "outputs have no digits to compare (constant)"


def test_some_values_without_digits_do_no_harm(monkeypatch):
    model = Norm(lambda y: (y, 0.0 * y, 1e-42 * y, torch.full_like(y, torch.nan)))
    report = onepass.swap(model)
    loss = dict(loss_fn=lambda output: output[0].square().mean())
    result = report.verify(X, **loss)
    assert result.ok and result.worst.startswith("gradient of norm.")
    broken(monkeypatch, classes.LayerNormForward, 1.001)
    for options in (loss, {}):
        assert report.verify(X, **options).ok is not True


def test_a_bound_as_large_as_the_values_is_none():
    """Chaos: one rounding changes the output by its size."""
    result = onepass.swap(Norm(lambda y: torch.sin(1e9 * y))).verify(X)
    assert result.ok is None and "no larger than stock's own error" in result.reason


# ---- batches ------------------------------------------------------------------------------------


class Scaled(Norm):
    def forward(self, x, scale):
        return super().forward(x) * scale


def test_a_batch_by_keywords():
    report = onepass.swap(Scaled())
    assert report.verify(x=X, scale=2.0) and report.verify(X, scale=2.0)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("verify", lambda model, x: onepass.swap(model).verify(x)),
        ("explain", lambda model, x: onepass.explain(model, x)),
        ("swap with a sample", lambda model, x: onepass.swap(model, sample=x)),
    ],
)
def test_a_batch_that_forward_does_not_take_is_one_sentence(op, call):
    expected = rf"{op}: batch must be what forward takes, \(x, scale\), got \(Tensor\)"
    with pytest.raises(TypeError, match=expected):
        call(Scaled(), X)


def test_a_type_error_of_the_models_own_stays():
    def fail(y):
        raise TypeError("of the model's own")

    with pytest.raises(TypeError, match="^of the model's own"):
        onepass.explain(Norm(fail), X)
