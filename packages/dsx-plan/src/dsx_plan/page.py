"""A plan as one HTML page: verdict, memory over time, timeline, tables. Nothing is loaded from elsewhere, and no script
runs.

Shapes are drawn in SVG that is stretched to the width of the page; words stand beside them as HTML, so that they stay
readable on a narrow screen.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from dsx_monitor.picture import Bar, Lane, step_picture

from .plans import Plan
from .text import (
    _PARTS,
    STAGE_HEAD,
    bytes_text,
    count_text,
    layout_text,
    saving_text,
    seconds_text,
    stage_row,
    verdict,
)

__all__ = ["plan_page", "plan_picture"]

_STYLE = """
:root{--ground:#fff;--ink:#1c2430;--soft:#5a6675;--line:#d5dbe3;--a:#2563a8;--b:#c2571a;--c:#3a7d44;--d:#8a5fb0;
--bad:#b3261e;--good:#2e7d32}
@media(prefers-color-scheme:dark){:root{--ground:#12161c;--ink:#e4e9f0;--soft:#9aa7b6;--line:#2e3743;--a:#6ea8e6;
--b:#eb9560;--c:#7bc486;--d:#b995dd;--bad:#f2837b;--good:#81c784}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;line-height:1.3}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.verdict{font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:flex;flex-wrap:wrap;gap:.75rem}.tile{flex:1 1 9rem;border:1px solid var(--line);border-radius:.4rem;
padding:.5rem .75rem}.tile b{display:block;font-size:1.25rem}.tile span{color:var(--soft);font-size:.85rem}
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .5rem;border-bottom:1px solid var(--line);text-align:left;
font-weight:400}td:last-child{text-align:right;white-space:nowrap}
svg{display:block;width:100%;background:color-mix(in srgb,var(--line) 30%,transparent)}
.axis{display:flex;justify-content:space-between;color:var(--soft);font-size:.8rem}
.lane{margin-top:.5rem;font-size:.85rem;color:var(--soft)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin:0 .3em 0 .8em}
.wide{overflow-x:auto}
pre{overflow-x:auto;border:1px solid var(--line);border-radius:.4rem;padding:.5rem;font-size:.85rem}
"""
_COLOURS = {
    "forward": "a", "backward": "b", "step": "c", "build": "d", "communication": "b", "copies": "c", "waiting": "d",
}  # fmt: skip
_LANES = (
    ("compute", "Computation"), ("communication", "Links between ranks"), ("copies", "Copies between tiers"),
    ("waiting", "The computation waits"),
)  # fmt: skip


def plan_page(plan: Plan) -> str:
    """The page as text."""
    title = f"Plan of {plan.model} on {plan.world_size} rank(s)"
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>"
    )
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(layout_text(plan))}; {html.escape(plan.machine['name'])}</p>",
        f'<p class="verdict {"good" if plan.fits else "bad"}">{html.escape(verdict(plan))}</p>',
        _tiles(plan),
        _changes(plan),
        "".join(f"<p>{html.escape(saving_text(plan, change))}</p>" for change in plan.without),
        _pipeline(plan),
        _memory(plan),
        _timeline(plan),
        _stack(plan),
        _table(
            "Model state of a rank",
            ((f"{k}, {t}", bytes_text(n)) for k, tiers in plan.bytes.items() for t, n in tiers.items() if n),
        ),
        _table("Sent by a rank in a step", _sizes(plan.traffic)),
        _table("Messages", ((f"{op} x {n}", bytes_text(sent)) for op, (n, sent) in plan.messages.items())),
        _table(
            "What a step is made of",
            ((_PARTS.get(name, name), seconds_text(value)) for name, value in plan.parts.items() if value),
        ),
        "".join(f"<p>{html.escape(note)}</p>" for note in plan.notes),
        f"<h2>Configuration</h2><pre>{html.escape(json.dumps(plan.config, indent=2))}</pre>",
        "</body></html>",
    ]
    return head + "".join(body)


def plan_picture(plan: Plan, title: str | None = None) -> str:
    """The plan's memory and its step as one SVG file, in the form in which `dsx report --picture` draws a run."""
    state = {kind: nbytes for kind, nbytes in plan.state_bytes().items() if "buffers" not in kind}
    bars = [Bar("model state", state), Bar("at the peak", plan.peak_parts)]
    bars += [Bar(f"phase {name}", parts) for name, parts in plan.phases.items()]
    return step_picture(title or f"A planned step: {plan.model}, {layout_text(plan)}", bars, _lanes(plan))


def _lanes(plan: Plan) -> list[Lane]:
    """Of a pipeline what each rank computes, otherwise what the planned rank does, lane by lane."""
    found = plan.pipeline
    if found is not None:
        spans = [(place, _ACTIONS[text.lstrip("0123456789")[0]][0].split()[0], text, start, end)
                 for place, text, start, end in found.timeline]  # fmt: skip
        return [
            Lane(f"rank {stage.rank}", [span[1:] for span in spans if span[0] == place])
            for place, stage in enumerate(found.ranks)
        ]
    kinds = {"compute": "step", "communication": "other", "copies": "other", "waiting": "waiting"}
    lanes: dict[str, list[tuple[str, str, float, float]]] = {}
    for lane, name, start, end in plan.timeline:
        kind, title = _MESSAGES.get(name.split()[0], (kinds[lane], _PICTURED[lane]))
        if lane == "compute" and name in ("forward", "backward", "step"):
            kind = name
        lanes.setdefault(title, []).append((kind, name, start, end))
    order = [*_PICTURED.values(), *(title for _, title in _MESSAGES.values())]
    return [Lane(title, lanes[title]) for title in sorted(lanes, key=order.index)]


_PICTURED = {"compute": "compute", "communication": "messages", "copies": "copies", "waiting": "compute waits"}
_MESSAGES = {
    "all_gather": ("gather", "all-gather"), "reduce_scatter": ("reduce", "reduce-scatter"),
    "all_reduce": ("reduce", "all-reduce"),
}  # fmt: skip


def _tiles(plan: Plan) -> str:
    tiles = (
        ("peak of the device", bytes_text(plan.peak_bytes)),
        ("step", seconds_text(plan.step_seconds)),
        ("tokens per second", count_text(plan.tokens_per_second)),
        ("MFU", f"{100 * plan.mfu:.1f} %"),
        ("communication waited for", seconds_text(plan.parts.get("exposed_communication", 0.0))),
    )
    cells = "".join(f'<div class="tile"><span>{name}</span><b>{html.escape(value)}</b></div>' for name, value in tiles)
    return f'<div class="tiles">{cells}</div>'


def _changes(plan: Plan) -> str:
    rows = (
        (change.what, f"{bytes_text(change.peak_bytes)}, {seconds_text(change.step_seconds)}")
        for change in plan.changes
    )
    return _table("What makes it fit, fastest first", rows)


_ACTIONS = {"F": ("forward", "a"), "B": ("backward", "b"), "I": ("backward of inputs", "b"),
            "W": ("backward of weights", "d")}  # fmt: skip


def _pipeline(plan: Plan) -> str:
    """The stages as a table, and what each rank does when."""
    found = plan.pipeline
    if found is None:
        return ""
    head = "".join(f"<th>{name}</th>" for name in STAGE_HEAD)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in stage_row(stage))}</tr>" for stage in found.ranks
    )
    length, height = found.seconds or 1.0, 24 * len(found.ranks)
    shapes, kinds = [], dict[str, str]()
    for place, action, start, end in found.timeline:
        name, colour = _ACTIONS[action.lstrip("0123456789")[0]]
        kinds[name] = colour
        shapes.append(
            f'<rect x="{1000 * start / length:.2f}" y="{24 * place + 2}" width="{1000 * (end - start) / length:.2f}"'
            f' height="20" fill="var(--{colour})" stroke="var(--ground)" vector-effect="non-scaling-stroke">'
            f"<title>{html.escape(action)}, {seconds_text(end - start)}</title></rect>"
        )
    return (
        f"<h2>Pipeline, {html.escape(found.schedule)}</h2><p>{found.micro_batches} micro-batches; the ranks wait"
        f" {100 * found.bubble_share:.1f} % of the time for each other</p>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
        f"<p>A line for each rank:{''.join(_key(name, colour) for name, colour in kinds.items())}</p>"
        f'<svg viewBox="0 0 1000 {height}" height="{height}" preserveAspectRatio="none" role="img"'
        f' aria-label="schedule of the pipeline">{"".join(shapes)}</svg>{_axis(length)}'
    )


