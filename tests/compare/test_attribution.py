"""Where the time of a watched step goes, by a clock that advances where a test says so."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass._policy import products, small_calls
from onepass.nn import QuantizedLinear
from onepass.swapping import by_hand_call
from onepass.tools.compare import attribution, train
from onepass.tools.compare.attribution import PARTS, Timeline, by_part, part_of_module
from onepass.tools.compare.products import products_of
from onepass.tools.errors import BadInput
from onepass.tools.model import GPT, Sizes
from tests.compare.cases import TINY, FakeClock, settings_of, tokens
from tests.swap import attention_by_hand

pytestmark = pytest.mark.usefixtures("one_thread")


class Slow(torch.autograd.Function):
    """The identity, which takes seconds of a clock in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_seconds, backward_seconds):
        ctx.clock, ctx.seconds = clock, backward_seconds
        clock.now += forward_seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds
        return gradient.clone(), None, None, None


class SlowDropout(nn.Dropout):
    def __init__(self, clock):
        super().__init__(0.5)
        self.clock = clock

    def forward(self, x):
        return super().forward(Slow.apply(x, self.clock, 3.0, 6.0))


class SlowRmsNorm(nn.Module):
    """A user's own norm, composed of several operations."""

    def __init__(self, width, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.clock = clock

    def forward(self, x):
        x = Slow.apply(x, self.clock, 2.0, 5.0)
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


IN_A_GPT = (*PARTS[:6], "embedding", attribution.OTHER)


def watch(model, *batch, device="cpu"):
    settings = dataclasses.replace(settings_of(), device=torch.device(device))
    return train.Trainer(model, settings).watched_step(batch)


def test_parts_sum_to_the_step(monkeypatch):
    clock = FakeClock(tick=1.0)
    monkeypatch.setattr(attribution, "clock", clock)
    data = tokens()
    spent = watch(GPT(TINY, dropout=0.1), data[:, :-1], data[:, 1:])
    # Every interval between two readings counts once, except the one in which hooks are set.
    assert sum(by_part(spent).values()) == 1e3 * (clock.readings - 2)
    assert sum(by_part(attribution.scaled(spent, 123.0)).values()) == pytest.approx(123.0)
    for part in IN_A_GPT:
        assert spent["forward"][part] > 0 and spent["backward"][part] > 0, part
    assert spent["update"]["optimizer"] == sum(spent["update"].values()) == 1e3


def test_slow_dropout_and_slow_norm_show_up_where_they_are(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(attribution, "clock", clock)
    model = nn.Sequential(nn.Linear(8, 8), SlowDropout(clock), SlowRmsNorm(8, clock), nn.GELU())
    spent = watch(model, torch.randn(4, 8))
    assert spent["forward"] == dict.fromkeys(PARTS, 0.0) | {"dropout": 3e3, "norm": 2e3}
    assert spent["backward"] == dict.fromkeys(PARTS, 0.0) | {"dropout": 6e3, "norm": 5e3}
    assert sum(spent["update"].values()) == 0.0


class Slowly(nn.Module):
    """What onepass has nothing for, and Python that takes its time between the functions."""

    def __init__(self, clock):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True)
        self.conv, self.clock = nn.Conv1d(8, 8, 1), clock

    def forward(self, tokens):
        x, _ = self.lstm(self.embed(tokens))
        self.clock.now += 7.0
        assert x.shape[1] == tokens.shape[1]  # no operator
        x = Slow.apply(self.conv(x.transpose(1, 2)), self.clock, 4.0, 5.0)
        return x + nn.functional.conv1d(x, self.conv.weight)


def test_what_is_not_ours_has_rows(monkeypatch):
    clock = FakeClock(tick=1.0)
    monkeypatch.setattr(attribution, "clock", clock)
    spent = watch(Slowly(clock), torch.randint(10, (2, 3)))
    ticks = {part: ms / 1e3 for part, ms in spent["forward"].items() if ms}
    # One interval for each part that was entered, and one after it.
    assert ticks.pop("Python") == pytest.approx(7.0 + 4.0 + sum(ticks.values()), abs=3.0)
    assert ticks.pop("other operators") >= 2.0  # transpose, add
    assert ticks == {"embedding": 1.0, "recurrent": 1.0, "convolution": 2.0}
    backward = {part for part, ms in spent["backward"].items() if ms}
    assert backward >= {"embedding", "recurrent", "convolution", "other operators"}
    assert spent["backward"]["Python"] == 0.0


def test_functions_that_an_optimizer_calls_are_its_own(monkeypatch):
    monkeypatch.setattr(attribution, "clock", FakeClock(tick=1.0))
    monkeypatch.setattr(train.Trainer, "_has_trained", True, raising=False)
    slow = lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=False)  # noqa: E731
    trainer = train.Trainer(nn.Linear(4, 4), settings_of(), make_optimizer=slow)
    update = trainer.watched_step((torch.randn(2, 4),))["update"]
    assert update["optimizer"] == sum(update.values()) == 1e3


