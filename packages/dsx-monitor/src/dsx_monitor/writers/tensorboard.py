"""Events as TensorBoard scalars in `output_path/job_name`.

Uses the record format of the `tensorboard` package itself, so that neither torch nor tensorflow is needed, but not its
event-file writer, which has a thread and a queue of its own: there is one in front of this writer already.
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

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes one record for all events of a step, into a new file per process."""

    section = "tensorboard"

    def __init__(self, config: Any) -> None:
        try:
            # Late: the package is optional, and costs a second to import.
            from tensorboard.compat.proto import event_pb2, summary_pb2  # generated: no types
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise BackendMissing(self.section, "tensorboard", "tensorboard") from error
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        folder = folder_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The name that TensorBoard looks for; the last part tells apart two runs of one process in one second.
        name = f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("wb")
        self._waiting = (
            io.BytesIO()
        )  # not the file's own buffer: a forked child has a copy of that and would write it, too
        self._records = RecordWriter(self._waiting)
        self._add(self._event(wall_time=now, file_version="brain.Event:2"))
        self.flush()

    def write(self, events: list[Event]) -> None:
        """Take the events in."""
        now, value_of = time.time(), self._summary.Value
        for samples, group in groupby(events, key=lambda event: event[2]):
            summary = self._summary(value=[value_of(tag=label, simple_value=value) for label, value, _ in group])
            self._add(self._event(wall_time=now, step=samples, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.write(self._waiting.getvalue())
        self._file.flush()
        self._waiting.seek(0)
        self._waiting.truncate()

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()
