"""Norms that swap accepts: the probe's verdicts, and the behaviour of accepted norms."""

import copy
import importlib
import itertools

import pytest
import torch
from torch import nn

import onepass
from onepass.swapping import plan
from onepass.swapping import probe as probing
from tests.swap import foreign_norms


@pytest.fixture(autouse=True)
def few_draws():
    """Here verdicts take all their draws (tests/conftest.py)."""


COLS = 192  # of fewer, a probe draws again
RMS = "onepass rms_norm"
RMS_1 = "onepass rms_norm, weight_offset 1"
LAYER = "onepass layer_norm"
LAYER_1 = "onepass layer_norm, weight_offset 1"

# Classes of transformers: module, class, its swapped class. Others have the source of one of these.
ACCEPTED = [
    ("llama", "LlamaRMSNorm", RMS),
    ("olmo2", "Olmo2RMSNorm", RMS),
    ("olmoe", "OlmoeRMSNorm", RMS),
    ("mamba", "MambaRMSNorm", RMS),
    ("nemotron_h", "NemotronHRMSNorm", RMS),
    ("moshi", "MoshiRMSNorm", RMS),
    ("gemma3n", "Gemma3nRMSNorm", RMS),
    ("llama4", "Llama4TextRMSNorm", RMS),
    ("imagegpt", "ImageGPTLayerNorm", RMS),
    ("t5", "T5LayerNorm", RMS),
    ("idefics", "IdeficsRMSNorm", RMS),
    ("gemma", "GemmaRMSNorm", RMS_1),
    ("cohere", "CohereLayerNorm", LAYER),
    ("deberta", "DebertaLayerNorm", LAYER),
    ("convnext", "ConvNextLayerNorm", LAYER),
    ("nemotron", "NemotronLayerNorm1P", LAYER_1),
]


def real(module: str, name: str) -> type[nn.Module]:
    pytest.importorskip("transformers", reason="its norms are looked at")
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(("module", "name", "to"), ACCEPTED, ids=[case[1] for case in ACCEPTED])
def test_real_norms_accepted(module, name, to):
    norm = real(module, name)(COLS)
    (entry,) = onepass.swap(norm).swapped
    assert entry["to"] == to and entry["from"].endswith(name) and entry["kind"] == "norm"
    assert type(norm).__name__ == name and isinstance(norm, real(module, name))


@pytest.mark.parametrize(
    "cols",
    [2, 2048, *(pytest.param(cols, marks=pytest.mark.slow) for cols in (3, 8, 33, 100, 768))],
)
def test_verdict_does_not_depend_on_the_width(cols):
    (entry,) = onepass.swap(foreign_norms.RMS(cols)).swapped
    assert entry["to"] == RMS
    assert onepass.swap(foreign_norms.Unbiased(cols)).skipped
    if cols > 2:  # with two columns layer norm is only the sign of a difference
        (entry,) = onepass.swap(foreign_norms.GammaBeta(cols)).swapped
        assert entry["to"] == LAYER


# ---------------------------------------------------------------- the probe itself


@pytest.fixture
def probed(monkeypatch):
    """The modules that were probed."""
    found, original = [], probing.probe

    def noted(module, *arguments, **options):
        found.append(module)
        return original(module, *arguments, **options)

    monkeypatch.setattr(probing, "probe", noted)
    return found


def test_probe_runs_once_per_class_and_configuration(probed):
    cls = foreign_norms.RMS
    onepass.swap(
        nn.Sequential(*[cls(256) for _ in range(4)], cls(256, eps=1e-5), cls(512), cls(512))
    )
    assert len(probed) == 3


def test_copies_of_a_model_share_verdicts_where_that_is_said(probed):
    model = nn.Sequential(foreign_norms.RMS(256), foreign_norms.RMS(256, eps=1e-5))
    for _ in range(2):
        with plan.verdicts_shared():
            reports = [onepass.swap(copy.deepcopy(model)) for _ in range(3)]
        assert all(report.swapped == reports[0].swapped for report in reports)
        assert len(reports[0].swapped) == len(probed) == 2
        probed.clear()
    for _ in range(2):
        onepass.swap(copy.deepcopy(model))
    assert len(probed) == 4


