"""A picture of one step: bytes by class as bars, and what a rank does when as lanes, in one SVG file.

The planner draws what it expects and a report draws what a run has recorded, in the same form, so that both can lie
beside each other. Every shape has its figures as a title, which a browser shows under the pointer. Both palettes are in
the file; the reader's system chooses. Left out: interaction, which the trace for ui.perfetto.dev has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from .errors import ReportError
from .report.read import RunData, read_run
from .timeline import LANES, TRACE

__all__ = ["Bar", "Lane", "bytes_text", "run_picture", "step_picture"]


class Bar(NamedTuple):
    """A stacked bar: its name, and bytes by class."""

    name: str
    parts: Mapping[str, float]


class Lane(NamedTuple):
    """A row of the timeline: its name, and (kind, text, start, end) of each span, in seconds."""

    name: str
    spans: Sequence[tuple[str, str, float, float]]


WIDTH, LEFT, RIGHT, ROW = 880, 150, 20, 34
_KEYS = 7  # beside each other
_PALETTE = {
    "forward": ("#2a78d6", "#62a4f0"), "backward": ("#1a9a6c", "#4cc795"), "step": ("#b36b00", "#e5a64a"),
    "gather": ("#8256c9", "#b493ec"), "reduce": ("#c2456b", "#ee8aa8"), "other": ("#0a7ea4", "#4fc3e8"),
    "waiting": ("#6b7280", "#a3aab5"),
}  # fmt: skip
_GENERATION = {"generator": ("#8a5a44", "#c99a80"), "cache": ("#5b7f1e", "#a5cf5a")}
"""In pictures with a generator only."""
_CLASSES = {
    "parameters": "forward", "master": "other", "gradients": "reduce", "states": "step", "buffers": "waiting",
    "activations": "backward", "workspace": "gather",
    "generator": "generator", "keys and values": "cache",
}  # fmt: skip
_SAME = {"params": "parameters", "masters": "master", "grads": "gradients", "optimizer": "states",
         "model buffers": "buffers", "inputs": "buffers"}  # fmt: skip
"""The names that engines and the planner give to classes of this picture."""
_PHASES = ("forward", "backward", "step")
_MESSAGES = ("gather", "reduce")
"""These are in the key where one lane has both."""
_STYLE = """<style>
text{{font:13px system-ui,sans-serif;fill:#222}} .axis{{stroke:#999}} .lane{{fill:#f1f3f5}}
{light}
@media (prefers-color-scheme: dark){{text{{fill:#e6e6e6}} .axis{{stroke:#777}} .lane{{fill:#2b2f33}}
{dark}
}}
</style>"""


def step_picture(title: str, bars: Sequence[Bar], lanes: Sequence[Lane]) -> str:
    """Draw a step; bars share one scale, lanes share one axis of time.

    Raises:
        ReportError: there is nothing to draw.
    """
    bars = [_merged(bar) for bar in bars if any(bar.parts.values())]
    lanes = [lane for lane in lanes if lane.spans]
    if not bars and not lanes:
        raise ReportError("step_picture: got neither bytes nor spans, expected one of them")
    body: list[str] = []
    y = 34
    if bars:
        y = _draw_bars(body, bars, y)
    if lanes:
        y = _draw_lanes(body, lanes, y)
    used = {_CLASSES[name] for bar in bars for name in bar.parts}
    palette = {**_PALETTE, **{name: colours for name, colours in _GENERATION.items() if name in used}}
    light, dark = ("\n".join(f".{k}{{fill:{colours[i]}}}" for k, colours in palette.items()) for i in (0, 1))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escape(title)}">',
        _STYLE.format(light=light, dark=dark),
        f'<text x="10" y="20" font-weight="600">{escape(title)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _merged(bar: Bar) -> Bar:
    """The bar with the names of classes that this file colours; what is left over counts as workspace."""
    parts = dict.fromkeys(_CLASSES, 0.0)
    for name, nbytes in bar.parts.items():
        known = _SAME.get(name, name)
        parts[known if known in parts else "workspace"] += nbytes
    return Bar(bar.name, {name: nbytes for name, nbytes in parts.items() if nbytes})


def _draw_bars(body: list[str], bars: Sequence[Bar], y: int) -> int:
    used = [name for name in _CLASSES if any(name in bar.parts for bar in bars)]
    for first in range(0, len(used), _KEYS):
        y = y + 20 if first else y
        _key(body, [(_CLASSES[name], name) for name in used[first : first + _KEYS]], y)
    most = max(sum(bar.parts.values()) for bar in bars)
    scale = (WIDTH - LEFT - RIGHT - 90) / most
    y += 22
    for bar in bars:
        x = float(LEFT)
        body.append(f'<text x="10" y="{y + 18}">{escape(bar.name)}</text>')
        for name, nbytes in bar.parts.items():
            place = f'x="{x:.1f}" y="{y}" width="{nbytes * scale:.1f}" height="{ROW - 8}"'
            said = f"{name}: {nbytes:.0f} bytes"
            body.append(f'<rect class="{_CLASSES[name]}" {place}><title>{said}</title></rect>')
            x += nbytes * scale
        body.append(f'<text x="{x + 8:.1f}" y="{y + 18}">{bytes_text(sum(bar.parts.values()))}</text>')
        y += ROW
    return y + 14


def _draw_lanes(body: list[str], lanes: Sequence[Lane], y: int) -> int:
    spans = [span for lane in lanes for span in lane.spans]
    first, length = min(span[2] for span in spans), max(span[3] for span in spans)
    length = length - first or 1.0
    scale = (WIDTH - LEFT - RIGHT) / length
    used = [kind for kind in _PHASES if any(span[0] == kind for span in spans)]
    used += [kind for kind in _MESSAGES if any({*_MESSAGES} <= {span[0] for span in lane.spans} for lane in lanes)]
    _key(body, [(kind, kind) for kind in used], y)
    y += 22 if used else 0
    for lane in lanes:
        body.append(f'<text x="10" y="{y + 18}">{escape(lane.name)}</text>')
        body.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 8}"/>')
        for kind, text, start, end in lane.spans:
            width = max(0.6, (end - start) * scale)
            place = f'x="{LEFT + (start - first) * scale:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}"'
            said = f"{escape(text)}, {1000 * (end - start):.3f} ms"
            body.append(f'<rect class="{kind}" {place}><title>{said}</title></rect>')
        y += ROW
    digits = 1 if length >= 0.01 else 2
    for part in range(5):
        x = LEFT + (WIDTH - LEFT - RIGHT) * part / 4
        anchor = "end" if part == 4 else "middle"
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 6}"/>')
        words = f"{1000 * length * part / 4:.{digits}f} ms"
        body.append(f'<text x="{x:.1f}" y="{y + 22}" text-anchor="{anchor}">{words}</text>')
    return y + 40


def _key(body: list[str], entries: Sequence[tuple[str, str]], y: int) -> None:
    for number, (kind, words) in enumerate(entries):
        x = LEFT + 102 * number
        body.append(f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12"/>')
        body.append(f'<text x="{x + 17}" y="{y + 11}">{escape(words)}</text>')


def bytes_text(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number above one."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def run_picture(run_dir: str | Path, title: str | None = None) -> str:
    """Draw a step of a run: the model's state of rank 0 as `memory_breakdown` counts it, and the trace of the section
    `timeline`, the last step that it has.

    Raises:
        ReportError: the run has recorded neither.
    """
    folder = Path(run_dir)
    data = read_run(folder)
    bars, lanes = _state(data), _lanes(folder)
    if not bars and not lanes:
        raise ReportError(
            f"run_picture: {folder} has neither bytes by class nor a trace; switch on 'memory_breakdown' (with"
            " 'jsonl') or 'timeline' in the configuration"
        )
    return step_picture(title or f"A recorded step: {data.meta.get('title') or folder.name}", bars, lanes)


def _state(data: RunData) -> list[Bar]:
    start = "Train/Memory/"
    found = {
        label[len(start) :]: pieces.runs[-1][1].values[-1]
        for label, pieces in data.curves.items()
        if label.startswith(start) and pieces.runs and pieces.runs[-1][1].values
    }
    state = {name: found[name] for name in ("params", "master", "grads", "optimizer") if found.get(name)}
    return [Bar("model state", state)] if state else []


def _lanes(folder: Path) -> list[Lane]:
    """The lanes of rank 0: of the last step, if several were recorded."""
    path = folder / TRACE / "rank00000.json"
    if not path.is_file():
        return []
    try:
        events = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
        spans = [(e["cat"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"run_picture: {path} is no trace of Timeline.write: {error!r}") from None
    ends = sorted(end for _, name, _, end in spans if name == "step")
    since = ends[-2] if len(ends) > 1 else float("-inf")
    kinds = {"gather": "gather", "reduce": "reduce", "wait": "waiting"}
    names = {"gather": "all-gather", "reduce": "reduce", "wait": "waits"}
    return [
        Lane(names.get(lane, lane), [
            (name if name in _PHASES else kinds.get(lane, "other"), name, start, end)
            for of, name, start, end in spans if of == lane and start >= since
        ])
        for lane in LANES
    ]  # fmt: skip