def _memory(plan: Plan) -> str:
    """The bytes on the device over the step, and its size where that is near. In a pipeline the time that a rank waits
    for others is left out.
    """
    if not plan.memory:
        return ""
    length = plan.memory[-1][0] if plan.pipeline is not None else max(plan.step_seconds, plan.memory[-1][0])
    length = length or 1.0
    room = plan.machine["memory_bytes"]
    most = max(plan.peak_bytes, 1)
    top = max(most, room) if room < 3 * most else most
    points = [f"{1000 * at / length:.1f},{200 - 200 * nbytes / top:.1f}" for at, nbytes in plan.memory]
    steps = " ".join(["0,200", *points, f"1000,{points[-1].split(',')[1]}", "1000,200"])
    limit = ""
    if room <= top:
        y = 200 - 200 * room / top
        limit = f'<line x1="0" x2="1000" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--bad)" stroke-width="2"/>'
    line = f"; the line is the device's {bytes_text(room)}" if limit else ""
    line += "" if plan.pipeline is None else f"; of rank {plan.rank}, without the time that it waits for others"
    return (
        f"<h2>Memory of the device over a step</h2><p>at most {bytes_text(most)}{line}</p>"
        '<svg viewBox="0 0 1000 200" height="180" preserveAspectRatio="none" role="img" aria-label="memory over time">'
        f'<polygon points="{steps}" fill="var(--a)" fill-opacity=".55"/>{limit}</svg>{_axis(length)}'
    )