def test_probe_needs_no_values_and_touches_nothing():
    norm = foreign_norms.RMS(COLS)
    norm.weight.data.fill_(float("nan"))
    norm.weight.grad = torch.ones(COLS)
    norm.eval()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    norm.owner = [nn.Linear(2, 2)]
    before = dict(vars(norm))
    onepass.swap(norm)
    assert vars(norm) == before and norm.weight.isnan().all() and (norm.weight.grad == 1).all()


def test_probe_is_isolated_from_the_callers_modes():
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        norm = foreign_norms.RMS(COLS)
        assert onepass.swap(norm).swapped
    assert torch.equal(torch.get_rng_state(), state)


def test_a_less_accurate_onepass_is_refused(monkeypatch):
    def worse(*arguments, **options):
        output, residual = original(*arguments, **options)
        return output * (1 + 1e-5), residual

    original = probing.norm
    monkeypatch.setattr(probing, "norm", worse)
    (entry,) = onepass.swap(foreign_norms.RMS(COLS)).skipped
    assert entry["reason"].startswith("onepass would be less accurate for unit inputs in float32")


class Registered(foreign_norms.RMS):
    subclasses: list[type] = []

    def __init_subclass__(cls, **kwargs):
        Registered.subclasses.append(cls)


def test_swapping_registers_no_subclass():
    assert onepass.swap(Registered(COLS)).swapped and Registered.subclasses == []


# ---------------------------------------------------------------- accepted norms at work

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llama", "LlamaRMSNorm"),
        ("olmo2", "Olmo2RMSNorm"),
        ("t5", "T5LayerNorm"),
        ("gemma", "GemmaRMSNorm"),
        ("llama4", "Llama4TextRMSNorm"),
        ("cohere", "CohereLayerNorm"),
        ("deberta", "DebertaLayerNorm"),
        ("nemotron", "NemotronLayerNorm1P"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["eager", "autocast"])
def test_output_dtype_is_the_originals(module, name, autocast):
    norm, stock = real(module, name)(COLS), real(module, name)(COLS)
    onepass.swap(norm)
    for input_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        x = torch.randn(2, 3, COLS).to(input_dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            try:
                expected = stock.to(weight_dtype)(x)
            except RuntimeError:  # for inputs that stock refuses, the swapped one calls stock
                with pytest.raises(RuntimeError):
                    norm.to(weight_dtype)(x)
                continue
            y = norm.to(weight_dtype)(x)
        assert y.dtype == expected.dtype, (input_dtype, weight_dtype)
        # Stock rounds the normalized row before it multiplies, to whichever dtype is coarsest, and
        # computes in float32 at best: two such roundings lie between the two.
        dtypes = [input_dtype, weight_dtype, torch.bfloat16 if autocast else torch.float32]
        eps = max(torch.finfo(dtype).eps for dtype in [*dtypes, torch.float32])
        torch.testing.assert_close(y, expected, rtol=2 * eps, atol=2 * eps)


class CastsUnderAutocast(foreign_norms.RMS):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return super().forward(x).to(x.dtype)


def test_autocast_dtype_is_asked_of_the_original():
    norm = CastsUnderAutocast(COLS)
    onepass.swap(norm)
    x = torch.randn(3, COLS)
    with onepass._dispatch_log.record() as calls:
        assert norm(x).dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                assert norm(x).dtype == dtype
    assert len(calls) == 4


def test_dtypes_that_were_not_proven_run_the_original():
    norm = real("llama", "LlamaRMSNorm")(COLS).double()
    x = torch.randn(4, COLS, dtype=torch.float64)
    expected = norm(x)
    onepass.swap(norm)
    assert torch.equal(norm(x), expected)
