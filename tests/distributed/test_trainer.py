"""transformers' Trainer on two processes, which replicates the model before the callback swaps."""

import logging

import pytest
import torch

from tests.distributed import ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytestmark = [*ranks.distributed, pytest.mark.slow]  # every rank imports the Trainer


def trained(folder: str) -> tuple[str, list[str], list[float], dict[str, torch.Tensor]]:
    """The wrapper's class, the lines of the log, the losses, and the weights."""
    from onepass.integrations.transformers import SwapCallback, trainer_optimizer
    from tests.integrations.test_trainer import arguments, build, kinds, logged, trainer_of

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("onepass.swap")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with ranks.as_of_torchrun():
        model = build("llama")
        before = kinds(model)
        args = arguments(folder, ddp_backend="gloo", max_steps=3, per_device_train_batch_size=2)
        trainer = trainer_of(model, args, trainer_optimizer(args), SwapCallback())
        trainer.train()
    logger.removeHandler(handler)
    assert kinds(model) == before
    return type(trainer.model_wrapped).__name__, lines, logged(trainer), model.state_dict()


def test_ranks_are_swapped_alike_and_one_of_them_tells(tmp_path):
    first, second = ranks.run(2, trained, str(tmp_path))
    assert first[0] == second[0] == "DistributedDataParallel"
    assert first[1][0].startswith("swapped ") and "attention 2" in first[1][0]
    assert second[1] == []
    assert first[2] == second[2] and first[2][0] > first[2][-1]
    assert all(torch.equal(one, second[3][name]) for name, one in first[3].items())
