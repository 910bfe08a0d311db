"""`onepass.estimate`: against the allocator in a real step, and piece by piece."""

import gc
import traceback
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass._batch import call
from onepass._policy import products
from onepass.tools.compare.train import Trainer
from onepass.tools.estimate import optimizers, step
from onepass.tools.estimate.fakes import tensors_of
from onepass.tools.model import GPT, Sizes, cast
from onepass.tools.user_model import objective_of
from tests.compare.cases import settings_of
from tests.estimate.models import MODELS
from tests.support import allocations

NEAR = 0.10  # how far from the measured peak an estimate may be
MODES = {"float32": {}, "autocast": {"autocast": True}, "bfloat16": {"dtype": torch.bfloat16}}


def measured(make, optimizer_state, *, dtype=None, autocast=False, checkpointing=False, **swapped):
    """(peak, scratch) of a real second step: the allocator's peak with the memory in use before it,
    and the most that one call of our kernels takes for itself, which an estimate leaves out."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    if dtype:
        model, batch = model.to(dtype), cast(batch, dtype)
    if swapped.pop("swap", False):
        onepass.swap(model, **swapped)
    if checkpointing:
        step.checkpoint(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = objective_of(call(model, batch)).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    calls = onepass.explain(run).calls
    gc.collect()
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    there = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    peak = allocations.peak(run) + sum(there.values()) + optimizer_state
    return peak, max((each["workspace_bytes"] for each in calls), default=0)


def check_near(name: str, tiny: bool, **options):
    found = onepass.estimate(lambda: MODELS[name](tiny), **options)
    taken, scratch = measured(lambda: MODELS[name](tiny), found.optimizer_state, **options)
    text = f"{name} {options}: {found.peak:,} of {taken:,}, {scratch:,} of them scratch"
    assert (1 - NEAR) * (taken - scratch) <= found.peak <= (1 + NEAR) * taken, text


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("swap", [False, True], ids=["stock", "swapped"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.grid
@pytest.mark.usefixtures("one_thread")  # each has scratch of its own in torch's convolutions
def test_a_tiny_model_is_near_what_is_measured(name, swap, checkpointing):
    check_near(name, True, swap=swap, checkpointing=checkpointing)


@pytest.mark.parametrize("mode", ["autocast", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.grid
def test_in_other_dtypes(name, mode):
    check_near(name, True, swap=True, **MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "stock", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_real_size_is_near_what_is_measured(name, mode, monkeypatch):
    """16-bit products are ours. torch's take memory of their own where the CPU has no instructions
    for them: oneDNN makes each result in float32 first."""
    without = products.facts()._replace(bfloat16=False, float16=False)
    monkeypatch.setattr(products, "facts", lambda: without)
    options = MODES.get(mode, dict(checkpointing=mode == "checkpointed"))
    check_near(name, False, swap=mode != "stock", **options)


# ---- piece by piece ----------------------------------------------------------------------------


def twice(width: int) -> nn.Module:
    """y = (x w) w, whose loss is the mean square."""
    layers = {name: nn.Linear(width, width, bias=False) for name in ("first", "second")}
    return nn.Sequential(OrderedDict(layers))


def test_every_number_of_a_model_that_can_be_counted_by_hand():
    width, rows = 64, 512
    weight, row = width * width * 4, rows * width * 4
    found = onepass.estimate(twice(width), torch.randn(rows, width), optimizer=torch.optim.SGD)
    assert found.parameter_count == 2 * width * width
    assert (found.parameters, found.gradients, found.others) == (2 * weight, 2 * weight, row)
    # The first's output for the second's weight, that for the square; the square itself is freed.
    assert found.activations == 2 * row
    assert found.saved == 3 * row  # and the batch
    assert found.optimizer_state == 0
    of_modules = {(entry["name"], entry["bytes"]) for entry in found.modules}
    assert of_modules == {("first", row), ("second", row)}
    assert found.peaks["forward"] == 2 * weight + row + 3 * row + 4
    assert sum(found.at_peak.values()) == found.peak == max(found.peaks.values())
    assert found.to_dict()["peak"] == found.peak
    assert "32.0 KiB  parameters" in str(found)


@pytest.mark.parametrize("swap", [False, True], ids=["stock", "swapped"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_saved_is_what_compare_measures(swap, dropout):
    model = GPT(Sizes(2, 4, 128, 128, 4), dropout)
    tokens = torch.randint(0, 256, (4, 128))
    found = onepass.estimate(model, (tokens, tokens), swap=swap)
    if swap:
        onepass.swap(model)
    trainer = Trainer(model, settings_of("--dtype", "float32"))
    assert found.saved == trainer.saved_bytes((tokens, tokens))


def test_real_data_and_none_are_the_same_timeline():
    make = lambda: MODELS["gpt2"](True)  # noqa: E731
    fake, real = (onepass.estimate(make, real=real, swap=True) for real in (False, True))
    assert fake.peaks["forward"] == real.peaks["forward"]
    assert fake.activations == real.activations and fake.modules == real.modules


class Marks(nn.Module):
    """Writes into a table made without inputs, which has data even where the batch has none."""

    def __init__(self, way: str):
        super().__init__()
        self.project, self.way = nn.Linear(64, 64, bias=False), way

    def forward(self, x):
        hidden = self.project(x)
        with torch.no_grad():
            wide, table = hidden.repeat(1, 16), torch.zeros(64, 1024)
            if self.way == "out":
                torch.mul(wide, 2.0, out=table)
            elif self.way == "in place":
                table.add_(wide)
            elif self.way == "a view":
                table[:32].add_(wide[:32])
            else:  # the table itself is released
                del table
                table = torch.zeros(64, 1024).scatter_(1, wide.long().abs() % 1024, 1.0)
        return hidden * table[:, :64]


@pytest.mark.parametrize("way", ["out", "in place", "a view", "chained"])
def test_what_is_written_into_takes_no_memory_again(way):
    fake, real = (onepass.estimate(Marks(way), torch.randn(64, 64), real=r) for r in (False, True))
    assert fake.peaks == real.peaks
    assert fake.activations == real.activations > 64 * 1024 * 4


class Tied(nn.Module):
    """Weights and views of one storage, which count once."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.tokens.weight
        self.mirror = nn.Linear(32, 100, bias=False)
        self.mirror.weight = nn.Parameter(self.tokens.weight.detach(), requires_grad=False)

    def forward(self, ids):
        return self.head(self.tokens(ids)) + self.mirror(self.tokens(ids))


