"""The report of `quantize`."""

from __future__ import annotations

import contextlib
import html

import torch
from torch import Tensor, nn

from onepass import _batch, numerics
from onepass.nn.quantized_linear import QuantizedLinear
from onepass.reference.products import quantize_rows
from onepass.swapping.texts import groups_of, html_list, html_row, listed, readable, rows, table
from onepass.swapping.walk import Found

_ROWS = 256  # of a layer's input that are verified
# Of the numerics rule: right results of a few numbers are above one bound now and then, in one of
# fifty small layers, at most 1.7 times in 1,800 of them. A wrong one is off by thousands.
_BOUNDS = 3.0
_SKIPPED = ("name", "count", "type", "reason")


class QuantizationReport:
    """The result of `onepass.quantize`; `print` shows it as a table. It refers to the model.

    Attributes:
        quantized: dicts with name, from, weights, group_size, bytes_before, bytes_after, error (of
            the weight, as a part of its norm) and, with a batch, output_error (likewise of the
            layer's output).
        skipped: linear layers that were left as they are; dicts with name, type, reason.
        notes: sentences.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
        >>> report = onepass.quantize(model, "int8")
        >>> report.summary()
        'onepass.quantize: 1 to int8, 64.0 KiB to 17.0 KiB (3.8 times smaller), 1 skipped'
        >>> report.verify(torch.randn(4, 64))
        verify: 1 quantised layer is right
    """

    def __init__(self, model: nn.Module, weights: str):
        self.weights = weights
        self.quantized: list[dict] = []
        self.skipped: list[dict[str, str]] = []
        self.notes: list[str] = []
        self._model = model

    def add(self, item: Found, layer: QuantizedLinear, output_error: float | None) -> None:
        entry = {
            "name": item.names[0],
            "from": type(item.module).__name__,
            "weights": layer.weights,
            "group_size": layer.group_size,
            "bytes_before": item.module.weight.nbytes,
            "bytes_after": sum(buffer.nbytes for buffer in layer.buffers()),
            "error": layer.error,
        }
        if output_error is not None:
            entry["output_error"] = output_error
        self.quantized.append(entry)

    def skip(self, item: Found, reason: str) -> None:
        entry = {"name": item.names[0], "type": type(item.module).__name__, "reason": reason}
        self.skipped.append(entry)

    def to_dict(self) -> dict[str, list]:
        """The lists as plain JSON-able data."""
        return {
            "quantized": [dict(entry) for entry in self.quantized],
            "skipped": [dict(entry) for entry in self.skipped],
            "notes": list(self.notes),
        }

    def verify(self, *batch, **named) -> KernelCheck:
        """Runs the model on a batch, in its own mode, and holds the output of each quantised layer
        to the layer's definition with the dequantised weight, by three times the bound of
        `onepass.numerics`.

        Args:
            batch: the model's positional arguments, or one batch: a mapping is given as keywords, a
                tuple or list item by item.
            named: the model's arguments by keyword.

        Returns:
            KernelCheck: prints as one line and is true if all layers that ran are right.
        """
        model = self._model
        if model is None:
            raise RuntimeError("verify: the report must be the original, got a copy")
        found: dict[str, numerics.Comparison] = {}

        def observe(name):
            def hook(layer, args, named, output):
                result = _comparison(layer, *args, *named.values(), output)
                if name not in found or _is_right(found[name]):
                    found[name] = result

            return hook

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name, layer in model.named_modules():
                if isinstance(layer, QuantizedLinear):
                    handle = layer.register_forward_hook(observe(name), with_kwargs=True)
                    hooks.callback(handle.remove)
            if len(batch) == 1 and not named:
                _batch.call(model, batch[0])
            else:
                model(*batch, **named)
        return KernelCheck(found)

    def summary(self) -> str:
        """One line for a log."""
        before = sum(entry["bytes_before"] for entry in self.quantized)
        after = sum(entry["bytes_after"] for entry in self.quantized)
        parts = [f"onepass.quantize: {len(self.quantized)} to {self.weights}"]
        if before:
            parts += [
                f"{readable(before)} to {readable(after)} ({before / after:.1f} times smaller)"
            ]
        return ", ".join([*parts, f"{len(self.skipped)} skipped"])

    def __str__(self) -> str:
        lines = [self.summary()]
        for section, columns, found in self._sections():
            lines += ["", *table(section, columns, found)]
        return "\n".join(lines + listed(self.notes))

    __repr__ = __str__

    def _sections(self):
        if self.quantized:
            yield "quantized", *self._groups()
        if self.skipped:
            yield "skipped", _SKIPPED, rows(self.skipped, _SKIPPED)

    def _groups(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """One row for the layers whose names differ in numbers alone."""
        by_name = {entry["name"]: entry for entry in self.quantized}
        errors = ["error", *["output_error"] * any("output_error" in e for e in self.quantized)]
        found = []
        for group, names in groups_of(by_name).items():
            entries = [by_name[name] for name in names]
            before = sum(entry["bytes_before"] for entry in entries)
            after = sum(entry["bytes_after"] for entry in entries)
            spans = [
                _span([e[error] for e in entries if e.get(error) is not None]) for error in errors
            ]
            sizes = "/".join(str(size) for size in sorted({e["group_size"] for e in entries}))
            found.append(
                (group, str(len(entries)), sizes, readable(before), readable(after), *spans)
            )
        heads = [error.replace("_", " ") for error in errors]
        return ("name", "count", "group", "before", "after", *heads), found

    def _repr_html_(self) -> str:
        parts = [f"<b>{html.escape(self.summary())}</b>"]
        for section, columns, found in self._sections():
            head = html_row("th", columns, columns)
            body = "".join(html_row("td", columns, map(html.escape, row)) for row in found)
            parts.append(f"<table><caption>{section}</caption>{head}{body}</table>")
        return "\n".join([*parts, html_list(self.notes)] if self.notes else parts)

    def __getstate__(self) -> dict:
        """A copy of a report prints the same, but has no model to verify."""
        return {**vars(self), "_model": None}


class KernelCheck:
    """The result of `QuantizationReport.verify`.

    Attributes:
        layers: name to `onepass.numerics.Comparison`, of the layers that ran.
        ok: whether all are right; None if no layer ran.
    """

    def __init__(self, layers: dict[str, numerics.Comparison]):
        self.layers = layers

    @property
    def ok(self) -> bool | None:
        return all(map(_is_right, self.layers.values())) if self.layers else None

    def __bool__(self) -> bool:
        return self.ok is True

    def to_dict(self) -> dict:
        """Plain JSON-able data."""
        layers = {name: str(result) for name, result in self.layers.items()}
        return {"ok": self.ok, "layers": layers}

    def __str__(self) -> str:
        wrong = [
            f"{name}: {result}" for name, result in self.layers.items() if not _is_right(result)
        ]
        if not self.layers:
            return "verify: no quantised layer ran"
        if wrong:
            return f"verify: {len(wrong)} of {len(self.layers)} layers differ: {'; '.join(wrong)}"
        count = len(self.layers)
        return f"verify: {count} quantised layer{' is' if count == 1 else 's are'} right"

    __repr__ = __str__


def _is_right(result: numerics.Comparison) -> bool:
    return result.max_error <= _BOUNDS * result.bound and result.bias <= _BOUNDS * result.bias_bound


def _comparison(layer: QuantizedLinear, input, output) -> numerics.Comparison:
    """Comparison with the definition in float64, and with torch's product in the output's dtype."""
    input, output = (x.detach().reshape(-1, x.shape[-1])[:_ROWS] for x in (input, output))
    input = input.to(output.dtype)  # as autocast did
    weight = layer.dequantized(torch.float64)
    bias = None if layer.bias is None else layer.bias.detach()
    if layer.activations is not None:
        input = _quantized_rows(input.float(), layer.outlier_columns)
    wide = None if bias is None else bias.double()
    ref = nn.functional.linear(input.double(), weight, wide)
    base = nn.functional.linear(
        *(None if x is None else x.to(input.dtype) for x in (input, weight, bias))
    )
    return numerics.compare(output, ref, base.to(output.dtype))


def _quantized_rows(input: Tensor, outlier_columns: Tensor | None) -> Tensor:
    if outlier_columns is None:
        return quantize_rows(input)
    columns = outlier_columns.long()
    quantized = quantize_rows(input.index_fill(-1, columns, 0))
    return quantized.index_copy(-1, columns, input.index_select(-1, columns))


def _span(errors: list[float]) -> str:
    if not errors:
        return ""
    least, most = min(errors), max(errors)
    text = f"{least:.2%}"
    return text if f"{most:.2%}" == text else f"{text} to {most:.2%}"