def test_cuda_stamps_are_events_of_the_stream(monkeypatch):
    """With events of a stream that takes a second between each two."""
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(self)

        def synchronize(self):
            assert self is recorded[-1], "the last one closes the step"

        def elapsed_time(self, end):
            return 1e3 * (recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    data = tokens()
    spent = watch(GPT(TINY, dropout=0.1), data[:, :-1], data[:, 1:], device="cuda")
    assert sum(by_part(spent).values()) == 1e3 * (len(recorded) - 2)
    for part in IN_A_GPT:
        assert spent["forward"][part] > 0 and spent["backward"][part] > 0, part


def test_median_of_watched_steps():
    steps = [
        {phase: dict.fromkeys(PARTS, ms) for phase in attribution.PHASES} for ms in (1.0, 9.0, 2.0)
    ]
    assert attribution.median(steps)["forward"]["norm"] == 2.0


def test_swapped_modules_are_attributed_backward_too(torchs_products):
    sizes = Sizes(layers=1, heads=2, width=64, block=64, batch=2)
    model = GPT(sizes, dropout=0.1)
    onepass.swap(model)
    data = tokens(sizes)
    timeline = Timeline(torch.device("cpu"))
    with timeline.watch(model):
        loss = model(data[:, :-1], data[:, 1:])
    owners = {}
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        owners[node.name()] = timeline._owner(node._sequence_nr())
        pending += [child for child, _ in node.next_functions if child and child.next_functions]
    ours = ("Norm", "Dropout", "_Attention")
    found = {part for name, part in owners.items() if any(word in name for word in ours)}
    assert found == {"norm", "dropout", "attention"}, owners
    assert owners["AddmmBackward0"] == "linear"
    assert owners["AddBackward0"] == attribution.OTHER


def test_hand_written_attention_is_told_from_linear():
    class Attention(nn.Module):
        def forward(self, x):
            projected = x @ self.weight.t()
            return torch.softmax(projected @ projected.transpose(1, 2), -1) @ projected

    model = Attention()
    model.weight = nn.Parameter(torch.randn(8, 8))
    timeline = Timeline(torch.device("cpu"))
    with timeline.watch(model):
        timeline.enter_phase("forward")
        model(torch.randn(2, 4, 8))
        timeline.enter_phase("backward")
    entered = [part for _, _, part in timeline._marks if part in PARTS[:6]]
    assert entered == ["linear", "attention", "attention", "attention"]


@pytest.mark.parametrize("cls", [attention_by_hand.Shortest, attention_by_hand.NanoGPT])
def test_swapped_attention_by_hand_is_attention_forward_and_backward(cls, monkeypatch):
    model, x = cls(), torch.randn(2, attention_by_hand.TOKENS, attention_by_hand.WIDTH)
    onepass.swap(model)
    with small_calls.all_gain():
        model(x)  # its proof
        clock = FakeClock()
        monkeypatch.setattr(attribution, "clock", clock)
        attend = by_hand_call.masked_attention

        @functools.wraps(attend)
        def slow(query, *args, **named):
            return Slow.apply(attend(query, *args, **named), clock, 3.0, 5.0)

        monkeypatch.setattr(by_hand_call, "masked_attention", slow)
        spent = watch(model, x)
    assert spent["forward"]["attention"] == 3e3 and spent["backward"]["attention"] == 5e3


def test_adaptive_norm_with_a_projection_is_looked_into():
    class AdaptiveNorm(nn.Sequential):
        pass

    assert part_of_module(AdaptiveNorm(nn.Linear(4, 4))) is None
    assert part_of_module(nn.GroupNorm(1, 4)) == "norm"


def test_watching_survives_checkpoints_and_errors():
    """A checkpointed forward runs again in the backward; an error leaves no mode behind."""

    class Net(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    spent = watch(Net(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8))
    assert spent["forward"]["norm"] > 0 and spent["backward"]["norm"] > 0
    model = nn.LayerNorm(8)
    with pytest.raises(BadInput, match="normalized_shape"):
        watch(model, torch.randn(4, 7))
    assert torch._C._len_torch_function_stack() == 0
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_swapped_linear_layers_are_linear(monkeypatch):
    reason = "its Conv1D is a linear layer with a transposed weight"
    Conv1D = pytest.importorskip("transformers.pytorch_utils", reason=reason).Conv1D
    slow = products.Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
    monkeypatch.setattr(products, "facts", lambda: slow)
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(8, 8))
    assert len(onepass.swap(model).swapped) == 2
    timeline = Timeline(torch.device("cpu"))
    with timeline.watch(model):
        timeline.enter_phase("forward")
        output = model(torch.randn(4, 8))
        timeline.enter_phase("backward")
    entered = [part for _, _, part in timeline._marks if part in attribution.PARTS[:6]]
    assert entered == ["linear", "linear"]
    assert timeline._owner(output.grad_fn._sequence_nr()) == "linear"


def test_quantised_layers_are_linear_ones():
    assert part_of_module(QuantizedLinear(8, 16)) == "linear"
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 16))
    onepass.quantize(model, "nf4", skip_head=False)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(40, 8)).sum().backward()
    product = 2 * 40 * 64
    # Forward of both, and the gradient of the second's input.
    assert products_of(counter, model, settings_of()).operations == product * (8 + 16 + 16)


def test_operations_of_linear_layers():
    """Forward, and twice as many backward except where no gradient is needed; projections of
    MultiheadAttention count as attention."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = self.two(self.one(x))
            return self.attend(x, x, x, need_weights=False)[0]

    model = Model()
    model.two.weight.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 10, 8)).sum().backward()
    product = 2 * 40 * 8 * 16
    counted = products_of(counter, model, settings_of())
    assert counted.operations == 2 * product + 2 * product  # no dX of `one`, no dW of `two`
    assert counted.ceiling > 0
    spent = {phase: dict.fromkeys(attribution.PARTS, 0.5) for phase in attribution.PHASES}
    assert counted.rate(spent) == pytest.approx(4 * product / 1.5e-3 / 1e9)
    assert counted.rate(None) is None
