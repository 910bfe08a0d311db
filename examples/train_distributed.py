"""Trains the GPT of `onepass compare` on several processes: DDP, FSDP2 or shared sequences.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp --checkpoint gpt
    torchrun --nproc-per-node 1 examples/train_distributed.py --parallel ddp --checkpoint gpt

The second command continues where the first ended, with another number of processes and another
kind of parallelism: torch.distributed.checkpoint depends on neither. --batch counts all processes
together, so the run is the same, up to rounding and dropout's random numbers. On several machines
the same command runs on each; HOST is one of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/train_distributed.py --parallel fsdp --checkpoint /shared/gpt

`WAYS` is the only difference. With "ddp" each process has the whole model and a part of the batch,
with "fsdp" a part of the model and of the batch, with "context" the whole model and a part of each
sequence.
Processes with a GPU each use nccl (not tried yet), others gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.distributed import ring_attention, shard_sequence
from onepass.tools.data import Batches, load_text
from onepass.tools.errors import BadInput
from onepass.tools.model import GPT, SelfAttention, Sizes

SIZES = {"layers": 6, "heads": 6, "width": 384, "block": 1024, "batch": 4}
QUICK_SIZES = {"layers": 2, "heads": 2, "width": 32, "block": 64, "batch": 4}
WARM_UP = 2  # steps whose speed does not count


# ---- the three ways -----------------------------------------------------------------------------
#
# Each has two functions. One makes the swapped model parallel; the other turns a batch, (tokens,
# targets), both (batch, block), into the model's arguments for this process.


def data_parallel(model: GPT, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None)


def fully_sharded(model: GPT, device: torch.device) -> nn.Module:
    for part in (*model.blocks, model):
        fully_shard(part)
    return model


def rows_of_batch(tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return tokens[rank::size], targets[rank::size]


class RingSelfAttention(SelfAttention):
    """compare's attention for sequences that are divided among all processes."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq of this process, width)
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = ring_attention(query, key, value, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


def on_a_ring(model: GPT) -> None:
    """Called before the swap, which takes the rest of the model."""
    for block in model.blocks:
        block.attention.__class__ = RingSelfAttention


def part_of_sequences(tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return shard_sequence(tokens, 1), shard_sequence(targets, 1), shard_sequence(positions, 0)


def average_gradients(model: nn.Module) -> None:
    """Averages over processes. DDP would do it during the backward, where it delays the ring."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


WAYS: dict[str, tuple[Callable, Callable]] = {
    "ddp": (data_parallel, rows_of_batch),
    "fsdp": (fully_sharded, rows_of_batch),
    "context": (lambda model, device: model, part_of_sequences),
}


def build(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The parallel model and its optimizer. Every process makes the same weights."""
    torch.manual_seed(args.seed)
    model = GPT(sizes_of(args), args.dropout).to(device)
    if args.parallel == "context":
        on_a_ring(model)
    if not args.stock:
        onepass.swap(model)
    model = WAYS[args.parallel][0](model, device)
    if args.stock:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    else:  # it clips within its step
        clip = args.clip or None
        optimizer = onepass.optim.AdamW(model.parameters(), lr=args.lr, max_grad_norm=clip)
    return model, optimizer


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch, args: argparse.Namespace
) -> Tensor:
    """A step on a batch of all processes; returns the loss of this process's part, detached."""
    part = WAYS[args.parallel][1](*batch)
    low = args.dtype == "bfloat16"
    with torch.autocast(part[0].device.type, torch.bfloat16, enabled=low):
        loss = model(*part)
    loss.backward()
    if args.parallel == "context":
        average_gradients(model)
    if args.stock and args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ---- the run ------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device) -> dict:
    """Trains from the newest checkpoint, or from scratch; returns the figures of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    check(args, size)
    text = load_text(args.text)
    text.check(args.block)
    batches = Batches(text, args.block, args.batch, args.seed)
    model, optimizer = build(args, device)
    first = load(args, model, optimizer)
    say(
        f"{args.parallel} on {size} processes, {text.describe()}; from step {first} to {args.steps}"
    )
    losses, seconds, kept = [], [], []
    for step in range(first, args.steps):
        # Dropout differs for every step and process, and repeats in a run that is continued.
        torch.manual_seed((args.seed * 0x9E3779B1 + step * 0x10001 + rank) % 2**63)
        batch = [tensor.to(device) for tensor in batches(step)]
        start = time.perf_counter()
        losses.append(train_step(model, optimizer, batch, args))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        done = step + 1
        if done % args.log_every == 0 or done == args.steps:
            kept += mean_of_processes(losses)
            losses.clear()
            speed = args.batch * args.block / statistics.median(seconds[WARM_UP:] or seconds)
            say(f"step {done:5}   loss {kept[-1]:.4f}   {speed:,.0f} tokens/s")
        if args.checkpoint and (done % args.save_every == 0 or done == args.steps):
            save(args, model, optimizer, done)
    return {
        "parallel": args.parallel,
        "processes": size,
        "threads": torch.get_num_threads(),
        "swapped": not args.stock,
        "first_step": first,
        "losses": kept,
        "tokens_per_step": args.batch * args.block,
        "step_seconds": seconds,
    }


def mean_of_processes(losses: list[Tensor]) -> list[float]:
    """Processes have equally many tokens, so the mean of their means is that of all tokens."""
    found = torch.stack(losses).double()
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "step": torch.tensor(step)}


def save(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    folder = Path(args.checkpoint) / f"step-{step:08}"
    dcp.save(state_of(model, optimizer, step), checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / "sizes.json").write_text(json.dumps(saved_settings(args)))
    dist.barrier()
    say(f"saved {folder}")


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest complete checkpoint; returns its number of steps, 0 without one."""
    found = sorted(Path(args.checkpoint).glob("step-*/sizes.json")) if args.checkpoint else []
    if not found:
        return 0
    saved = json.loads(found[-1].read_text())
    if saved != saved_settings(args):
        raise BadInput(f"--checkpoint holds another run, of {saved}: {found[-1].parent}")
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=found[-1].parent)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["step"])