class Views(nn.Linear):
    """A view that is saved keeps its storage, which counts once."""

    def forward(self, x):
        query, key, value = super().forward(x).chunk(3, dim=-1)
        return (query * key * value.transpose(0, 1).transpose(0, 1)).sum()


class Positions(nn.Module):
    """Buffers count, and whole numbers may be read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("scale", torch.randn(32))

    def forward(self, x):
        assert int(self.order[3]) == 3
        return x * self.weight * self.scale


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.aside = x * x  # kept without save_for_backward
        ctx.save_for_backward(x)
        return ctx.aside * x

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy * ctx.aside


class Custom(nn.Linear):
    """A function of the user keeps what it saves and what it holds."""

    def forward(self, x):
        return Cube.apply(super().forward(x)).sum()


WORD, ROW = 4, 64 * 32 * 4  # bytes
COUNTED = [  # a model, its batch, and what is known of it
    (Tied, torch.ones(4, 8, dtype=torch.int64),
     {"parameters": 100 * 32 * WORD, "gradients": 100 * 32 * WORD, "others": 4 * 8 * 8}),
    # The storage of the three views, and query * key.
    (lambda: Views(32, 96, bias=False), torch.randn(2, 32, 32), {"activations": 3 * ROW + ROW}),
    (Positions, torch.randn(4, 32), {"others": 8 * 8 + 32 * WORD + 4 * 32 * WORD}),
    # x and x * x; x and the batch.
    (lambda: Custom(32, 32), torch.randn(64, 32), {"activations": 2 * ROW, "saved": 2 * ROW}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "batch", "expected"), COUNTED, ids=["tied", "views", "positions", "custom"]
)
def test_each_storage_counts_once(make, batch, expected):
    found = onepass.estimate(make(), batch)
    assert {name: getattr(found, name) for name in expected} == expected


class Layers(nn.Module):
    def __init__(self, count: int, own: bool = False):
        super().__init__()
        self.own = own
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(count)
        )

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.own else layer(x)
        return x


def test_checkpointed_layers_keep_their_inputs_alone():
    batch = torch.randn(256, 64)
    row = 256 * 64 * 4
    plain = onepass.estimate(Layers(4), batch)
    ours = onepass.estimate(Layers(4), batch, checkpointing=True)
    own = onepass.estimate(Layers(4, own=True), batch)
    assert plain.activations == 4 * 3 * row
    assert ours.activations == own.activations == 4 * row  # inputs but the first's, and the output
    assert ours.peaks == own.peaks
    assert ours.peaks["backward"] < plain.peaks["backward"]


class Classifying(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Linear(32, 1000), nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.loss(self.head(x), target)


def test_the_loss_has_a_line_of_its_own_and_in_place_no_gradient_of_the_logits():
    given, logits = (torch.randn(512, 32), torch.randint(0, 1000, (512,))), 512 * 1000 * 4
    stock, plain, inplace = (
        onepass.estimate(Classifying(), given, **options)
        for options in ({}, {"swap": True}, {"swap": True, "inplace_loss": True})
    )
    assert logits <= stock.loss < logits + 100  # the log-softmax
    assert stock.modules[0]["name"] == "(loss)"
    assert inplace.activations == plain.activations
    assert plain.peaks["backward"] - inplace.peaks["backward"] > 0.8 * logits


def worded():
    """A Llama whose logits are its largest tensor."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=20_000,
    )  # fmt: skip
    tokens = torch.randint(0, 20_000, (2, 256))
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def test_without_logits_as_with_data_and_near_what_is_measured():
    found, real = (
        onepass.estimate(worded, swap=True, lazy_logits=True, real=real) for real in (False, True)
    )
    assert found.peaks["forward"] == real.peaks["forward"]
    assert found.activations == real.activations
    made = onepass.estimate(worded, swap=True)
    logits, weight = 2 * 256 * 20_000 * 4, 20_000 * 64 * 4  # whose gradient the forward computes
    assert made.activations - found.activations > logits - 1.1 * weight
    taken, _ = measured(worded, found.optimizer_state, swap=True, lazy_logits=True)
    assert abs(found.peak / taken - 1) <= NEAR, f"{found.peak:,} of {taken:,}"


