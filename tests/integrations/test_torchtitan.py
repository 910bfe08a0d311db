"""A model of torchtitan whose norms, attention, loss and optimizer its overrides replace."""

import copy
from dataclasses import dataclass

import pytest
import torch

import onepass
from onepass import numerics
from onepass._dispatch_log import record

pytest.importorskip(
    "torchtitan.models.llama3", reason="torchtitan is not installed", exc_type=ImportError
)
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common import attention
from torchtitan.models.llama3 import llama3_configs

from onepass.integrations.torchtitan import optimizer, varlen_attention
from onepass.reference.attention import attention as formula

OURS = "onepass.integrations.torchtitan."


@dataclass(kw_only=True, slots=True)
class Trainer(Configurable.Config):
    """The part of a configuration that overrides look through."""

    model: Configurable.Config
    loss: Configurable.Config


@pytest.fixture
def config():
    config = llama3_configs["debugmodel"]("varlen")
    config.layers = config.layers[:2]
    return config


def norms(config):
    torch.manual_seed(0)
    model = config.build()
    found = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.RMSNorm)}
    for norm in found.values():
        torch.nn.init.normal_(norm.weight)
    return model, found


def test_norms(config):
    """Its attention runs on CUDA alone, so each norm is called by itself."""
    stock, base = norms(config)
    names = ["onepass.integrations.torchtitan.rms_norm"]
    lines = apply_overrides(OverrideConfig(imports=names), config)
    model, found = norms(config)
    assert len(lines) == len(found) == 5 and list(found) == list(base)
    assert list(model.state_dict()) == list(stock.state_dict())
    for name, norm in found.items():
        assert type(norm).__module__ == "onepass.integrations.torchtitan"
        norm.weight.data.copy_(base[name].weight)
        x = torch.randn(2, 8, 256)

        def results(module, x):
            x = x.clone().requires_grad_()
            y = module(x)
            return y, *torch.autograd.grad(y.sin().sum(), [x, module.weight])

        with record() as calls:
            ours = results(norm, x)
        assert "rms_norm" in [call["op"] for call in calls]
        ref = results(copy.deepcopy(base[name]).double(), x.double())
        for mine, right, torchs in zip(ours, ref, results(base[name], x), strict=True):
            numerics.assert_close(mine, right, torchs)


def by_documents(self, q, k, v, *, attention_masks, scale=None, out_transform=None, **options):
    """torchtitan's, which runs on CUDA alone."""
    begins = attention_masks.cu_seq_q
    output, lse = formula(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seq_q=begins, cu_seq_k=begins, window_right=0, scale=scale,
    )  # fmt: skip
    output, lse = (x.unflatten(0, q.shape[:2]) for x in (output, lse.mT))
    return output if out_transform is None else out_transform(output, lse)


TOKENS = torch.randint(2000, (2, 24), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS.roll(-1, 1).masked_fill(TOKENS % 7 == 0, IGNORE_INDEX)
POSITIONS = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1).contiguous()


def trained(config, of_loss, dtype=torch.float32, prepare=lambda model: None):
    """The loss of a step, and the gradients."""
    torch.manual_seed(0)
    model, loss = config.build(), of_loss.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.data = parameter.data.to(dtype)
    prepare(model)
    if isinstance(loss, ChunkedLossWrapper):
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    output = model(TOKENS, POSITIONS, model.get_attention_masks(POSITIONS))
    found, _ = loss(output, LABELS, torch.tensor(40.0))
    found.backward()
    return [found.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
def test_attention_and_loss(config, chunks, dtype, monkeypatch):
    """In a step of the whole model, and by chunks of it. The stock step is in plain torch."""
    stock = CrossEntropyLoss.Config()
    if chunks > 1:
        stock = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=stock)
    with monkeypatch.context() as patch:
        patch.setattr(attention.VarlenAttention, "forward", by_documents)
        ref, base = trained(config, stock, torch.float64), trained(config, stock, dtype)
    names = [OURS + name for name in ("rms_norm", "varlen_attention", "cross_entropy")]
    holder = Trainer(model=config, loss=stock)
    apply_overrides(OverrideConfig(imports=names), holder)
    with record() as calls:
        found = trained(holder.model, holder.loss, dtype)
    ops = [call["op"] for call in calls if "backward" not in call["kernel"]]
    assert ops.count("attention") == 2, ops
    assert ops.count("cross_entropy") == chunks and ops.count("rms_norm") == 5, ops
    assert found[0].dtype is torch.float32
    numerics.assert_close(found, ref, base)


def test_a_transform_of_attention_gets_its_log_sum_exp(config):
    """As of sinks, whose attention is scaled afterwards."""
    metadata = attention.create_varlen_metadata_for_document(POSITIONS)
    stock = attention.VarlenAttention.Config()
    ours = varlen_attention(stock).build()
    q, k, v = (torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))

    def transform(output, lse):
        return output * lse.sigmoid()[..., None]

    for options in ({}, {"out_transform": transform}):
        given = dict(attention_masks=metadata, enable_gqa=True, scale=0.3, **options)
        expected = by_documents(ours, q, k, v, **given)
        numerics.assert_close(ours(q, k, v, **given), expected, expected)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_keeps_attention(config, kept):
    """Only where its policy is told of our operators."""

    class Kept(SelectiveAC):
        def get_save_ops(self):
            return super().get_save_ops() | set(onepass.sac_ops())

    holder = Trainer(model=config, loss=CrossEntropyLoss.Config())
    apply_overrides(OverrideConfig(imports=[OURS + "varlen_attention"]), holder)
    expected = trained(holder.model, holder.loss)
    policy = (Kept if kept else SelectiveAC)(SelectiveAC.Config())
    with record() as calls:
        found = trained(holder.model, holder.loss, prepare=policy.apply)
    assert [call["op"] for call in calls].count("attention") == (2 if kept else 4)
    assert all(map(torch.equal, found, expected))


def test_optimizer(config):
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "fused": False}
    )
    stock = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    settings = {"max_grad_norm": 1.0, "state_dtype": "bfloat16"}  # as JSON has them
    container = optimizer(stock, **settings).build(model_parts=[model])
    (found,) = container.optimizers
    assert type(found) is onepass.optim.AdamW and found.max_grad_norm == 1.0
    assert found.state_dtype is torch.bfloat16
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    container.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert float(found.grad_norm) > 1.0
