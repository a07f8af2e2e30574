"""Events to Comet, online or as an archive to upload later (in COMET_OFFLINE_DIRECTORY).

A label is sent at most once in `samples_log_interval` samples; the first event of each label is always sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import BackendMissing
from ..events import Event

__all__ = ["CometWriter"]


class CometWriter:
    """Logs to a Comet experiment that it opens."""

    section = "comet"
    remote = True

    def __init__(self, config: Any) -> None:
        try:
            import comet_ml  # lazy import: optional, and slow to import
        except ImportError as error:
            raise BackendMissing(self.section, "comet_ml", "comet") from error
        self._interval = config.samples_log_interval
        self._sent: dict[str, int] = {}
        self._experiment = comet_ml.start(
            api_key=config.api_key,
            workspace=config.workspace,
            project=config.project,
            experiment_key=config.experiment_key,
            mode=config.mode or "get_or_create",
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write(self, events: list[Event]) -> None:
        """Send the events that are due, all values of a step in one call."""
        for samples, values in _steps(self._due(events)):
            self._experiment.log_metrics(values, step=samples)

    def _due(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            label, _, samples = event
            last = self._sent.get(label)
            if last is None or samples - last >= self._interval:
                self._sent[label] = samples
                yield event

    def flush(self) -> None:
        """Does nothing: Comet's own thread sends what is logged."""

    def close(self) -> None:
        """End the experiment: wait for the upload, or write the archive."""
        self._experiment.end()


def _steps(events: Iterable[Event]) -> Iterator[tuple[int, dict[str, float]]]:
    """Events that follow each other with the same sample count; a label that comes again begins a new group."""
    values: dict[str, float] = {}
    at = 0
    for label, value, samples in events:
        if values and (samples != at or label in values):
            yield at, values
            values = {}
        at, values[label] = samples, value
    if values:
        yield at, values
