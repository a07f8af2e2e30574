"""A report of what was compressed and by how much: a table, JSON, and a picture (SVG) of sparsity and error per
layer.
"""

from __future__ import annotations

import html
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .apply import techniques_of
from .export import Exported, error_facts
from .layers import kind_of
from .packing import BITS
from .scheduler import value_before
from .techniques import WeightQuantizer

__all__ = ["CompressionReport", "ReportRow", "compression_report", "report_of_file"]


@dataclass(frozen=True)
class ReportRow:
    """One tensor.

    Attributes:
        name: name of the tensor.
        methods: the methods on it. "METHOD from step N" is one that is not switched on yet.
        bits: bits of the weight now; 0: it is not quantised.
        density: fraction of values that are not zero.
        error: |w - used w| / |w|.
        bytes_before: bytes of the dense tensor in its dtype.
        bytes_after: bytes of codes and scales if it is quantised, else `bytes_before`: zeros are stored like other
            values.
    """

    name: str
    methods: list[str]
    bits: int
    density: float
    error: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class CompressionReport:
    """Rows of all compressed tensors.

    Attributes:
        rows: one row for each compressed tensor.
        untouched: names of the layers that could be compressed and are not.
        other_bytes: bytes of all other tensors.
    """

    rows: list[ReportRow]
    untouched: list[str]
    other_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes of the dense model divided by bytes of the compressed one."""
        after = sum(row.bytes_after for row in self.rows) + self.other_bytes
        return (sum(row.bytes_before for row in self.rows) + self.other_bytes) / max(1, after)

    def text(self) -> str:
        """The report as a table."""
        width = max([len(row.name) for row in self.rows] + [6])
        lines = [f"{'tensor':<{width}}  bits  density  rel.error  KiB before   after  methods"]
        lines += [
            f"{row.name:<{width}}  {row.bits or '-':>4}  {row.density:7.3f}  {row.error:9.2e}  "
            f"{row.bytes_before / 1024:10.1f} {row.bytes_after / 1024:7.1f}  {', '.join(row.methods)}"
            for row in self.rows
        ]
        lines.append(f"{len(self.rows)} tensors compressed; the whole is {self.ratio:.2f}x smaller")
        if self.untouched:
            lines.append(f"layers not compressed: {', '.join(self.untouched)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON: the attributes and `ratio`."""
        return json.dumps({**asdict(self), "ratio": self.ratio}, indent=2)

    def write_svg(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar of sparsity and a bar of error for every tensor."""
        Path(path).write_text(_svg(self), encoding="utf-8")


def compression_report(model: nn.Module) -> CompressionReport:
    """The report of a model with techniques, with the values that its layers use now.

    A weight with NaN has the error NaN.
    """
    grouped: dict[str, list[Any]] = {}
    for placed in techniques_of(model):
        if placed.tensor:
            grouped.setdefault(f"{placed.name}.{placed.tensor}", []).append(placed)
    inputs = {placed.name: placed.technique for placed in techniques_of(model) if not placed.tensor}
    rows = [_row(name, placed, inputs.get(placed[0].name)) for name, placed in grouped.items()]
    touched = {placed.name for placed in techniques_of(model)}
    untouched = [name for name, module in model.named_modules() if name and kind_of(module) and name not in touched]
    total = sum(p.numel() * p.element_size() for p in model.parameters() if not _is_score(model, p))
    return CompressionReport(rows, untouched, max(0, total - sum(row.bytes_before for row in rows)))


def _is_score(model: nn.Module, parameter: torch.Tensor) -> bool:
    return any(
        parameter is own for placed in techniques_of(model) for own in placed.technique.parameters(recurse=False)
    )


def _row(name: str, placed: list[Any], inputs: Any) -> ReportRow:
    original = value_before(placed[0])
    with torch.no_grad():
        used = getattr(placed[0].layer, placed[0].tensor).detach()
    facts = error_facts(original, used)
    methods = [_method(p.technique) for p in placed]
    if inputs is not None and placed[0].tensor == "weight":
        methods.append(f"{_method(inputs)} ({inputs.bits} bits)")
    quantizer = next(
        (p.technique for p in placed if isinstance(p.technique, WeightQuantizer) and p.technique.enabled), None
    )
    before = original.numel() * original.element_size()
    bits, after = 0, before
    if quantizer is not None:
        bits = quantizer.schedule.bits
        stored = next(size for size in BITS.values() if size >= bits)
        scales = quantizer.groups * 4 * (2 if quantizer.kind == "asymmetric" else 1)
        after = -(-original.numel() * stored // 8) + scales
    return ReportRow(name, methods, bits, facts["density"], facts["error"], before, after)


def _method(technique: Any) -> str:
    return technique.method if technique.enabled else f"{technique.method} from step {technique.offset}"


def report_of_file(found: Exported) -> CompressionReport:
    """The report of a file that `export_model` wrote."""
    rows = []
    for name, packed in found.packed.items():
        facts = found.facts[name]
        count = packed.rows * packed.columns
        rows.append(ReportRow(name, [packed.code], BITS[packed.code], facts["density"], facts["error"],
                              count * torch.empty(0, dtype=packed.dtype).element_size(), packed.bytes))  # fmt: skip
    rows += [
        ReportRow(name, [f"dense: {reason}"], 0, float((found.dense[name] != 0).double().mean()), 0.0, size, size)
        for name, reason in found.left_dense.items()
        for size in [found.dense[name].numel() * found.dense[name].element_size()]
    ]
    other = sum(t.numel() * t.element_size() for name, t in found.dense.items() if name not in found.left_dense)
    return CompressionReport(rows, [], other)


# - The picture

_BAR, _LINE, _LEFT, _WIDTH = 9, 24, 300, 760


def _svg(report: CompressionReport) -> str:
    rows = report.rows
    worst = max([row.error for row in rows if row.error == row.error] + [1e-12])
    room = _WIDTH - _LEFT - 80
    height = _LINE * (len(rows) + 2)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
            ' font-size="11">'
        ),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="16" font-weight="bold">{len(rows)} tensors, {report.ratio:.2f}x smaller</text>',
        (
            f'<rect x="{_LEFT}" y="8" width="10" height="8" fill="#3b6ea5"/><text x="{_LEFT + 14}" y="16">sparsity'
            " (full: 1)</text>"
        ),
        (
            f'<rect x="{_LEFT + 150}" y="8" width="10" height="8" fill="#c8553d"/>'
            f'<text x="{_LEFT + 164}" y="16">relative error (full: {worst:.2g})</text>'
        ),
    ]
    for place, row in enumerate(rows):
        top = _LINE * (place + 1)
        error = row.error / worst if row.error == row.error else 1.0
        bits = f"{row.bits} bit" if row.bits else ""
        parts += [
            f'<text x="8" y="{top + 14}">{html.escape(row.name)}</text>',
            (
                f'<rect x="{_LEFT}" y="{top + 2}" width="{max(0.5, room * (1 - row.density)):.1f}" height="{_BAR}"'
                ' fill="#3b6ea5"/>'
            ),
            (
                f'<rect x="{_LEFT}" y="{top + 3 + _BAR}" width="{max(0.5, room * error):.1f}" height="{_BAR}"'
                ' fill="#c8553d"/>'
            ),
            f'<text x="{_WIDTH - 60}" y="{top + 14}">{bits}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
