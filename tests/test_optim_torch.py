"""The optimizers inside torch: its own test inputs, Hugging Face's Trainer, data parallelism."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from optim_cases import (
    BF16,
    F32,
    F64,
    FLAGS,
    MODES,
    assert_same,
    made,
    members,
    ours,
    same,
    snapshot,
    steps,
    stock,
    torch_names,
)

import onepass
from onepass import numerics

# ---- torch's own inputs --------------------------------------------------------------------------

# Read by another process, since importing torch's test helpers forbids every later change of
# torch.backends' flags. They want expecttest, which torch does not bring, for a base class alone.
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
    subprocess.run([sys.executable, "-c", READ_INPUTS, str(path)], check=True)
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
def test_zero_gradients_move_nothing(name, torchs_inputs):
    """torch's test_step_is_noop_for_zero_grads."""
    for _, kwargs in torchs_inputs[name][0]:
        p = torch.randn(5).requires_grad_()
        before = p.detach().clone()
        optimizer = ours(name)([p], **{**copy.deepcopy(kwargs), "weight_decay": 0})
        p.grad = torch.zeros(5)
        optimizer.step()
        assert same(p.detach(), before)


@torch_names
def test_a_copy_has_all_public_attributes(name, torchs_inputs):
    """torch's test_deepcopy_copies_all_public_attrs."""
    for _, kwargs in torchs_inputs[name][0]:
        optimizer = optimized(ours(name), **kwargs)
        names = {key for key in optimizer.__dict__ if not key.startswith("_")}
        assert names == {
            key for key in copy.deepcopy(optimizer).__dict__ if not key.startswith("_")
        }
        assert names == {
            key for key in pickle.loads(pickle.dumps(optimizer)).__dict__ if key[0] != "_"
        }


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
    [
        (F32, "own state"),
        (F32, "int8"),
        (BF16, "remainder16"),
        (BF16, "remainder16, bfloat16"),
        (BF16, "stochastic"),
    ],
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
    assert_same(
        *({k: v for k, v in snapshot(o).items() if k[1] != "grad"} for o in (optimizer, other))
    )


# ---- data parallelism ----------------------------------------------------------------------------

SHARDED = ((5, 7), (3, 4), (1, 6), (9,))  # rows that two ranks do not share evenly
SHARDED_MODES = ("own state", "fp32", "remainder16")


def network(dtype=F32):
    torch.manual_seed(40)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(
        dtype
    )


def batch(number, dtype=F32):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 7, generator=generator).to(dtype)


def sharded_network(dtype=F32):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(dtype), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_sharded(model, optimizer, rank, numbers, dtype=F32):
    norms = []
    for number in numbers:
        optimizer.zero_grad()
        model(batch(number, dtype)[4 * rank : 4 * rank + 4]).square().mean().backward()
        optimizer.step()
        if optimizer.max_grad_norm is not None:
            norms.append(optimizer.grad_norm.clone())
    return norms


