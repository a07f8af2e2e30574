"""Events as CSV, one file per label: `output_path/job_name/<label with / as _>.csv`.

The header is `step,<last part of label>`.

Lines wait in lists until they are flushed. They do not wait in a file object's buffer, because a forked child would
have a copy of that buffer and write it too. Files stay open between events. A run that starts again in the same folder
continues the same files: the header is written once, and a last line that a crash cut is ended before new ones follow.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..events import Event, folder_of, label_to_file_name
from .appended import AppendedFile, warn_of_loss

__all__ = ["CSVWriter"]

# Far below the usual limit of 1024 descriptors, far above the number of labels of a usual run.
_MOST_OPEN_FILES = 128


class CSVWriter:
    """Appends `step,value` lines."""

    section = "csv_monitor"
    remote = False

    def __init__(self, config: Any) -> None:
        self.folder = folder_of(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._paths: dict[str, Path] = {}
        self._open: OrderedDict[str, AppendedFile] = OrderedDict()
        self._lines: dict[str, list[str]] = {}
        self._lost: Path | None = None  # a file or folder that a flush found to be removed

    def write(self, events: list[Event]) -> None:
        """Keep the events until the next flush."""
        for label, value, samples in events:
            # Two numbers need no quoting, so the csv module is not asked.
            self._lines.setdefault(label, []).append(f"{samples},{value!r}\n")

    def path(self, label: str) -> Path:
        """The file of a label. Labels that would give the same file name get different files."""
        if label not in self._paths:
            path = self.folder / f"{label_to_file_name(label)}.csv"
            if path in self._paths.values():
                path = path.with_name(f"{path.stem}.{zlib.crc32(label.encode()):08x}.csv")
            self._paths[label] = path
        return self._paths[label]

    def _file(self, label: str) -> AppendedFile:
        file = self._open.get(label)
        if file is None:
            if len(self._open) >= _MOST_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            file = self._open[label] = AppendedFile(self.path(label), _head(label), self._note_loss)
        self._open.move_to_end(label)
        return file

    def _note_loss(self, path: Path) -> None:
        self._lost = self._lost or (path if self.folder.exists() else self.folder)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        waiting, self._lines = self._lines, {}
        for label, lines in waiting.items():
            self._file(label).append("".join(lines))
        lost, self._lost = self._lost, None
        if lost is not None:  # one warning for a removed folder, however many files it held
            warn_of_loss(lost)

    def close(self) -> None:
        """Flush and close all files."""
        try:
            self.flush()
        finally:
            while self._open:
                self._open.popitem()[1].close()


def _head(label: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(("step", label.rsplit("/", 1)[-1]))
    return text.getvalue()
