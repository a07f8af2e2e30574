"""Timelines as JSON files: measured steps (`Pipeline.report().measured`) for `dsx-pipe show --timeline`."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ScheduleError
from .action import Action
from .simulate import Span, Timeline


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as JSON."""
    spans = [[s.rank, str(s.action), s.start, s.end] for s in timeline.spans]
    Path(path).write_text(json.dumps({"name": timeline.name, "ranks": timeline.ranks, "spans": spans}) + "\n")


def load_timeline(path: str | Path) -> Timeline:
    """Read what `save_timeline` wrote.

    Raises:
        ScheduleError: the file is not such a timeline.
    """
    try:
        data = json.loads(Path(path).read_text())
        spans = tuple(Span(int(r), Action.parse(a), float(s), float(e)) for r, a, s, e in data["spans"])
        return Timeline(str(data["name"]), int(data["ranks"]), spans)
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(
            f"{path}: expected a timeline that dsx_pipe.schedule.save_timeline wrote ({error})"
        ) from None
