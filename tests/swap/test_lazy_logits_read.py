"""swap(lazy_logits=True): logits are right or refused, in every way of reading them."""

import copy
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import fsdp
from torch.utils.dlpack import to_dlpack
from torch.utils.flop_counter import FlopCounterMode

from onepass import numerics
from tests.swap.lazy_logits_cases import (
    VOCABULARY,
    assert_same,
    assert_same_gradients,
    assert_same_steps,
    gradients,
    labelled,
    pair,
    waits,
)

pytestmark = pytest.mark.usefixtures("every_loss_gains")


# ---- reading logits ------------------------------------------------------------------------------


def _of_a_file(logits: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"logits": logits.detach()}, file)
    file.seek(0)
    return torch.load(file)["logits"]


def _compiled_mean(logits: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda x: x.square().mean(), backend="aot_eager")(logits)


READS = {
    "a file": _of_a_file,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "a deep copy": lambda x: copy.deepcopy(x.detach()),
    "argmax": lambda x: x.argmax(-1),
    "a slice": lambda x: x[:, 1:-1, ::7],
    "one number": lambda x: x[0, 0, 0].item(),
    "a list": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "numpy, by force": lambda x: x.numpy(force=True),
    "text": lambda x: repr(x.detach()),
    "data": lambda x: x.data + 0,
    "data in place": lambda x: x.data.mul_(2.0),
    "cat": lambda x: torch.cat([x, x]),
    "double": lambda x: x.double(),
    "capped": lambda x: torch.tanh(x / 30.0) * 30.0 + 0,
    "cast to bfloat16": lambda x: x.to(torch.bfloat16).float(),
    "the dtype": lambda x: x.float().dtype,
    "dlpack": lambda x: torch.from_dlpack(x.detach()) + 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "in place": lambda x: x.mul_(3.0)[0],
    "filled": lambda x: x.masked_fill_(x > 0, -1.0) + 0,
    "out": lambda x: torch.exp(x.detach(), out=torch.empty(x.shape)),
    "a copy of the object": lambda x: copy.copy(x) + 0,
    "numpy's argmax": lambda x: np.argmax(x.detach(), -1),
    "by each number": lambda x: x.detach().apply_(lambda number: 2.0 * number) + 0,
    "in inference mode": lambda x: torch.inference_mode()(lambda: x + 1)() + 0,
}


@pytest.fixture(scope="module")
def models():
    """(swapped, stock, a batch), which no test changes."""
    return pair()


@pytest.mark.parametrize("name", READS)
def test_reading_logits(name, models):
    model, stock, batch = models
    read = READS[name]
    found, expected = read(model(**batch).logits), read(stock(**batch).logits)
    if isinstance(expected, torch.Tensor):
        assert not waits(found) and found.grad_fn.__class__ is expected.grad_fn.__class__
        assert torch.equal(found, expected)
    else:
        assert np.array_equal(found, expected)


