"""Monitoring of the experts: load, dropped share and loss as events, and a picture of the load over time.

    writer.write_events(moe_events(model, samples))          # the triples of dsx_monitor, and of DeepSpeed's monitors

    history = LoadHistory()
    history.record(model, step)                              # once per step
    history.write_svg("load.svg")

All values are those of the last forward of each layer on this rank; `all_ranks=True` sums over the data-parallel ranks.
Labels: Train/MoE/{layer}/load_{e}, where 1 is an even load; /max_load, /dropped_share, /l_aux.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path

import dsx_comm
import torch
from torch import nn

from .errors import MoEConfigError
from .groups import data_ranks
from .huggingface import ListedExpertBlock, PackedExpertShard
from .layer import MoE
from .stats import LayerStats

Event = tuple[str, float, int]


def layer_stats(model: nn.Module, *, all_ranks: bool = False) -> dict[str, LayerStats]:
    """The statistics of every layer that has run, by name.

    Args:
        model: with `MoE` layers, or converted by `apply_expert_parallel`.
        all_ranks: sum the counts of all data-parallel ranks, and take the mean of their losses (collective; every rank
            must have run every layer).
    """
    found: dict[str, LayerStats] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE | PackedExpertShard | ListedExpertBlock) and module.stats is not None:
            found[name or "model"] = module.stats
    if not all_ranks or not found or not dsx_comm.is_initialized():
        return found
    where = data_ranks(model)
    if where.size == 1:
        return found
    parts = [_to_vector(stats) for stats in found.values()]
    total = torch.cat(parts)
    dsx_comm.all_reduce(total, group=where.group)
    sums = total.split([part.numel() for part in parts])
    return {name: _from_vector(stats, part, where.size) for (name, stats), part in zip(found.items(), sums)}


def moe_events(model: nn.Module, samples: int, *, all_ranks: bool = False) -> list[Event]:
    """Events (label, value, samples) of the last forward of every layer.

    `samples` is the number of samples so far, the x-axis of monitors. `all_ranks` is as for `layer_stats`.
    """
    events: list[Event] = []
    for name, stats in layer_stats(model, all_ranks=all_ranks).items():
        load = stats.load.tolist()
        label = f"Train/MoE/{name}"
        events += [(f"{label}/load_{e}", value, samples) for e, value in enumerate(load)]
        events.append((f"{label}/max_load", max(load), samples))
        events.append((f"{label}/dropped_share", stats.dropped_share, samples))
        if stats.l_aux is not None:
            events.append((f"{label}/l_aux", float(stats.l_aux), samples))
    return events


@dataclass(frozen=True)
class _Record:
    step: int
    load: list[float]
    dropped: float


class LoadHistory:
    """The load of every layer's experts over the steps of a run.

    Args:
        most: largest number of records per layer. When it is exceeded, every second record is dropped, and from then on
            only every second (fourth, ...) call is recorded. So the records always cover the whole run.

    Raises:
        MoEConfigError: `most` is below 2.
    """

    def __init__(self, most: int = 512) -> None:
        if most < 2:
            raise MoEConfigError(f"most: got {most}, expected at least 2")
        self.most = most
        self.records: dict[str, list[_Record]] = {}
        self._every, self._calls = 1, 0

    def record(self, model: nn.Module, step: int, *, all_ranks: bool = False) -> None:
        """Record the last forward of every layer. `all_ranks` is as for `layer_stats`."""
        self._calls += 1
        if (self._calls - 1) % self._every:
            return
        for name, stats in layer_stats(model, all_ranks=all_ranks).items():
            self.records.setdefault(name, []).append(_Record(step, stats.load.tolist(), stats.dropped_share))
        if any(len(kept) > self.most for kept in self.records.values()):
            self._every *= 2
            self.records = {name: kept[::2] for name, kept in self.records.items()}

    def write_svg(self, path: str | PathLike[str]) -> None:
        """Write `svg()` to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def svg(self) -> str:
        """A picture as SVG text.

        Each layer is a band with a row per expert and a column per record. A line below it shows the dropped share.
        """
        top, parts = 28, []
        for name, kept in self.records.items():
            band, height = _band(name, kept, top)
            parts.append(band)
            top += height
        legend = _legend(top)
        size = f'width="{_WIDTH + 150}" height="{top + 40}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n<text x="10" y="16" font-size="13">Load of experts '
            f"(1 is even)</text>\n{''.join(parts)}{legend}</svg>\n"
        )


