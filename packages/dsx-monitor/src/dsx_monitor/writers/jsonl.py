"""Events in one file, `output_path/job_name/events.jsonl`, as lines `{"time":, "step":, "label":, "value":}`.

`time` is seconds since 1970, so that curves can be drawn over time. Values that JSON cannot express as numbers are the
strings "nan", "inf" and "-inf". A run that starts again in the same folder continues the same file.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

from ..events import Event, folder_of
from .appended import AppendedFile

__all__ = ["JSONLWriter"]

FILE_NAME = "events.jsonl"


class JSONLWriter:
    """Appends one line per event."""

    section = "jsonl"
    remote = False

    def __init__(self, config: Any) -> None:
        self.path = folder_of(config) / FILE_NAME
        self._file = AppendedFile(self.path)
        self._labels: dict[str, str] = {}

    def write(self, events: list[Event]) -> None:
        """Append the events and hand them to the operating system."""
        now, lines = round(time.time(), 6), []
        for label, value, samples in events:
            # Only the label needs escaping; the rest is written as `json.dumps` would, at a quarter of its cost.
            shown = repr(value) if math.isfinite(value) else f'"{value}"'
            lines.append(f'{{"time": {now}, "step": {samples}, "label": {self._quoted(label)}, "value": {shown}}}\n')
        self._file.append("".join(lines))

    def _quoted(self, label: str) -> str:
        known = self._labels.get(label)
        if known is None:
            known = self._labels[label] = json.dumps(label, ensure_ascii=False)
        return known

    def flush(self) -> None:
        """Does nothing: `write` has passed everything to the operating system."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
