"""The optimizers inside torch: its own test inputs, Hugging Face's Trainer."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch

import onepass
from onepass import numerics
from tests.optim.cases import (
    MODES,
    assert_same,
    ours,
    same,
    snapshot,
    steps,
    stock,
    through_pickle,
    torch_names,
    without_gradients,
)
from tests.support import fresh
from tests.support.dtypes import BF16, F32, F64

# ---- torch's own inputs --------------------------------------------------------------------------

# Read by another process, since importing torch's test helpers forbids later changes of
# torch.backends' flags. They import expecttest, which torch does not install, for one base class.
READ_INPUTS = """
import pickle, sys, types, unittest
try:
    import expecttest
except ImportError:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
import torch
from torch.testing._internal import common_optimizers as theirs
found = {}
for name in ("AdamW", "Adam", "SGD"):
    inputs = getattr(theirs, f"optim_inputs_func_{name.lower()}")("cpu", torch.float32)
    errors = getattr(theirs, f"optim_error_inputs_func_{name.lower()}")("cpu", torch.float32)
    found[name] = (
        [(one.desc, one.kwargs) for one in inputs],
        [
            (
                one.optimizer_error_input.desc,
                one.optimizer_error_input.params,
                one.optimizer_error_input.kwargs,
                one.error_on.name,
                one.error_type,
                one.error_regex,
            )
            for one in errors
        ],
    )
    info = next(one for one in theirs.optim_db if one.optim_cls.__name__ == name)
    found[name] += (info.not_og_supported_flags,)
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
"""


@pytest.fixture(scope="module")
def torchs_inputs(tmp_path_factory):
    """{name: (inputs, inputs that raise, flags that old checkpoints lack)}."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.pickle"
    fresh.run(READ_INPUTS, path, check=True)
    return pickle.loads(path.read_bytes())


def optimized(cls, dtype=F32, count=7, **kwargs):
    torch.manual_seed(21)
    params = [torch.randn(s).to(dtype).requires_grad_() for s in ((20, 7), (7,), (), (300, 17))]
    return steps(cls(params, **copy.deepcopy(kwargs)), count)


@torch_names
def test_every_input_of_torch(name, torchs_inputs):
    inputs, _, _ = torchs_inputs[name]
    assert len(inputs) >= 5
    for desc, kwargs in inputs:
        results = [
            optimized(cls, dtype, **kwargs)
            for cls, dtype in ((ours(name), F32), (stock(name), F64), (stock(name), F32))
        ]
        found, ref, base = (snapshot(optimizer) for optimizer in results)
        assert found.keys() == base.keys(), desc
        for key in {key for _, key in base} - {"step", "grad"}:
            pooled = [[v for k, v in s.items() if k[1] == key] for s in (found, ref, base)]
            numerics.assert_close(*pooled, case=f"{desc}: {key}")


@torch_names
def test_every_error_of_torch(name, torchs_inputs):
    _, errors, _ = torchs_inputs[name]
    assert len(errors) >= 7
    for desc, params, kwargs, when, error, regex in errors:
        assert when == "CONSTRUCTION_ERROR", desc
        for cls in (stock(name), ours(name)):
            expects = pytest.warns if issubclass(error, Warning) else pytest.raises
            with expects(error, match=regex):
                cls(params, **kwargs)


@torch_names
def test_checkpoints_without_later_flags_load(name, torchs_inputs):
    """torch's test_can_load_older_state_dict."""
    inputs, _, later = torchs_inputs[name]
    for _, kwargs in inputs:
        optimizer = optimized(ours(name), **kwargs)
        checkpoint = copy.deepcopy(optimizer.state_dict())
        for group in checkpoint["param_groups"]:
            for flag in later:
                group.pop(flag, None)
        optimizer.load_state_dict(checkpoint)
        assert all(
            flag in group for flag in later for group in optimizer.param_groups if flag in kwargs
        )
        steps(optimizer, 1)


@torch_names
def test_zero_gradients_and_copies_of_every_input(name, torchs_inputs):
    """torch's test_step_is_noop_for_zero_grads and test_deepcopy_copies_all_public_attrs."""
    for _, kwargs in torchs_inputs[name][0]:
        p = torch.randn(5).requires_grad_()
        before = p.detach().clone()
        optimizer = ours(name)([p], **{**copy.deepcopy(kwargs), "weight_decay": 0})
        p.grad = torch.zeros(5)
        optimizer.step()
        assert same(p.detach(), before)
        for twin in (copy.deepcopy(optimizer), through_pickle(optimizer)):
            public, others = (
                {key for key in one.__dict__ if key[0] != "_"} for one in (optimizer, twin)
            )
            assert public == others


# ---- Hugging Face's Trainer ----------------------------------------------------------------------


def trained(folder, dtype, resume=None, **extras):
    """A model after six steps of which three may come from a checkpoint, and its optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0 if resume is None else 77)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    ).to(dtype)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(128, (24, 16), generator=generator)
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizer_cls_and_kwargs=(onepass.optim.AdamW, {"lr": 1e-2, **extras}),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, trainer.optimizer.optimizer


@pytest.mark.skipif(
    not all(importlib.util.find_spec(m) for m in ("transformers", "accelerate")),
    reason="transformers and accelerate are not installed",
)
@pytest.mark.parametrize(
    "dtype, mode",
    [(F32, "int8"), (BF16, "remainder16, bfloat16"), (BF16, "stochastic")],
    ids=str,
)
def test_trainer_steps_saved_and_resumed_are_bitwise(dtype, mode, tmp_path, capsys):
    from transformers.utils import logging

    logging.disable_progress_bar()
    whole, optimizer = trained(tmp_path / "whole", dtype, **MODES[mode])
    assert type(optimizer) is onepass.optim.AdamW
    half = tmp_path / "whole" / "checkpoint-3"
    resumed, other = trained(tmp_path / "resumed", dtype, half, **MODES[mode])
    assert not (tmp_path / "resumed" / "checkpoint-3").exists()
    assert {float(entries["step"]) for entries in other.state_dict()["state"].values()} == {6}
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert one.dtype == dtype and same(one.detach(), two.detach())
    assert_same(without_gradients(optimizer), without_gradients(other))