def full(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def case_noise(rank, folder):
    """Replicas whose processes have seeds of their own."""
    torch.manual_seed(100 + rank)
    extras = {"master": "stochastic", "state_dtype": "int8"}
    optimizer = made("AdamW", ((5000,), (4352,), (4, 5)), BF16, **extras)
    steps(optimizer, 3)
    return snapshot(optimizer), optimizer.param_groups[0]["seed"]


def case_fsdp(rank, folder):
    """Steps clipped by the norm of the whole model."""
    results = {}
    for name in ("AdamW", "SGD", "Lion"):
        model = sharded_network()
        optimizer = ours(name)(model.parameters(), **FLAGS[name], max_grad_norm=0.1)
        norms = train_sharded(model, optimizer, rank, range(5))
        results[name] = [full(p) for p in model.parameters()], norms
    return results


def sharded_parameters(optimizer, placements):
    """The optimizer's parameters and next gradients as distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    params = [
        torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
        for p in members(optimizer)
    ]
    return params, mesh


def case_shards(rank, folder):
    """The same gradients for parameters whole and in shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    results = {}
    for mode in SHARDED_MODES:
        whole = made("AdamW", SHARDED, BF16, **MODES[mode])
        params, mesh = sharded_parameters(whole, [Shard(0)])
        optimizer = onepass.optim.AdamW(params, **FLAGS["AdamW"], **MODES[mode])
        for number in range(3):
            steps(whole, 1, first=number)
            for p, q in zip(params, members(whole), strict=True):
                p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
            optimizer.step()
        found = {
            (index, key): full(value)
            for index, entries in optimizer.state_dict()["state"].items()
            for key, value in entries.items()
        }
        found.update({(index, "param"): full(p) for index, p in enumerate(params)})
        expected = {k: v for k, v in snapshot(whole).items() if k[1] != "grad"}
        # Collectives know no int16: sharded remainders are shown as masters.
        for index, key in [k for k in expected if k[1] == "remainder"]:
            high = expected[index, "param"].view(torch.int16).int() << 16
            low = expected.pop((index, key)).int()
            expected[index, "master"] = (high + low).view(torch.float32)
        results[mode] = found, expected
    return results


def case_replicas(rank, folder):
    """The norm of parameters of which some are on both ranks, and count once."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = steps(made("SGD", SHARDED), 1)
    params, mesh = sharded_parameters(whole, [Replicate()])
    halves, _ = sharded_parameters(whole, [Shard(0)])
    optimizer = onepass.optim.SGD([*params, *halves], max_grad_norm=1.0)
    for p, q in zip([*params, *halves], [*members(whole)] * 2, strict=True):
        p.grad = distribute_tensor(q.grad, mesh, p.placements)
    optimizer.step()
    expected = torch.cat([p.grad.double().flatten() for p in [*members(whole)] * 2]).norm()
    if rank == 0:
        params[0].grad.to_local()[0] = float("nan")
    elif halves[0].grad.to_local().numel():
        halves[0].grad.to_local()[0] = float("inf")
    before = [full(p) for p in (*params, *halves)]
    norm = optimizer.grad_norm.clone()
    optimizer.step()
    skipped = all(same(full(p), b) for p, b in zip((*params, *halves), before, strict=True))
    return norm, expected, optimizer.grad_norm.clone(), skipped


def case_checkpoint(rank, folder):
    """Saved by torch.distributed.checkpoint in mid-training, loaded into another model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as helpers

    results = {}
    for dtype, mode in ((F32, "own state"), (BF16, "remainder16"), (BF16, "stochastic")):
        runs = []
        path = str(Path(folder) / f"checkpoint {mode}")
        for resumed in (False, True):
            model = sharded_network(dtype)
            torch.manual_seed(6 + resumed)
            optimizer = onepass.optim.AdamW(model.parameters(), **FLAGS["AdamW"], **MODES[mode])
            if not resumed:
                train_sharded(model, optimizer, rank, range(3), dtype)
            parts = {
                "model": helpers.get_model_state_dict(model),
                "optimizer": helpers.get_optimizer_state_dict(model, optimizer),
            }
            if resumed:
                dcp.load(parts, checkpoint_id=path)
                helpers.set_model_state_dict(model, parts["model"])
                helpers.set_optimizer_state_dict(model, optimizer, parts["optimizer"])
            else:
                dcp.save(parts, checkpoint_id=path)
                keys = sorted(next(iter(parts["optimizer"]["state"].values())))
            train_sharded(model, optimizer, rank, range(3, 6), dtype)
            runs.append([full(p) for p in model.parameters()])
        results[mode] = runs, keys
    return results


CASES = (case_noise, case_fsdp, case_shards, case_replicas, case_checkpoint)


def rank_main(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    results = {}
    for case in CASES:
        try:
            results[case.__name__] = case(rank, folder)
        except Exception:
            results[case.__name__] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each case gave on each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_main, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux",
    reason="torch.distributed is not available",
)


def of_case(ranks, case):
    results = [rank[case.__name__] for rank in ranks]
    for result in results:
        assert not isinstance(result, str), result
    return results


@needs_gloo
def test_replicas_round_alike(ranks):
    (one, seed), (two, other) = of_case(ranks, case_noise)
    assert seed == other
    assert_same(one, two)


@needs_gloo
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_fully_sharded_run_is_the_run_of_one_process(name, ranks):
    (found, norms), (other, other_norms) = (one[name] for one in of_case(ranks, case_fsdp))
    assert all(same(one, two) for one, two in zip(found + norms, other + other_norms, strict=True))
    assert all(norm.shape == () and norm.dtype == F32 for norm in norms)
    weights, expected_norms = [], []
    for dtype in (F64, F32):
        model = network(dtype)
        optimizer = stock(name)(model.parameters(), **FLAGS[name])
        expected_norms.append([])
        for number in range(5):
            optimizer.zero_grad()
            model(batch(number, dtype)).square().mean().backward()
            expected_norms[-1].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(norm > 0.1 for norm in expected_norms[0])
    for one, two in zip(norms, expected_norms[0], strict=True):
        assert abs(one / two - 1) < 1e-5
    for one, two in zip(found, weights[1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@needs_gloo
@pytest.mark.parametrize("mode", SHARDED_MODES)
def test_shards_are_bitwise_parts_of_the_whole(mode, ranks):
    for result in of_case(ranks, case_shards):
        assert_same(*result[mode])


@needs_gloo
def test_the_norm_counts_replicas_once(ranks):
    for norm, expected, _, _ in of_case(ranks, case_replicas):
        assert norm.shape == () and not hasattr(norm, "full_tensor")
        assert abs(norm / expected - 1) < 1e-6


@needs_gloo
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks):
    for _, _, norm, skipped in of_case(ranks, case_replicas):
        assert not norm.isfinite() and skipped


@needs_gloo
@pytest.mark.parametrize("mode", ["own state", "remainder16", "stochastic"])
def test_a_distributed_checkpoint_continues_bitwise(mode, ranks):
    for result in of_case(ranks, case_checkpoint):
        (whole, resumed), keys = result[mode]
        assert {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} <= set(keys)
        assert all(same(one, two) for one, two in zip(whole, resumed, strict=True))
