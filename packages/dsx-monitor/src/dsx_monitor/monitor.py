"""`MonitorMaster` and the single monitors: a training loop calls them to write its numbers to backends.

    with MonitorMaster({"csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "first"}}) as monitor:
        monitor.write_events([("Train/Samples/train_loss", loss, samples)])

Only the process with rank 0 writes; on other ranks every call returns at once. If the package of a backend is missing,
or a backend fails at any time, there is one warning and training goes on. Events go through a queue (`background`).

Left out: histograms, images, text. `dsx_monitor.run.MemoryLog` writes figures of every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dsx_core import with_code

from .background import BackgroundWriters
from .errors import SWITCHED_OFF, BackendMissing, MonitorConfigError
from .events import normalised
from .processes import current_rank
from .writers.base import Writer

__all__ = ["CometMonitor", "JSONLMonitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]

logger = logging.getLogger("dsx_monitor")


def _tensorboard(section: Any) -> Writer:
    from .writers.tensorboard import TensorBoardWriter

    return TensorBoardWriter(section)


def _wandb(section: Any) -> Writer:
    from .writers.starting import StartingWriter
    from .writers.wandb import WandbWriter

    return StartingWriter("wandb", WandbWriter, section)


def _comet(section: Any) -> Writer:
    from .writers.comet import CometWriter
    from .writers.starting import StartingWriter

    return StartingWriter("comet", CometWriter, section)


def _csv(section: Any) -> Writer:
    from .writers.csv import CSVWriter

    return CSVWriter(section)


def _jsonl(section: Any) -> Writer:
    from .writers.jsonl import JSONLWriter

    return JSONLWriter(section)


# All of them are lazy imports: a job pays only for the writers it switches on.
_BUILDERS: dict[str, Callable[[Any], Writer]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "comet": _comet,
    "csv_monitor": _csv,
    "jsonl": _jsonl,
}


class _Monitor:
    """Writes events to the backends of some sections, as far as they are enabled.

    Args:
        monitor_config: a `MonitorConfig`, a mapping with its keys, or any object that has its sections as attributes.
        rank: global rank of this process; None: the rank in the initialised process group, otherwise the environment
            variable RANK, otherwise 0.
    """

    _sections: tuple[str, ...] = ()

    def __init__(self, monitor_config: Any, *, rank: int | None = None) -> None:
        config = _as_config(monitor_config, self._sections)
        given = [(name, section) for name in self._sections if (section := getattr(config, name, None)) is not None]
        chosen = [(name, section) for name, section in given if section.enabled]
        self._section = given[0][1] if len(self._sections) == 1 and given else None
        self.monitor_config = monitor_config
        self.enabled = bool(chosen)
        writes = self.enabled and (current_rank() if rank is None else rank) == 0
        self._background = BackgroundWriters(_build(chosen)) if writes else None

    def write_events(self, event_list: Iterable[tuple[str, Any, Any]], flush: bool = False) -> None:
        """Write `(label, value, samples)` events.

        Args:
            event_list: labels, numbers (or tensors with one element) and the number of samples seen by all ranks.
            flush: wait until they are written out, or until a writer has hung for ten seconds.

        Raises:
            MonitorConfigError: an event is not such a triple.
        """
        if self._background is not None:
            self._background.put(normalised(event_list))
            if flush:
                self._background.flush()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all events so far are written out.

        Returns False if `timeout` seconds were not enough or a writer hangs.
        """
        return True if self._background is None else self._background.flush(timeout)

    def close(self) -> None:
        """Write everything out and close the backends. This happens automatically when the process ends.

        Waits as long as the writers make progress. A writer that hangs is given up after ten seconds, with a warning.
        """
        if self._background is not None:
            self._background.close()

    @property
    def active(self) -> tuple[str, ...]:
        """The sections that this process is writing to now."""
        return () if self._background is None else tuple(writer.section for writer in self._background.writers)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MonitorMaster(_Monitor):
    """Writes events to every enabled backend."""

    _sections = tuple(_BUILDERS)


class _FileMonitor(_Monitor):
    """Writes to files."""

    @property
    def output_path(self) -> str | None:
        """The configured folder; None or empty if the writer chooses it."""
        return getattr(self._section, "output_path", None)

    @property
    def job_name(self) -> str | None:
        """The configured name of the job."""
        return getattr(self._section, "job_name", None)


class TensorBoardMonitor(_FileMonitor):
    """Only the section `tensorboard`; takes the section or the whole configuration."""

    _sections = ("tensorboard",)


class WandbMonitor(_Monitor):
    """Only the section `wandb`; takes the section or the whole configuration."""

    _sections = ("wandb",)

    @property
    def group(self) -> str | None:
        """The configured group of the run."""
        return getattr(self._section, "group", None)

    @property
    def team(self) -> str | None:
        """The configured team that owns the run."""
        return getattr(self._section, "team", None)

    @property
    def project(self) -> str | None:
        """The configured project of the run."""
        return getattr(self._section, "project", None)


class CometMonitor(_Monitor):
    """Only the section `comet`; takes the section or the whole configuration."""

    _sections = ("comet",)


class csvMonitor(_FileMonitor):
    """Only the section `csv_monitor`; takes the section or the whole configuration."""

    _sections = ("csv_monitor",)


class JSONLMonitor(_FileMonitor):
    """Only the section `jsonl`; takes the section or the whole configuration."""

    _sections = ("jsonl",)


class _Single:
    """One section in the form of a configuration with all sections."""

    def __init__(self, name: str, section: Any) -> None:
        setattr(self, name, section)


def _as_config(config: Any, sections: tuple[str, ...]) -> Any:
    if isinstance(config, Mapping):
        from pydantic import ValidationError

        from .config import MonitorConfig  # lazy import: pydantic is slow to import

        alone = len(sections) == 1 and "enabled" in config  # no section is called that
        try:
            return MonitorConfig.model_validate({sections[0]: dict(config)} if alone else dict(config))
        except ValidationError as error:
            from .problems import problems_of  # lazy import, as above

            raise MonitorConfigError(f"monitor configuration: {problems_of(error, MonitorConfig)}") from None
    if len(sections) == 1 and not hasattr(config, sections[0]) and hasattr(config, "enabled"):
        return _Single(sections[0], config)
    if not any(hasattr(config, name) for name in sections):
        raise MonitorConfigError(
            f"monitor configuration: got {type(config).__name__}, expected a mapping or an object with the section "
            f"{' or '.join(sections)}"
        )
    return config


def _build(chosen: list[tuple[str, Any]]) -> list[Writer]:
    writers = []
    for name, section in chosen:
        try:
            writers.append(_BUILDERS[name](section))
        except BackendMissing as error:
            logger.warning(with_code("monitor: %s; training goes on without it", "DSX851"), error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a backend does at start, training goes on
            text = with_code("monitor: %s cannot start and is switched off: %s: %s", SWITCHED_OFF)
            logger.warning(text, name, type(error).__name__, error)
    return writers
