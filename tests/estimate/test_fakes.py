"""The cache of results without data: a hit is what torch would say."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from onepass.tools.estimate import fakes, step
from onepass.tools.estimate.subject import Subject


class Words(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, words):
        mask = torch.ones(words.shape[1], words.shape[1]).triu(1).bool()
        logits = self.head(self.layers(self.embedding(words), mask))
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def without_cache(monkeypatch):
    monkeypatch.setattr(fakes.Known, "call", lambda *call: None)


@pytest.mark.parametrize(
    "options",
    [
        step.Options(),
        step.Options(kinds=None, checkpointing=True),
        step.Options(kinds=None, dtype=torch.bfloat16, inplace_loss=True),
        step.Options(autocast=True),
    ],
    ids=lambda options: f"{options.kinds}-{options.checkpointing}-{options.autocast}",
)
def test_every_event_is_the_same_from_the_cache_and_without(options, monkeypatch):
    subject = Subject(Words(0.1), torch.randint(0, 50, (2, 8)))

    def run():
        trace = step.Trace()
        makes = {"": torch.optim.AdamW, "muon": torch.optim.SGD}
        return step.run(subject, options, makes, trace), trace

    run(), run()  # torch's own cache has a call when it comes again
    known = fakes._known_of(subject.fake)
    count = len(known.entries)
    warm = run()
    assert count > 100 and len(known.entries) == count  # what can be known was known
    known.entries.clear()
    cold = run()
    without_cache(monkeypatch)
    assert warm == cold == run()


X = torch.arange(24.0).reshape(4, 6)
CALLS = {  # of each, those whose results differ
    "shape": [lambda x: x + 1, lambda x: x[:2] + 1],
    "stride": [lambda x: x + 1, lambda x: x.reshape(6, 4).t() + 1],
    "offset": [lambda x: x[:2].t(), lambda x: x[1:3].t()],
    "dtype": [lambda x: x + 1, lambda x: x.double() + 1, lambda x: x.int() + 1],
    "storage": [lambda x: x[0].view(2, 3), lambda x: x[0].clone().view(2, 3)],
    "numbers": [lambda x: x.int() * 2, lambda x: x.int() * 2.0, lambda x: x.bool() * True],
    "zeros and ones": [lambda x: x.int() + 1, lambda x: x.int() + 1.0, lambda x: x.int() + True],
    "lists": [lambda x: x.sum([0]), lambda x: x.sum([1]), lambda x: x.sum([0, 1])],
    "keywords": [lambda x: x.sum(0), lambda x: x.sum(0, dtype=torch.double)],
    "data": [lambda x: x + torch.ones(6), lambda x: x + torch.ones(4, 1).double()],
    "several results": [lambda x: x.sort(1), lambda x: x.sort(0), lambda x: x[:1].sort(1)],
}


def facts(results, of):
    """Of results, and whether they share the storage of a tensor."""
    storage = of.untyped_storage()._cdata
    found = []
    for tensor in fakes.tensors_of(results):
        shares = tensor.untyped_storage()._cdata == storage
        found.append((fakes._facts(tensor), tensor.fake_device, shares, vars(tensor).keys()))
    return found


def compared(calls):
    """Of each call three times in alternation, and without the cache."""
    mode = fakes.fake_mode()
    x = mode.from_tensor(X)
    rounds = []
    for with_cache in (True, True, True, False):
        with pytest.MonkeyPatch.context() as patch, fakes.Fakes(mode):
            if not with_cache:
                without_cache(patch)
            rounds.append([facts(call(x), x) for call in calls])
    return rounds


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_have_keys_that_differ(name):
    rounds = compared(CALLS[name])
    assert all(found == rounds[-1] for found in rounds)


def test_the_default_dtype_is_in_the_key():
    mode = fakes.fake_mode()
    x = mode.from_tensor(X)
    dtypes = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            with fakes.Fakes(mode):
                for _ in range(3):
                    dtypes.append((x.int() / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes == 3 * [torch.float32] + 3 * [torch.float64] + 3 * [torch.float32]


def test_operators_in_place_and_tensors_without_strides_are_left_to_torch():
    mode = fakes.fake_mode()
    x, matrix = mode.from_tensor(X), torch.eye(4).to_sparse()
    weight = mode.from_tensor(X.clone()).requires_grad_()
    with fakes.Fakes(mode):
        for _ in range(3):
            version = x._version
            assert x.mul_(2) is x and x._version == version + 1
            assert torch.sparse.mm(matrix, x).shape == x.shape
            nn.functional.embedding(torch.tensor([0, 1]), weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse


def test_small_results_of_data_are_computed_each_time():
    mode = fakes.fake_mode()
    with fakes.Fakes(mode):
        found = [(torch.tensor([float(n)]) + 1).item() for n in range(4)]
        large = [torch.zeros(1 << 21) for _ in range(3)]
    assert found == [1.0, 2.0, 3.0, 4.0]
    assert all(type(tensor) is FakeTensor for tensor in large)
    assert len({tensor.untyped_storage()._cdata for tensor in large}) == 3


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(fakes, "MOST_KNOWN", 8)
    mode = fakes.fake_mode()
    x = mode.from_tensor(X)
    with fakes.Fakes(mode):
        for number in range(60):
            assert (x + number % 20).shape == x.shape
    assert 0 < len(fakes._known_of(mode).entries) <= 8


def test_other_libraries_operators_are_asked_each_time():
    """Their fakes may look at anything; the operators that these call are known to torch."""
    size = 2

    @torch.library.custom_op("onepass_tests::of_size", mutates_args=())
    def of_size(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(size)

    @of_size.register_fake
    def _(x):
        return x.new_empty(size)

    mode = fakes.fake_mode()
    x = mode.from_tensor(X)
    with fakes.Fakes(mode):
        found = []
        for size in (2, 2, 2, 3, 3, 4):  # noqa: B007
            found.append(of_size(x).shape[0])
    assert found == [2, 2, 2, 3, 3, 4]


def test_a_mode_and_what_is_known_of_it_end_together():
    mode = fakes.fake_mode()
    x = mode.from_tensor(X)
    with fakes.Fakes(mode):
        for _ in range(3):
            x = x + 1
    assert fakes._known_of(mode).entries
    references = [weakref.ref(mode), weakref.ref(fakes._known_of(mode))]
    del mode, x
    gc.collect()
    assert [reference() for reference in references] == [None, None]