def test_logits_that_the_model_reads_are_made():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.batch = worded()

        def forward(self, scale):
            output = self.model(**self.batch)
            return output.loss + scale * output.logits.square().mean()

    options = dict(batch=torch.ones(()), swap=True)
    lazy, made = (onepass.estimate(Reading(), lazy_logits=x, **options) for x in (True, False))
    assert lazy.activations > 0.9 * made.activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_states_are_those_that_each_optimizer_makes(dtype):
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(dtype)
    batch = torch.randn(4, 256)
    subject = step.Subject(model, batch)
    makes = optimizers.names(model)
    found = step.run(subject, step.Options(dtype=dtype), makes)
    for name, make in makes.items():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = make(model.parameters())
        kept = allocations.retained(optimizer.step)
        state = found.updates[name].state_bytes
        # Numbers beside the states: of the groups' settings, and where states lie.
        assert state <= kept <= state + 4096, f"{name}: {state:,} of {kept:,}"
        temporary = found.updates[name].temporary
        taken = allocations.peak(optimizer.step)
        # Batched products of parts of matrices make internal copies, which estimate does not see:
        # by oneDNN's instructions for bfloat16 none (AVX2), 5 % (its dots) or 29 % (without them).
        more = temporary // 3 if "Muon" in name else 4096
        assert temporary <= taken <= temporary + more, f"{name}: {temporary:,} of {taken:,}"
        assert temporary > 0 or "Muon" not in name


@pytest.mark.parametrize("real", [False, True])
def test_the_model_stays_as_it_is(real):
    model = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 64)).eval()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    batch = torch.randn(8, 64)
    random = torch.get_rng_state()
    onepass.estimate(model, batch, swap=True, real=real)
    assert real or torch.equal(torch.get_rng_state(), random)
    assert not model.training and type(model[0]) is nn.LayerNorm
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_meta_and_one_that_a_function_makes():
    batch = torch.randn(8, 64)
    expected = onepass.estimate(twice(64), batch)
    with torch.device("meta"):
        meta = twice(64)
    assert onepass.estimate(meta, batch) == expected
    assert onepass.estimate(lambda: (twice(64), batch)) == expected
    assert onepass.estimate(lambda: (twice(64), lambda step: batch)) == expected


