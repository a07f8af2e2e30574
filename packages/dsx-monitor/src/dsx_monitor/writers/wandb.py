"""Events to Weights & Biases, online, offline (`wandb sync` uploads later) or disabled.

Events of the same step are logged together, because one step may be logged only once and steps may only grow.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..errors import BackendMissing
from ..events import Event

__all__ = ["WandbWriter"]


class WandbWriter:
    """Logs to a run of Weights & Biases that it starts."""

    section = "wandb"
    remote = True

    def __init__(self, config: Any) -> None:
        try:
            import wandb  # lazy import: optional, and slow to import
        except ImportError as error:
            raise BackendMissing(self.section, "wandb", "wandb") from error
        self._run = wandb.init(
            project=config.project, group=config.group, entity=config.team, mode=config.mode, reinit="create_new"
        )

    def write(self, events: list[Event]) -> None:
        """Log the events, grouped by step."""
        for samples, group in groupby(events, key=lambda event: event[2]):
            self._run.log({label: value for label, value, _ in group}, step=samples)

    def flush(self) -> None:
        """Does nothing: the service process of the run has the data as soon as they are logged."""

    def close(self) -> None:
        """Finish the run and wait for the upload."""
        self._run.finish()
