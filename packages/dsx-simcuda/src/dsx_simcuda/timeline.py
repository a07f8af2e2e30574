"""The reports of a process as files: JSON for programs, and one HTML page with a picture of the streams for people."""

from __future__ import annotations

import html
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import findings, frames, native
from .findings import HostSync, Report
from .operation import Operation

SHOWN_AT_MOST = 50  # reports with a picture
AROUND = 5  # operations shown before the earlier one and behind the later one
WIDTH, HEIGHT, LEFT, TOP = 104, 46, 190, 26
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c2430;
  background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem; border-top: 1px solid #d5dbe3;
  padding-top: 1.2rem }
.fix { background: #e9f5ec; padding: .4rem .8rem; border-left: 4px solid #2f8f4e }
.stacks { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
pre { font-size: 12.5px; background: #f4f6f9; padding: .6rem; overflow-x: auto; margin: .3rem 0 }
.users { font-weight: 700 } .picture { overflow-x: auto }
svg text { font: 11px system-ui, sans-serif; fill: #1c2430 } .note { color: #5b6675 }
.later { fill: #f6c3bd; stroke: #c0392b; stroke-width: 2 } .earlier { fill: #fbdfb1; stroke: #b9770e; stroke-width: 2 }
.work { fill: #dfe8f5; stroke: #8aa3c4 } .small { fill: #eef1f5; stroke: #b8c2cf }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top }
"""


def write(folder: str | os.PathLike[str]) -> Path:
    """Writes the reports and host waits of this process into the folder, as JSON and as an HTML page beside it.

    Returns the page. The files' names hold the rank (variable RANK, or 0) and the process id.
    """
    reports = findings.reports()
    target = Path(folder) / f"simcuda-rank{os.environ.get('RANK', '0')}-{os.getpid()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    waits = [{**sync._asdict(), "times": n} for sync, n in findings.host_syncs().most_common()]
    content = {
        "command": sys.argv,
        "rank": int(os.environ.get("RANK") or 0),
        "reports": [report.as_dict() for report in reports],
        "host_syncs": waits,
    }
    target.with_suffix(".json").write_text(json.dumps(content, indent=1))
    page = target.with_suffix(".html")
    page.write_text(_page(reports, native.read("sim_history"), waits))
    return page


# ---------------------------------------------------------------- the page
def _page(reports: list[Report], history: list[dict[str, Any]], waits: list[dict[str, Any]]) -> str:
    names = findings.stream_names()
    total = sum(w["times"] for w in waits)
    parts = [f"<h1>Simulated CUDA device: {len(reports)} reports, {total} waits of the host</h1>"]
    parts.append(f"<p class=note>{html.escape(' '.join(sys.argv))}, rank {os.environ.get('RANK', '0')}</p>")
    distinct: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        distinct.setdefault((report.kind, f"{_line(report.later)}|{_line(report.earlier)}"), []).append(report)
    for number, same in enumerate(list(distinct.values())[:SHOWN_AT_MOST], 1):
        parts.append(_section(number, same, history, names))
    if len(distinct) > SHOWN_AT_MOST:
        parts.append(f"<p>{len(distinct) - SHOWN_AT_MOST} more kinds of reports are in the JSON file.</p>")
    cells = [(w["times"], *(html.escape(w[key]) for key in HostSync._fields)) for w in waits[:200]]
    rows = "".join(f"<tr><td>{'<td>'.join(map(str, cell))}" for cell in cells)
    parts.append(f"<h2>Waits of the host</h2><table><tr><th>times<th>what<th>where<th>thread{rows}</table>")
    return f"<!doctype html><meta charset=utf-8><title>dsx-simcuda</title><style>{STYLE}</style>{''.join(parts)}"


def _line(operation: Operation | None) -> str:
    return operation.where if operation else ""


def _section(number: int, same: list[Report], history: list[dict[str, Any]], names: dict[int, str]) -> str:
    report = same[0]
    times = f" ({len(same)} times)" if len(same) > 1 else ""
    parts = [f"<h2>{number}. {html.escape(report.kind)}{times}</h2><p>{html.escape(report.text)}</p>"]
    if report.tensor:
        parts.append(f"<p class=note>Memory: {html.escape(report.tensor)}</p>")
    if report.fix:
        parts.append(f"<p class=fix>Fix: {html.escape(report.fix)}</p>")
    if report.later and report.earlier:
        parts.append(f"<div class=picture>{picture(report, history, names)}</div>")
    shown = [("Earlier", report.earlier), ("Later", report.later)]
    parts.append("<div class=stacks>" + "".join(_stack(title, op) for title, op in shown if op) + "</div>")
    return "".join(parts)


def _stack(title: str, operation: Operation) -> str:
    lines = []
    for frame in frames.users_first(operation.stack):
        text = html.escape(str(frame))
        lines.append(f"<span class=users>{text}</span>" if frame.is_users else text)
    node = f" (backward: {html.escape(operation.backward)}, the forward's lines)" if operation.backward else ""
    on = f" on {html.escape(operation.stream)}" if operation.stream else ""
    return f"<div><b>{title}</b>: {html.escape(operation.name)}{on}{node}<pre>{chr(10).join(lines)}</pre></div>"


# ---------------------------------------------------------------- the picture
def _window(report: Report, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches to show: around the two, on their streams or with an event between shown streams."""
    numbers = [number for number in _numbers(report) if number]
    if not numbers:
        return []
    first, last = min(numbers), max(numbers)
    near = [launch for launch in history if first - AROUND <= launch["id"] <= last + AROUND]
    if len(near) > 60:
        marked = {first, last}
        streams = {launch["stream"] for launch in near if launch["id"] in marked}
        between = [x for x in near if x["stream"] in streams and (x["kind"] in ("wait", "record") or x["id"] in marked)]
        near = near[:15] + [x for x in between if x not in near[:15] and x not in near[-15:]][-30:] + near[-15:]
    return near


def picture(report: Report, history: list[dict[str, Any]], names: dict[int, str]) -> str:
    """The streams as rows and the launches in their order as boxes, with the report's two operations marked (SVG)."""
    shown = _window(report, history)
    if not shown:
        return "<p class=note>The launches are no longer in the history.</p>"
    rows = {stream: row for row, stream in enumerate(sorted({launch["stream"] for launch in shown}))}
    place = {}  # (stream, tick) of a launch: the middle of its box
    boxes = []
    for column, launch in enumerate(shown):
        x, y = LEFT + column * WIDTH, TOP + rows[launch["stream"]] * HEIGHT
        place[launch["stream"], launch["tick"]] = (x + WIDTH / 2 - 4, y + 14)
        boxes.append(_box(report, launch, x, y))
    arrows = []
    for launch in shown:
        start = place.get((launch["other_stream"], launch["other_tick"]))
        if launch["kind"] == "wait" and start:
            arrows.append(_arrow(start, place[launch["stream"], launch["tick"]], "#4c7a5b", ""))
    marked = [place[x["stream"], x["tick"]] for x in shown if x["id"] in _numbers(report)]
    if len(marked) == 2:
        arrows.append(_arrow(marked[0], marked[1], "#c0392b", "6 4"))
    width, height = LEFT + len(shown) * WIDTH + 10, TOP + len(rows) * HEIGHT + 10
    labels = "".join(
        f"<text x=4 y={TOP + row * HEIGHT + 18}><title>{html.escape(names[stream])}</title>"
        f"{html.escape(_short(names[stream], 30))}</text>"
        f'<line x1={LEFT - 6} x2={width} y1={TOP + row * HEIGHT + 14} y2={TOP + row * HEIGHT + 14} stroke="#e3e8ee"/>'
        for stream, row in rows.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width={width} height={height} role=img>'
        f"<text x={LEFT} y=14 class=note>order of launch &#8594; (dashed: nothing orders these two)</text>"
        f"{labels}{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def _numbers(report: Report) -> set[int]:
    return {operation.number for operation in (report.later, report.earlier) if operation}


def _box(report: Report, launch: dict[str, Any], x: float, y: float) -> str:
    small = launch["kind"] in ("wait", "record")
    kind = "small" if small else "work"
    if report.later and launch["id"] == report.later.number:
        kind = "later"
    elif report.earlier and launch["id"] == report.earlier.number:
        kind = "earlier"
    stack = findings.stack_of(launch["place"]["stack"] or launch["place"]["forward"])
    title = html.escape(f"{launch['name']} at {frames.where(stack)}")
    return (
        f"<g><title>{title}</title><rect x={x} y={y} width={WIDTH - 8} height=28 rx=4 class={kind} />"
        f"<text x={x + 5} y={y + 18}>{html.escape(_short(launch['name'].removeprefix('aten::'), 16))}</text></g>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: str, dashes: str) -> str:
    (x1, y1), (x2, y2) = start, end
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    middle = (x1 + x2) / 2
    bend = 24 if y1 == y2 else 0
    path = f"M{x1},{y1} C{middle},{y1 + bend} {middle},{y2 + bend} {x2},{y2}"
    return f'<path d="{path}" fill=none stroke="{colour}" stroke-width=2{dash} />'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"
