"""Accelerate's `prepare` on two processes: replicated, and sharded by FSDP2."""

import pytest
import torch
from torch import nn

import onepass
from tests.distributed import ranks

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = ranks.distributed

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, backward) -> None:
    for step in range(STEPS):
        backward(model(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def alone() -> dict[str, torch.Tensor]:
    """The weights after training without Accelerate."""
    model = build()
    onepass.swap(model)
    train(model, onepass.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward)
    return model.state_dict()


def prepared(sharded: bool) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The class of the stepped parameters, and the weights by Accelerate and without it."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    with ranks.as_of_torchrun():
        AcceleratorState._reset_state(True)
        made = accelerate.Accelerator(cpu=True)
        try:
            if sharded:  # Accelerate does not do that on a CPU by itself
                made.state.distributed_type = DistributedType.FSDP
                made.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
                    fsdp_version=2, cpu_ram_efficient_loading=False
                )
            model = build()
            onepass.swap(model)
            optimizer = onepass.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = made.prepare(model, optimizer)
            train(model, optimizer, made.backward)
            kind = type(optimizer.param_groups[0]["params"][0]).__name__
            weights = made.unwrap_model(model).state_dict()
            whole = {
                name: weight.full_tensor() if sharded else weight
                for name, weight in weights.items()
            }
            return kind, whole, alone()
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_ranks_train_what_one_process_trains(sharded):
    """Bit for bit, since the mean of two equal gradients is either of them."""
    for kind, weights, expected in ranks.run(2, prepared, sharded):
        assert kind == ("DTensor" if sharded else "Parameter")
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
            assert not torch.equal(weight, build().state_dict()[name]), name
