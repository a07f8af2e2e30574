"""Events as TensorBoard scalars in `output_path/job_name`.

Uses the event-file writer of the `tensorboard` package itself, so that neither torch nor tensorflow is needed.
"""

from __future__ import annotations

import time
from typing import Any

from ..errors import BackendMissing
from ..events import Event, folder_of

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes one summary per event."""

    section = "tensorboard"

    def __init__(self, config: Any) -> None:
        try:
            # Late: the package is optional, and costs a second to import.
            from tensorboard.compat.proto import event_pb2, summary_pb2  # generated: no types
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise BackendMissing(self.section, "tensorboard", "tensorboard") from error
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        self._file = EventFileWriter(str(folder_of(config)))

    def write(self, events: list[Event]) -> None:
        """Hand the events to the file's buffer."""
        for label, value, samples in events:
            summary = self._summary(value=[self._summary.Value(tag=label, simple_value=value)])
            self._file.add_event(self._event(wall_time=time.time(), step=samples, summary=summary))

    def flush(self) -> None:
        """Write the buffer out."""
        self._file.flush()

    def close(self) -> None:
        """Write the buffer out and close the file."""
        self._file.close()
