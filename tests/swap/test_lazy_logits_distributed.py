"""swap(lazy_logits=True) under DDP and FSDP, of one process."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tests.swap.lazy_logits_cases import (
    assert_same_gradients,
    assert_same_steps,
    labelled,
    pair,
    waits,
)

fsdp = pytest.importorskip("torch.distributed.fsdp")


pytestmark = pytest.mark.usefixtures("every_loss_gains")


@pytest.fixture(autouse=True)
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward(batch: dict):
    return lambda m: m(**batch).loss.backward()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_replicated(options):
    """With some options DDP copies the outputs of a forward, and so reads the logits."""
    model, stock = pair()
    batch = labelled()
    replicated = nn.parallel.DistributedDataParallel(model, **options)
    assert waits(replicated(**batch).logits) is not bool(options)

    def step(m):
        for _ in range(2):
            (replicated if m is model else m)(**batch).loss.backward()

    assert_same_steps(model, stock, step)


@pytest.mark.parametrize("resharded", [None, True], ids=["gathered", "resharded"])
@pytest.mark.parametrize("of_its_own", [False, True], ids=["with the model", "of its own"])
def test_sharded(of_its_own, resharded):
    """By FSDP, which has a hook on each output, and may free the weight after the forward."""
    model, stock = pair()
    batch = labelled()
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
def test_sharded_by_the_first_fsdp(original):
    model, stock = pair()
    batch = labelled()
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
