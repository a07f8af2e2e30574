"""Reads a run directory (see `dsx_monitor.run`) into curves, in memory that does not grow with the run's length.

It also reads runs that are still going on or were interrupted: a line that a crash cut is skipped and counted, and a
missing file only means that its charts are missing. If there is no `events.jsonl`, the CSV files of `csv_monitor` below
the directory are read; if there are none of these, TensorBoard's event files, provided that its package is installed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ReportError
from ..run import MEMORY, META
from ..timeline import MERGED, TRACE, merge_traces
from ..writers.jsonl import FILE_NAME
from .curve import Pieces

__all__ = ["RunData", "read_run"]


@dataclass
class RunData:
    """All that is known of a run.

    Attributes:
        curves: the curves by label.
        memory: by rank: the rank's curves by name (`rss`, `pss`, ...), in bytes.
        meta: the data that `start_run` wrote.
        stragglers: the comparisons of ranks, the oldest first.
        flops: the summary of the flops profile, by name.
        pages: other files to open, relative to the run directory.
    """

    curves: dict[str, Pieces]
    memory: dict[int, dict[str, Pieces]]
    meta: dict[str, Any]
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    flops: dict[str, Any] = field(default_factory=dict)
    pages: list[str] = field(default_factory=list)
    unreadable_lines: int = 0


def read_run(run_dir: str | Path) -> RunData:
    """Read a run directory.

    Raises:
        ReportError: it is not a directory, or nothing in it can be drawn.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ReportError(
            f"report of {folder}: expected a run directory, got {'a file' if folder.exists() else 'nothing'}"
        )
    data = RunData({}, {}, _read_meta(folder / META))
    for line in _json_lines(folder / FILE_NAME, data):
        _curve(data.curves, str(line["label"]), data).add(
            float(line["step"]), float(line["value"]), float(line["time"])
        )
    if not data.curves:
        _read_csv(folder, data)
    if not data.curves:
        _read_tensorboard(folder, data)
    for path in sorted((folder / MEMORY).glob("rank*.jsonl")):
        _read_memory(path, data)
    _read_extras(folder, data)
    if not (data.curves or data.memory or data.stragglers or data.pages):
        raise ReportError(
            f"report of {folder}: got no events.jsonl, no files of csv_monitor or tensorboard and no"
            " memory/rank*.jsonl, expected one of them; switch on the sections 'jsonl' or 'csv_monitor' with this"
            " output_path"
        )
    return data


def _read_extras(folder: Path, data: RunData) -> None:
    """Comparisons of ranks, flops profile and traces, where there are any."""
    stragglers = folder / "stragglers.jsonl"
    if stragglers.exists():
        for text in stragglers.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(text)
                _ = (record["step"], record["own"], record["waiting"], record["found"])
            except (ValueError, TypeError, KeyError):
                data.unreadable_lines += bool(text.strip())
                continue
            data.stragglers.append(record)
    profile = folder / "flops.json"
    if profile.exists():
        try:
            data.flops = dict(json.loads(profile.read_text(encoding="utf-8"))["summary"])
        except (ValueError, TypeError, KeyError):
            data.unreadable_lines += 1
    if list((folder / TRACE).glob("rank*.json")):
        merge_traces(folder)
    data.pages = [name for name in ("flops.html", "flops.json", MERGED) if (folder / name).exists()]


def _curve(curves: dict[str, Pieces], label: str, data: RunData) -> Pieces:
    if label not in curves:
        curves[label] = Pieces(label, [float(start.get("time", 0)) for start in data.meta.get("starts", [])])
    return curves[label]


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"report: {path} is no JSON: {error}") from None


def _json_lines(path: Path, data: RunData) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; lines that are not valid are counted and left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        for text in stream:
            try:
                line = json.loads(text)
                _ = (float(line["step"]), float(line.get("value", 0)), float(line["time"]))
            except (ValueError, TypeError, KeyError, AttributeError):
                data.unreadable_lines += bool(text.strip())
                continue
            yield line


def _read_memory(path: Path, data: RunData) -> None:
    rank = int("".join(filter(str.isdigit, path.stem)) or 0)
    curves = data.memory.setdefault(rank, {})
    for line in _json_lines(path, data):
        for name, value in line.items():
            if name not in ("time", "step") and isinstance(value, (int, float)):
                _curve(curves, name, data).add(line["step"], value, line["time"])


def _read_csv(folder: Path, data: RunData) -> None:
    for path in sorted(folder.rglob("*.csv")):
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = csv.reader(stream)
            head = next(rows, [])
            if len(head) != 2 or head[0] != "step":
                continue  # a table of something else
            for row in rows:
                try:
                    step, value = float(row[0]), float(row[1])
                except (ValueError, IndexError):
                    data.unreadable_lines += 1
                    continue
                _curve(data.curves, path.stem, data).add(step, value)


def _read_tensorboard(folder: Path, data: RunData) -> None:
    folders = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    if not folders:
        return
    try:
        # Lazy import: optional, and slow to import.
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ReportError(
            f"report of {folder}: got TensorBoard's event files and nothing else; reading them needs its package: "
            "pip install tensorboard"
        ) from error
    for each in folders:
        events = EventAccumulator(str(each), size_guidance={"scalars": 0})  # 0: all
        events.Reload()
        for label in events.Tags()["scalars"]:
            for event in events.Scalars(label):
                _curve(data.curves, label, data).add(event.step, event.value, event.wall_time)