def test_a_function_is_called_without_the_memory_of_its_parameters():
    seen = []

    def make():
        model = twice(4096)
        seen.append(allocations.allocated(model[0].weight.data.mul, 2))
        return model, torch.randn(4, 4096)

    found = onepass.estimate(make)
    assert seen[0] < 1000 and found.parameters == 2 * 4096 * 4096 * 4


# ---- what cannot be estimated ------------------------------------------------------------------


class Reading(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.mean() > 100:
            y = y + 1
        return y


class Choosing(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0].sum()


@pytest.mark.parametrize(
    "model, line",
    [(Reading(8, 8), "if y.mean() > 100:"), (Choosing(8, 8), "return y[y > 0].sum()")],
    ids=["a branch", "a mask"],
)
def test_a_model_that_reads_its_values_is_told_the_line_and_runs_on_real_data(model, line):
    batch = torch.randn(4, 8)
    with pytest.raises(RuntimeError) as error:
        onepass.estimate(model, batch)
    assert line in str(error.value) and "test_estimate.py:" in str(error.value)
    assert "real=True" in str(error.value)
    assert onepass.estimate(model, batch, real=True).parameters == (64 + 8) * 4


class Adjacent(nn.Module):
    """A layer of a graph network, with a sparse matrix or a sparse gradient."""

    def __init__(self, by_function: bool):
        super().__init__()
        self.weight, self.by_function = nn.Parameter(torch.randn(8, 4)), by_function

    def forward(self, x):
        if self.by_function:
            return torch.nn.functional.embedding(x, self.weight, sparse=True)
        return torch.sparse.mm(torch.eye(8).to_sparse(), self.weight)


X, WORDS, LINEAR = torch.randn(2, 8), torch.ones(2, dtype=torch.int64), nn.Linear(8, 4)
SPARSE = "model must (compute with dense tensors|run on its batch, got NotImplemented.*Sparse)"
WRONG = [  # model, batch, options, the error and its text
    (3, None, {}, TypeError, "model must be a module or a function, got int"),
    (LINEAR, X, dict(kinds="norm"), ValueError, "kinds must come with swap=True, got 'norm'"),
    (LINEAR, X, dict(lazy_logits=True), ValueError, "lazy_logits must come with swap=True"),
    (LINEAR, X, dict(checkpointing=True), RuntimeError, "model must hold a list of layers"),
    (LINEAR, X, dict(dtype="bf16"), TypeError, "dtype must be a torch.dtype or None, got 'b"),
    (LINEAR, X, dict(optimizer="adamw"), TypeError, "optimizer must be a class or a function, got"),
    (LINEAR, X, dict(optimizer=dict), RuntimeError, "optimizer must make one .* got"),
    (nn.Linear(8, 4).requires_grad_(False), X, {}, RuntimeError, "model must have a parameter"),
    (nn.LazyLinear(4), X, {}, RuntimeError, "model must have been called once"),
    (torch.jit.script(LINEAR), X, {}, RuntimeError, "model must not be scripted or traced"),
    (nn.Embedding(8, 4, sparse=True), WORDS, {}, RuntimeError, "model .*dense gradients"),
    (LINEAR, None, {}, RuntimeError, "model must come with a batch"),
    (
        LINEAR, torch.randn(2, 9), {}, RuntimeError,
        "model must run on its batch, got RuntimeError: ",
    ),
    (LINEAR, {"x": X}, {}, RuntimeError, r"model .*forward takes \(input\), .* a dict of x"),
    (lambda: LINEAR, None, {}, RuntimeError, r"model must return \(model, batch\)"),
    (lambda: (LINEAR, None), None, {}, RuntimeError, "model must come with a batch"),
    (Adjacent(True), WORDS, {}, RuntimeError, SPARSE),
    (Adjacent(False), WORDS, {}, RuntimeError, SPARSE),
]  # fmt: skip


@pytest.mark.parametrize(("model", "batch", "options", "error", "text"), WRONG)
@pytest.mark.parametrize("real", [False, True])
def test_what_cannot_be_estimated_is_told_in_a_sentence(model, batch, options, error, text, real):
    with pytest.raises(error, match=f"^estimate: {text}") as found:
        onepass.estimate(model, batch, real=real, **options)
    assert "\n" not in str(found.value)
    assert "--" not in "".join(traceback.format_exception(found.value))
