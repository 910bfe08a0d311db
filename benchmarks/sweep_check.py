"""One architecture of the sweep: stock against swapped, and back. Runs in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import resource
import statistics
import time
import traceback
import warnings

import sweep_models
import torch
import transformers
from torch import nn

import onepass
from onepass._policy import products, small_calls
from onepass.swapping.verify import as_stock, changes_of

ROUNDS = 3
_BF16_LOSS = 0.05


def run(connection, family: str, name: str, dtype: str, memory_gb: float) -> None:
    """Sends the row of the table, as a dict."""
    limit = int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    # Models of this size would be left to torch's own kernels.
    small_calls.LEAST_NORM.clear()
    small_calls.LEAST_ATTENTION.clear()
    small_calls.LEAST_LINEAR.clear()
    # So would their linear layers, on CPUs where torch's products are as fast.
    slow = products.Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
    products.facts = lambda: slow
    transformers.logging.set_verbosity_error()
    row = {"family": family, "name": name, "dtype": dtype}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, batches = sweep_models.build(family, name, getattr(torch, dtype))
        except Exception as error:
            connection.send({**row, "verdict": "not built", "reason": _text(error)})
            return
        check = _Check(model, batches)
        before = len(caught)
        check.run()
    ours = {str(w.message)[:200] for w in caught[before:]} - {
        str(w.message)[:200] for w in caught[:before]
    }
    connection.send({**row, **check.row, "warnings": sorted(ours)})


class _Check:
    def __init__(self, model: nn.Module, batches: dict):
        self.model, self.batches = model, batches
        self.plain = batches["plain"]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.row: dict = {"type": type(model).__name__, "parameters": parameters, "errors": {}}

    def run(self) -> None:
        model = self.model
        try:
            stock = self._state()
            stock_step = self._step()
        except Exception as error:
            self.row |= {"verdict": "not built", "reason": f"stock does not train: {_text(error)}"}
            return
        try:
            self.saved_stock = bool(self._saved())
        except Exception:  # weight norm, local functions as hooks
            self.saved_stock = False
        try:
            report = self._swap()
        except Exception as error:
            self.row |= {"verdict": "crash", "errors": {"swap": _text(error)}}
            return
        self._stage("verify", self._verify, report)
        self._stage("training step", self._training, stock_step)
        self._stage("swap twice", self._again, report)
        self._stage("copies", self._copies)
        self._stage("times", self._times, report)
        self._stage("unswap", self._unswap)
        self._stage("as before", self._as_before, stock)
        self._stage("swap anew", self._anew, report)
        assert model is self.model
        verdicts = [found["ok"] for found in self.row.get("verified", {}).values()]
        self.row["verdict"] = "same" if verdicts and all(verdicts) else "DIFFERENT"
        if self.row["errors"]:
            crashed = "verify" in self.row["errors"] and not verdicts
            self.row["verdict"] = "crash" if crashed else f"{self.row['verdict']}, but"

    def _stage(self, name: str, function, *args) -> None:
        begin = time.thread_time()
        try:
            function(*args)
            self.row.setdefault("seconds of", {})[name] = round(time.thread_time() - begin, 2)
        except Exception as error:
            self.row["errors"][name] = _text(error)

    def _swap(self):
        report = onepass.swap(self.model)
        from_to = collections.Counter((item["kind"], item["to"]) for item in report.swapped)
        self.row["swapped"] = [[kind, to, count] for (kind, to), count in from_to.items()]
        for section in ("skipped", "unknown"):
            entries = getattr(report, section)
            found = collections.Counter((_short(e["type"]), e["reason"]) for e in entries)
            self.row[section] = [[*facts, count] for facts, count in found.items()]
        return report

    def _verify(self, report) -> None:
        self.row["verified"] = {}
        for name, batch in self.batches.items():
            for training in (False, True) if name == "plain" else (False,):
                self.model.train(training)
                arguments = (batch,) if isinstance(batch, dict) else batch
                found = report.verify(*arguments)
                worst = found.deviations[0]
                self.row["verified"][f"{name}, {'train' if training else 'eval'}"] = {
                    "ok": found.ok,
                    "share": worst.error / worst.allowed,
                    "worst": worst.name,
                    "judged": found.judged,
                    "text": str(found),
                }
                if self.model.training is not training:
                    raise AssertionError("verify left another training flag")
        self.model.eval()

    def _state(self) -> tuple:
        with torch.no_grad():
            torch.manual_seed(0)
            outputs = sweep_models.outputs(sweep_models.call(self.model.eval(), self.plain))
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        return outputs, state, [type(module) for module in self.model.modules()]

    def _as_before(self, stock: tuple) -> None:
        outputs, state, classes = self._state()
        if classes != stock[2]:
            raise AssertionError("unswap left other classes")
        if list(state) != list(stock[1]):
            raise AssertionError("unswap left other names in state_dict")
        for name, value in state.items():
            if not _same(value, stock[1][name]):
                raise AssertionError(f"state_dict[{name!r}] changed")
        if len(outputs) != len(stock[0]) or not all(map(_same, outputs, stock[0])):
            raise AssertionError("outputs after unswap differ from stock's")

    def _step(self) -> tuple[float, float]:
        """A training step's loss and the norm of all gradients, dropout off if settings allow."""
        model = self.model.train()
        probabilities = [(m, m.p) for m in model.modules() if isinstance(m, nn.Dropout)]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            for module, _ in probabilities:
                module.p = 0.0
            torch.manual_seed(0)
            loss = self._loss()
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        finally:
            for module, p in probabilities:
                module.p = p
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            model.zero_grad(set_to_none=True)
            model.eval()
        return loss.item(), norm.item()

    def _loss(self) -> torch.Tensor:
        result = sweep_models.call(self.model, self.plain)
        loss = getattr(result, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss.float()
        return sum(leaf.float().square().mean() for leaf in sweep_models.outputs(result))

    def _training(self, stock: tuple[float, float]) -> None:
        """A coarse check of branches that only training takes: verify has judged eval mode."""
        exact = next(self.model.parameters()).dtype == torch.float32
        slack = 1e-3 if exact else _BF16_LOSS
        found = self._step()
        for name, ours, theirs in zip(("loss", "norm of gradients"), found, stock, strict=True):
            if not abs(ours - theirs) <= slack * max(abs(theirs), 1e-3) and ours == ours:
                raise AssertionError(f"{name} {ours:.7g} swapped, {theirs:.7g} stock, in training")

    def _again(self, report) -> None:
        again = onepass.swap(self.model)
        if len(again.swapped) != len(report.swapped):
            raise AssertionError(f"{len(again.swapped)} swapped, at first {len(report.swapped)}")

    def _saved(self) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(self.model, stream)
        stream.seek(0)
        return stream

    def _copies(self) -> None:
        outputs = self._state()[0]
        twin = copy.deepcopy(self.model)
        copies = {"deepcopy": twin}
        if self.saved_stock:
            copies["torch.save"] = torch.load(self._saved(), weights_only=False)
        model = self.model
        for name, self.model in copies.items():
            try:
                if not all(map(_same, self._state()[0], outputs)):
                    raise AssertionError(f"{name} computes something else")
            finally:
                self.model = model

    def _unswap(self) -> None:
        onepass.unswap(self.model)

    def _anew(self, report) -> None:
        with onepass.swapped(self.model) as again:
            if len(again.swapped) != len(report.swapped):
                raise AssertionError(
                    f"{len(again.swapped)} swapped, at first {len(report.swapped)}"
                )

    def _times(self, report) -> None:
        """Training steps in turns, in seconds of this thread; classes alone go back and forth."""
        times: dict[str, list[float]] = {"stock": [], "swapped": []}
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.train()
        for turn in range(ROUNDS + 1):
            for variant in ("stock", "swapped", "swapped", "stock"):
                with contextlib.ExitStack() as stack:
                    if variant == "stock":
                        stack.enter_context(as_stock(self.model, changes_of(report)))
                    start = time.thread_time()
                    self._loss().backward()
                    times[variant].append(time.thread_time() - start)
                self.model.zero_grad(set_to_none=True)
            if turn == 0:
                times = {name: [] for name in times}
        self.model.eval().load_state_dict(state)
        self.row["ms"] = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def _same(a, b) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if torch.is_tensor(a) else a == b


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _text(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "onepass" in f.filename] or frames
    where = f"{_short(ours[-1].filename.replace('/', '.').removesuffix('.py'))}:{ours[-1].lineno}"
    return (
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        + f" ({where})"
    )