def _stack(plan: Plan) -> str:
    """All that the device holds at the peak, stacked by class, and the same as a table."""
    held = plan.held
    room = max(sum(held.values()), plan.machine["memory_bytes"] if plan.beside else 0, 1)
    shapes, keys, place = [], [], 0.0
    for number, (name, nbytes) in enumerate(held.items()):
        width, shade = 1000 * nbytes / room, f"var(--{'abcd'[number % 4]})"
        opacity = 1.0 - 0.3 * (number // 4)
        shapes.append(
            f'<rect x="{place:.2f}" y="0" width="{width:.2f}" height="20" fill="{shade}" fill-opacity="{opacity:.1f}"'
            f' stroke="var(--ground)" vector-effect="non-scaling-stroke"><title>{html.escape(name)},'
            f" {bytes_text(nbytes)}</title></rect>"
        )
        keys.append(f'<span class="key" style="background:{shade};opacity:{opacity:.1f}"></span>{html.escape(name)}')
        place += width
    return (
        f"<h2>Memory of the device at its peak</h2><p>of {bytes_text(room)}:{''.join(keys)}</p>"
        '<svg viewBox="0 0 1000 20" height="26" preserveAspectRatio="none" role="img" aria-label="memory by class">'
        f"{''.join(shapes)}</svg>{_rows(_sizes(held))}"
    )


def _timeline(plan: Plan) -> str:
    length = plan.step_seconds or 1.0
    whose = "" if plan.pipeline is None else f" of rank {plan.rank}"
    found = [f"<h2>Timeline of a step{whose}</h2><p>"]
    phases = dict.fromkeys(name for lane, name, _, _ in plan.timeline if lane == "compute")
    found += [_key(name, _COLOURS.get(name, "d")) for name in phases]
    found.append("</p>")
    for lane, title in _LANES:
        spans = [(name, start, end) for of, name, start, end in plan.timeline if of == lane]
        if not spans:
            continue
        shapes = "".join(
            f'<rect x="{1000 * start / length:.2f}" y="0" width="{max(0.4, 1000 * (end - start) / length):.2f}"'
            f' height="20" fill="var(--{_COLOURS.get(name) or _COLOURS.get(lane, "a")})"><title>{html.escape(name)},'
            f" {seconds_text(end - start)}</title></rect>"
            for name, start, end in spans
        )
        found.append(
            f'<div class="lane">{title}</div><svg viewBox="0 0 1000 20" height="26" preserveAspectRatio="none"'
            f' role="img" aria-label="{title}">{shapes}</svg>'
        )
    return "".join(found) + _axis(length)


def _key(name: str, colour: str) -> str:
    return f'<span class="key" style="background:var(--{colour})"></span>{html.escape(name)}'


def _axis(length: float) -> str:
    marks = "".join(f"<span>{seconds_text(length * part / 4) if part else '0'}</span>" for part in range(5))
    return f'<div class="axis">{marks}</div>'


def _sizes(parts: dict[str, int] | dict[str, float]) -> list[tuple[str, str]]:
    return [(name, bytes_text(size)) for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size]


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = _rows(rows)
    return f"<h2>{html.escape(title)}</h2>{cells}" if cells else ""


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells: Sequence[str] = [
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows
    ]
    return f"<table>{''.join(cells)}</table>" if cells else ""
