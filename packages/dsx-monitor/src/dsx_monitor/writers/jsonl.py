"""Events in one file, `output_path/job_name/events.jsonl`: `{"time": ..., "step": ..., "label": ..., "value": ...}` lines.

`time` is seconds since 1970, so that curves can be drawn over the clock; values that JSON has no number for are the
texts "nan", "inf" and "-inf". A run that starts again in the same folder goes on in the same file.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

from ..events import Event, folder_of, last_byte

__all__ = ["JSONLWriter"]

FILE_NAME = "events.jsonl"


class JSONLWriter:
    """Appends one line per event."""

    section = "jsonl"

    def __init__(self, config: Any) -> None:
        folder = folder_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        ended = last_byte(self.path) in (b"", b"\n")
        self._stream = self.path.open("a", encoding="utf-8")
        self._labels: dict[str, str] = {}
        if not ended:  # a crash cut the last line in half
            self._stream.write("\n")

    def write(self, events: list[Event]) -> None:
        """Append the events and hand them to the operating system."""
        now, lines = round(time.time(), 3), []
        for label, value, samples in events:
            # Only the label needs escaping; the rest is written as `json.dumps` would, at a quarter of its cost.
            shown = repr(value) if math.isfinite(value) else f'"{value}"'
            lines.append(f'{{"time": {now}, "step": {samples}, "label": {self._quoted(label)}, "value": {shown}}}\n')
        self._stream.write("".join(lines))
        self._stream.flush()

    def _quoted(self, label: str) -> str:
        known = self._labels.get(label)
        if known is None:
            known = self._labels[label] = json.dumps(label, ensure_ascii=False)
        return known

    def flush(self) -> None:
        """Nothing is left to do: `write` has handed everything over."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