def saved_settings(args: argparse.Namespace) -> dict:
    """The settings that a continued run must share; parallelism and processes may change."""
    return {name: getattr(args, name) for name in (*SIZES, "seed")}


# ---- flags and processes ------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parallel", choices=WAYS, default="ddp", help="default ddp")
    add("--stock", action="store_true", help="torch's modules and AdamW (and our ring attention)")
    add("--steps", type=int, default=100, metavar="N", help="in all, resumed or not (default 100)")
    add("--checkpoint", metavar="FOLDER", help="save there, and go on from what is there")
    add("--save-every", type=int, default=50, metavar="N", help="steps (default 50; and the last)")
    add("--log-every", type=int, default=10, metavar="N", help="steps (default 10)")
    add("--text", nargs="+", metavar="FILE", help="train on these files, not the standard library")
    for name, default in SIZES.items():
        note = ", of all processes" if name == "batch" else ""
        add(f"--{name}", type=int, metavar="N", help=f"default {default}{note}")
    add("--dropout", type=float, default=0.1, metavar="P", help="default 0.1")
    add("--lr", type=float, default=1e-3, help="default 1e-3")
    add("--clip", type=float, default=1.0, metavar="NORM", help="of the gradients; 0: off")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if it is there",
    )
    add("--threads", type=int, metavar="N", help="of a process (default: its share of the cores)")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--json", metavar="FILE", help="the losses and times of the steps")
    add("--quick", action="store_true", help="tiny sizes: a trial")
    args = parser.parse_args(argv)
    for name, default in (QUICK_SIZES if args.quick else SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(args, name) for name in SIZES})


def check(args: argparse.Namespace, size: int) -> None:
    """Raises BadInput, one line, if this cannot be trained."""
    sizes_of(args)
    for name in ("steps", "save_every", "log_every", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.parallel == "context" and args.block % (2 * size):
        raise BadInput(f"--block must be a multiple of {2 * size} here, got {args.block}")
    if args.parallel != "context" and args.batch % size:
        raise BadInput(f"--batch must be a multiple of the {size} processes, got {args.batch}")


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[torch.device]:
    """torchrun's processes, or this one alone; the device of this one."""
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:  # torchrun sets one thread per process, whatever the number of cores
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(args.threads or max(1, cores))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with process_group(args) as device:
        try:
            found = train(args, device)
        except BadInput as error:  # raised in every process
            if dist.get_rank() == 0:
                print(f"train_distributed: {error}", file=sys.stderr)
            return 2
        if args.json and dist.get_rank() == 0:
            Path(args.json).write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
