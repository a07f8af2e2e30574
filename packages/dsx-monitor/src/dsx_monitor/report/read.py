"""Reading a run directory (see `dsx_monitor.run`) into plain curves.

Made for runs that are still going on or ended badly: a line that a crash cut in half is skipped and counted, a missing
file means that there is nothing to show of its kind. Without `events.jsonl` the CSV files of `csv_monitor` are read,
wherever below the directory they lie.
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
from ..writers.jsonl import FILE_NAME

__all__ = ["Curve", "RunData", "read_run"]


@dataclass
class Curve:
    """Values over steps (samples). `times` are seconds since 1970, empty if unknown."""

    label: str
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: float, value: float, time: float | None = None) -> None:
        """Append one point."""
        self.steps.append(step)
        self.values.append(value)
        if time is not None:
            self.times.append(time)


@dataclass
class RunData:
    """All that is known of a run. `memory` maps a rank to its curves by name (`rss`, `pss`, ...), in bytes."""

    curves: dict[str, Curve]
    memory: dict[int, dict[str, Curve]]
    meta: dict[str, Any]
    unreadable_lines: int = 0


def read_run(run_dir: str | Path) -> RunData:
    """Read what is there.

    Raises:
        ReportError: it is no directory, or nothing in it can be drawn.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ReportError(
            f"report of {folder}: expected a run directory, got {'a file' if folder.exists() else 'nothing'}"
        )
    data = RunData({}, {}, _read_meta(folder / META))
    for line in _json_lines(folder / FILE_NAME, data):
        _curve(data, str(line["label"])).add(float(line["step"]), float(line["value"]), float(line["time"]))
    if not data.curves:
        _read_csv(folder, data)
    for path in sorted((folder / MEMORY).glob("rank*.jsonl")):
        _read_memory(path, data)
    if not data.curves and not data.memory:
        raise ReportError(
            f"report of {folder}: got no events.jsonl, no CSV files of csv_monitor and no memory/rank*.jsonl, expected one of "
            "them; switch on the sections 'jsonl' or 'csv_monitor' with this output_path"
        )
    return data


def _curve(data: RunData, label: str) -> Curve:
    return data.curves.setdefault(label, Curve(label))


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"report: {path} is no JSON: {error}") from None


def _json_lines(path: Path, data: RunData) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file that have what a line must have."""
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
                curves.setdefault(name, Curve(name)).add(line["step"], value, line["time"])


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
                _curve(data, path.stem).add(step, value)