SHAPES = {
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, 1),
    "resize_": lambda x: x.resize_(2, 3),
    "set_": lambda x: x.set_(torch.zeros(2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_changes_in_place_is_refused(name, models):
    model, stock, batch = models
    logits = model(**batch).logits.detach()
    with pytest.raises(RuntimeError, match=f"lazy logits: aten.{name} must not change them"):
        SHAPES[name](logits)
    assert torch.equal(logits + 0, stock(**batch).logits)


def test_what_is_written_stays(models):
    model, stock, batch = models

    def read(m):
        output = m(**batch)
        logits, kept = output.logits, output.logits.detach()
        lazily = logits / 2.0
        logits[:, 0] = 0.0
        logits[:, 1].add_(1.0)
        logits *= 2.0
        row = logits[0]
        row.exp_()
        return (logits, kept, lazily), gradients(m, (logits * logits).sum())

    (found, ours), (expected, theirs) = read(model), read(stock)
    for got, base in zip(found, expected, strict=True):
        assert torch.equal(got + 0, base)
    for got, ref, base in zip(ours, read(copy.deepcopy(stock).double())[1], theirs, strict=True):
        numerics.assert_close(got, ref, base)


LOSSES = {
    "a loss of one's own": lambda out: out.logits.float().logsumexp(-1).mean(),
    "both": lambda out: out.loss + 0.1 * out.logits.square().mean(),
    "of capped ones": lambda out: (torch.tanh(out.logits / 3.0) * 3.0).square().mean(),
    "of a copy that is wider": lambda out: out.logits.double().sin().sum().float(),
    "by a function of autograd": lambda out: _Squares.apply(out.logits),
    "in compiled code": lambda out: _compiled_mean(out.logits),
    "of the last token": lambda out: out.logits[:, -1].exp().mean(),
}


class _Squares(torch.autograd.Function):
    """As for Triton kernels: autograd sees its arguments, torch's functions do not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, upstream):
        return 2.0 * upstream * ctx.saved_tensors[0]


@pytest.mark.grid
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of", ["Llama", "Phi", "Gemma2"])
def test_gradients_of_logits(name, of):
    model, stock, _ = pair(of)
    assert_same(model, stock, labelled(), of=LOSSES[name])


class _Reversed(torch.autograd.Function):
    """Values that could be delayed, with a gradient of another function."""

    @staticmethod
    def forward(ctx, x):
        return x.detach() * 1.5

    @staticmethod
    def backward(ctx, upstream):
        return -upstream


def _without_gradients(x):
    with torch.no_grad():
        return x / 2.0


GRAPHS = {
    "detached": lambda x: x.detach(),
    "a leaf": lambda x: x.detach().requires_grad_(),
    "of a leaf": lambda x: x.detach().requires_grad_() / 2.0,
    "detached in place": lambda x: x.detach_(),
    "of a leaf in place": lambda x: x.detach_().requires_grad_() / 2.0,
    "without gradients": _without_gradients,
    "of a leaf without gradients": lambda x: _without_gradients(x).requires_grad_() * 3.0,
    "of a function": _Reversed.apply,
    "of a function of a factor": lambda x: _Reversed.apply(x / 2.0),
    "of a factor": lambda x: x / 2.0,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_models_loss_of_logits_with_another_graph(name):
    """The loss function is called by hand: gradients go where stock's go."""
    model, stock, batch = pair()
    leaves = []

    def step(m):
        logits = GRAPHS[name](m(**batch).logits)
        loss = m.loss_function(logits=logits, labels=batch["labels"], vocab_size=VOCABULARY)
        leaves.append((loss.requires_grad, logits.is_leaf))
        if loss.requires_grad:
            loss.backward()

    assert_same_steps(model, stock, step)
    assert len(set(leaves)) == 1


def test_detached_logits_keep_no_graph(models):
    model, *_ = models
    output = model(**labelled(), output_hidden_states=True)
    kept, embedded = output.logits.detach(), weakref.ref(output.hidden_states[0])
    del output
    assert embedded() is None and waits(kept)
    assert kept.argmax(-1).shape == (3, 11)


def test_second_derivatives_of_logits(models):
    model, stock, batch = models

    def second(m):
        loss = m(**batch).logits.sin().mean()
        (first,) = torch.autograd.grad(loss, m.lm_head.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), m.model.norm.weight)[0]

    exact = second(copy.deepcopy(stock).double())
    numerics.assert_close(second(model), exact, second(stock))


def test_after_the_backward_they_are_there_and_after_the_step_they_are_not():
    model, stock, batch = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = stock(**batch).logits
    early, late = model(**batch), model(**batch)
    early.loss.backward()
    assert torch.equal(early.logits + 0, expected)
    late.loss.backward()
    optimizer.step()
    assert torch.equal(early.logits + 0, expected)  # they were read
    with pytest.raises(RuntimeError, match=r"before optimizer\.step"):
        late.logits.argmax(-1)
    with pytest.raises(RuntimeError, match="weight of the head"):
        late.logits.tolist()


def _stepped(model, output):
    """Where autograd does not see it."""
    output.loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    return output.logits.argmax(-1)


def _changed_hidden_states(model, output):
    with torch.no_grad():
        output.hidden_states[-1].mul_(2.0)
    return output.logits.argmax(-1)


REFUSED = [
    (_stepped, r"before optimizer\.step"),
    (_changed_hidden_states, "hidden state"),
    (lambda model, output: output.logits.retain_grad(), "must not be asked"),
    (lambda model, output: output.logits.register_hook(print), "must not be asked"),
    (lambda model, output: register_multi_grad_hook([output.logits], print), "must not be asked"),
    (lambda model, output: torch.autograd.grad(output.loss, output.logits), "not have been used"),
    (lambda model, output: to_dlpack(output.logits.detach()), "Cannot access data pointer"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_refused(use, message):
    model, *_ = pair()
    with pytest.raises(RuntimeError, match=message):
        use(model, model(**labelled(), output_hidden_states=True))


def test_hooks_of_torch_on_each_output():
    """Hooks of ModuleTracker, which torch's flop counter uses."""
    model, stock, batch = pair()
    counts = []
    for m in (model, stock):
        with FlopCounterMode(display=False) as counter:
            m(**batch).loss.backward()
        counts.append(counter.get_flop_counts()["Global"])
    ours, base = (sum(count.values()) for count in counts)
    assert ours == base


def test_hooks_on_the_model():
    model, stock, batch = pair()
    seen = []

    def forward_hook(module, args, output):
        seen.append(output[1].argmax(-1))

    def backward_hook(module, dinput, doutput):
        seen.append([gradient is None for gradient in doutput])

    for m in (model, stock):
        m.register_forward_hook(forward_hook)
        m.register_full_backward_hook(backward_hook)
        m(**batch, return_dict=False)[0].backward()
    assert torch.equal(seen[0], seen[2]) and seen[1] == seen[3]


# ---- under DDP and FSDP, of one process ----------------------------------------------------------


def backward(batch: dict):
    return lambda m: m(**batch).loss.backward()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_replicated(options, group):
    """With some options DDP copies the outputs of a forward, and so reads the logits."""
    model, stock, batch = pair()
    replicated = nn.parallel.DistributedDataParallel(model, **options)
    assert waits(replicated(**batch).logits) is not bool(options)

    def step(m):
        for _ in range(2):
            (replicated if m is model else m)(**batch).loss.backward()

    assert_same_steps(model, stock, step)


@pytest.mark.parametrize("resharded", [None, True], ids=["gathered", "resharded"])
@pytest.mark.parametrize("of_its_own", [False, True], ids=["with the model", "of its own"])
def test_sharded(of_its_own, resharded, group):
    """By FSDP, which has a hook on each output, and may free the weight after the forward."""
    model, stock, batch = pair()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    if of_its_own:
        fsdp.fully_shard(model.lm_head, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=resharded)
    output = model(**batch)
    assert waits(output.logits) is not of_its_own
    if of_its_own or not resharded:
        assert torch.equal(output.logits + 0, stock(**batch).logits)
    else:
        with pytest.raises(RuntimeError, match="weight of the head"):
            output.logits.argmax(-1)
    output.loss.backward()
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert_same_gradients(found, stock, backward(batch))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original parameters"])
def test_sharded_by_the_first_fsdp(original, group):
    model, stock, batch = pair()
    cpu = torch.device("cpu")
    sharded = fsdp.FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)
    output = sharded(**batch)
    assert waits(output.logits)
    output.loss.backward()
    if original:
        with sharded.summon_full_params(sharded, with_grads=True):
            found = [parameter.grad.clone() for parameter in sharded.parameters()]
    else:  # all are in one parameter
        flat = next(sharded.parameters()).grad
        parts = flat.split([parameter.numel() for parameter in stock.parameters()])
        found = [x.view_as(p) for x, p in zip(parts, stock.parameters(), strict=True)]
    assert_same_gradients(found, stock, backward(batch))
