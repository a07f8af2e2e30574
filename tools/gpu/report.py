"""The report of `tools/dev.py gpu`: one JSON file and one page of Markdown with everything in it.

Stages may be run one by one: each call replaces its own stages in the files and keeps those of earlier calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.running import Outcome

JSON, PAGE = "gpu.json", "gpu.md"


def earlier(folder: Path, commit: str) -> dict[str, Any]:
    """The stages of earlier calls of the same commit, by name; none where the file is missing or not ours."""
    try:
        found = json.loads((folder / JSON).read_text(encoding="utf-8"))
        return dict(found["stages"]) if found["commit"] == commit else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(folder: Path, outcomes: Sequence[Outcome], commit: str, simulated: bool) -> dict[str, Any]:
    """Write both files; returns what is in the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = earlier(folder, commit)
    for outcome in outcomes:
        stages[outcome.stage] = {
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 1),
            "limit_s": outcome.limit_s,
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "records": [{**asdict(record), "figures": dict(record.figures)} for record in outcome.records],
        }
    content = {"commit": commit, "simulated": simulated, "stages": stages}
    (folder / JSON).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(content), encoding="utf-8")
    return content


def page(content: dict[str, Any]) -> str:
    """The Markdown page."""
    device = "the simulated device (no figure here is one of a GPU)" if content["simulated"] else "a GPU"
    lines = [f"# dsx on {device}", "", f"Commit {content['commit']}.", ""]
    lines += ["| stage | verdict | seconds | good | bad | skipped |", "|---|---|---|---|---|---|"]
    for name, stage in content["stages"].items():
        counts = [sum(r["verdict"] == v for r in stage["records"]) for v in ("good", "bad", "skipped")]
        lines.append(f"| {name} | {stage['verdict']} | {stage['seconds']} | {' | '.join(map(str, counts))} |")
    for name, stage in content["stages"].items():
        lines += ["", f"## {name}", "", "| what | verdict | figures | |", "|---|---|---|---|"]
        details = []
        for record in stage["records"]:
            first, _, more = record["text"].partition("\n")
            figures = ", ".join(f"{key} {_shown(value)}" for key, value in record["figures"].items())
            lines.append(f"| {_cell(record['name'])} | {record['verdict']} | {_cell(figures)} | {_cell(first)} |")
            if more.strip():
                details += ["", f"{record['name']}:", "", "````text", more.strip(), "````"]
        lines += details
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(_shown(v) for v in value)
    return str(value)
