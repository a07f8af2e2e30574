"""Events as TensorBoard scalars in `output_path/job_name`.

It uses the record format of the `tensorboard` package, so that neither torch nor tensorflow is needed. It does not use
that package's event-file writer, which has a thread and a queue: this writer already has a queue in front of it.
"""

from __future__ import annotations

import io
import os
import platform
import time
from itertools import groupby
from typing import Any

from ..errors import BackendMissing
from ..events import Event, folder_of
from .appended import is_gone, warn_of_loss

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes one record for all events of a step, into a new file per process."""

    section = "tensorboard"
    remote = False

    def __init__(self, config: Any) -> None:
        try:
            # Lazy import: the package is optional, and costs a second to import.
            from tensorboard.compat.proto import event_pb2, summary_pb2  # generated: no types
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise BackendMissing(self.section, "tensorboard", "tensorboard") from error
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        self._folder = folder_of(config)
        # Not the file's own buffer: a forked child would have a copy of that and write it too.
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._open()

    def _open(self) -> None:
        """Begin a new file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # TensorBoard looks for this form of name. The last part differs for two writers that start in the same second.
        name = f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = self._folder / name
        self._file = self._path.open("wb")
        waiting = self._take()
        self._add(self._event(wall_time=now, file_version="brain.Event:2"))
        self._file.write(self._take())
        self._file.flush()
        self._waiting.write(waiting)

    def write(self, events: list[Event]) -> None:
        """Keep the events until the next flush."""
        now, value_of = time.time(), self._summary.Value
        for samples, group in groupby(events, key=lambda event: event[2]):
            summary = self._summary(value=[value_of(tag=label, simple_value=value) for label, value, _ in group])
            self._add(self._event(wall_time=now, step=samples, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if is_gone(self._path, self._file.fileno()):
            warn_of_loss(self._path)
            self._file.close()
            self._open()
        self._file.write(self._take())
        self._file.flush()

    def _take(self) -> bytes:
        """Return the bytes that wait to be written, and empty the buffer."""
        data = self._waiting.getvalue()
        self._waiting.seek(0)
        self._waiting.truncate()
        return data

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()
