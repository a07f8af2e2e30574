"""Writes run data as one HTML file, which contains the numbers as JSON, a style and a script."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from ..embedding import script_json
from ..straggler import PHASES
from .panels import Panel, panels_of
from .read import RunData, read_run

__all__ = ["write_report"]


def write_report(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run directory.

    Args:
        run_dir: a folder with files of `start_run`, of the `jsonl` or `csv_monitor` writer, and of `MemoryLog`.
        out: file to write; None: `report.html` in the run directory.

    Returns:
        The file written.

    Raises:
        ReportError: nothing in the folder can be drawn.
    """
    data = read_run(Path(run_dir))
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(data, panels_of(data), str(run_dir)), encoding="utf-8")
    return target


def _page(data: RunData, panels: list[Panel], run_dir: str) -> str:
    assets = files("dsx_monitor.report") / "assets"
    title = str(data.meta.get("title") or Path(run_dir).resolve().name)
    content = {
        "panels": [asdict(panel) for panel in panels],
        "starts": [{"step": s.get("step", 0), "ranks": s.get("world_size")} for s in data.meta.get("starts", [])],
    }
    replacements = {
        "@TITLE@": html.escape(title),
        "@SUBTITLE@": html.escape(_subtitle(data)),
        "@TILES@": _tiles(data, panels),
        "@TABLES@": _tables(data),
        "@STYLE@": (assets / "report.css").read_text(encoding="utf-8"),
        "@SCRIPT@": (assets / "report.js").read_text(encoding="utf-8"),
        "@DATA@": script_json(content),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    parts = page.split("@")
    return "".join(replacements.get(f"@{part}@", part) for part in parts)


def _subtitle(data: RunData) -> str:
    starts = data.meta.get("starts", [])
    if not starts:
        return ""
    began = datetime.fromtimestamp(starts[0]["time"], tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = []
    for size, same in groupby(s.get("world_size", 1) for s in starts):
        count = len(list(same))
        parts.append(f"{size} process{'es' if size != 1 else ''}{f' ({count} starts)' if count > 1 else ''}")
    return f"started {began} on {', then '.join(parts)}"


def _tiles(data: RunData, panels: list[Panel]) -> str:
    """A row of figures: the last value of each main curve, and facts of the run."""
    tiles: list[tuple[str, str, str]] = []
    for panel in panels:
        if panel.title not in ("Loss", "Bits per byte", "Throughput"):
            continue
        for series in panel.series:
            known = [y for y in series["y"] if y is not None]
            if known:
                middle = sorted(known)[len(known) // 2]
                speed = f"{panel.unit} at the end, median {_short(middle)}"
                note = speed if panel.title == "Throughput" else f"from {_short(known[0])}"
                tiles.append((f"{panel.title}, {series['name']}", _short(known[-1]), note))
    for name, value in data.meta.get("facts", {}).items():
        tiles.append((name, _short(value) if isinstance(value, (int, float)) else str(value), ""))
    return "".join(
        f'<div class="tile"><span>{html.escape(name)}</span><b{_kind(value)}>{html.escape(value)}</b>'
        f"<i>{html.escape(note)}</i></div>"
        for name, value, note in tiles
    )


def _kind(value: str) -> str:
    """The style of a tile's value: numbers are shown large, texts are not."""
    return "" if value[:1].isdigit() or value[:1] == "-" else ' class="text"'


def _short(value: float) -> str:
    """Three or four digits, thousands as k, M, G."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if size == 1e4 else size):.3g}{unit}"
    return f"{value:.4g}"


def _tables(data: RunData) -> str:
    tables = [("Environment", data.meta.get("environment", {})), ("Configuration", data.meta.get("config", {}))]
    if data.meta.get("starts"):
        tables.insert(0, ("Run", _starts(data.meta["starts"])))
    if data.flops:
        tables.insert(0, ("Flops profile", data.flops))
    if data.unreadable_lines:
        tables.append(("Remarks", {"lines that could not be read": data.unreadable_lines}))
    shown = "".join(_table(title, _flat(content)) for title, content in tables if content)
    return _pages(data.pages) + _ranks(data.stragglers) + shown


def _starts(starts: list[dict[str, Any]]) -> dict[str, str]:
    """Every start of the run, when and where it began, and its command."""
    rows: dict[str, str] = {}
    for number, start in enumerate(starts, 1):
        began = datetime.fromtimestamp(start.get("time", 0), tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        ranks = start.get("world_size", 1)
        name = (
            f"start {number}: {began}, {ranks} process{'es' if ranks != 1 else ''}, at {start.get('step', 0)} samples"
        )
        command = start.get("command")
        rows[name] = shlex.join(map(str, command)) if isinstance(command, list) else "not known"
    return rows


_ABOUT = {
    "flops.html": "where the operations and the time of a step go, module by module",
    "flops.json": "the same figures for programs",
    "trace.json": "what every rank did when; opens in ui.perfetto.dev or chrome://tracing",
}


def _pages(names: list[str]) -> str:
    if not names:
        return ""
    rows = "".join(
        f'<tr><th><a href="{html.escape(name)}">{html.escape(name)}</a></th><td>{html.escape(_ABOUT[name])}</td></tr>'
        for name in names
    )
    return f"<section><h2>Further files of this run</h2><table>{rows}</table></section>"


def _ranks(comparisons: list[dict[str, Any]]) -> str:
    """The last comparison of the ranks' own work, and all ranks that were reported as stragglers."""
    if not comparisons:
        return ""
    last = comparisons[-1]
    head = "".join(f"<th>{name}</th>" for name in ("rank", *PHASES, "waiting"))
    rows = "".join(
        f"<tr><td>{rank}</td>{''.join(f'<td>{value:.1f}</td>' for value in (*own, waited))}</tr>"
        for rank, (own, waited) in enumerate(zip(last["own"], last["waiting"]))
    )
    found = [f"at {c['step']} samples: {text}" for c in comparisons for text in c["found"]][-8:]
    notes = "".join(f"<p>{html.escape(text)}</p>" for text in found) or "<p>No rank held the others up.</p>"
    return (
        "<section><h2>Own work of each rank, milliseconds per step</h2>"
        f'<table class="figures"><tr>{head}</tr>{rows}</table>{notes}</section>'
    )


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{_breakable(key)}</th><td>{_breakable(value)}</td></tr>" for key, value in rows)
    return f"<section><h2>{html.escape(title)}</h2><table>{body}</table></section>"


def _breakable(text: str) -> str:
    """Text for a table cell, with line breaks allowed between the parts of a name, so that no word is cut."""
    return "<wbr>".join(html.escape(part) for part in re.split(r"(?<=[._/,=-])(?=[A-Za-z])", text))


def _flat(content: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names."""
    rows: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value, default=str)))
    return rows