_WIDTH, _LEFT, _ROW, _LINE = 640, 60, 12, 36


def _band(name: str, kept: list[_Record], top: int) -> tuple[str, int]:
    experts = len(kept[0].load)
    wide = _WIDTH / len(kept)
    y = top + 16
    lines = [f'<text x="10" y="{top + 10}">{escape(name)}</text>\n']
    for e in range(experts):
        lines.append(f'<text x="{_LEFT - 6}" y="{y + e * _ROW + 10}" text-anchor="end" fill="#666">{e}</text>\n')
        for i, record in enumerate(kept):
            title = f"<title>step {record.step}, expert {e}: {record.load[e]:.2f}</title>"
            lines.append(
                f'<rect x="{_LEFT + i * wide:.2f}" y="{y + e * _ROW}" width="{wide + 0.3:.2f}" height="{_ROW - 1}" '
                f'fill="{_colour(record.load[e])}">{title}</rect>\n'
            )
    base = y + experts * _ROW + _LINE - 4
    points = " ".join(
        f"{_LEFT + (i + 0.5) * wide:.2f},{base - record.dropped * (_LINE - 8):.2f}" for i, record in enumerate(kept)
    )
    lines.append(f'<line x1="{_LEFT}" y1="{base}" x2="{_LEFT + _WIDTH}" y2="{base}" stroke="#ccc"/>\n')
    lines.append(f'<polyline points="{points}" fill="none" stroke="#b00020" stroke-width="1.5"/>\n')
    last = kept[-1]
    lines.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{base}" fill="#b00020">dropped {last.dropped:.1%}</text>\n')
    lines.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 10}">step {kept[0].step} to {last.step}</text>\n')
    lines.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 24}">largest load {max(last.load):.2f}</text>\n')
    return "".join(lines), 16 + experts * _ROW + _LINE + 12


def _colour(load: float) -> str:
    """White for an even load, blue below it, orange above it. The colours are strongest at 0 and from 2 on."""
    distance = min(abs(load - 1.0), 1.0)
    end = (33, 102, 172) if load < 1 else (217, 95, 14)
    return "#" + "".join(f"{round(255 + (c - 255) * distance):02x}" for c in end)


def _legend(top: int) -> str:
    boxes = []
    for i, load in enumerate((0.0, 0.5, 1.0, 1.5, 2.0)):
        x = _LEFT + i * 60
        boxes.append(f'<rect x="{x}" y="{top}" width="14" height="14" stroke="#999" fill="{_colour(load)}"/>\n')
        boxes.append(f'<text x="{x + 18}" y="{top + 11}">{load:g}</text>\n')
    return "".join(boxes)


def _to_vector(stats: LayerStats) -> torch.Tensor:
    loss = torch.zeros(1, dtype=torch.float64, device="cpu") if stats.l_aux is None else stats.l_aux.double().view(1)
    device = stats.requested.device
    return torch.cat([stats.requested.double(), stats.kept.double(), loss.to(device)])


def _from_vector(stats: LayerStats, total: torch.Tensor, ranks: int) -> LayerStats:
    experts = stats.requested.numel()
    loss = None if stats.l_aux is None else (total[-1] / ranks).to(stats.l_aux.dtype)
    return LayerStats(total[:experts].long(), total[experts : 2 * experts].long(), loss)
