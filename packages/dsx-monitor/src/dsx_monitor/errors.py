"""The errors of dsx-monitor. A writer raises only when it is built from a wrong configuration, never during
training. Warnings that ask something of the user have a code.
"""

from __future__ import annotations

__all__ = ["EVENTS_LOST", "SWITCHED_OFF", "BackendMissing", "MonitorConfigError", "ReportError"]

SWITCHED_OFF = "DSX852"
"""The code of a warning: a writer has failed, and gets no more events."""
EVENTS_LOST = "DSX854"
"""The code of a warning: a writer is too slow, so that events are lost."""


class MonitorConfigError(ValueError):
    """The monitor's configuration is wrong."""


class BackendMissing(RuntimeError):
    """A package that a writer needs is not installed. The monitor turns this into one warning; training goes on."""

    def __init__(self, section: str, package: str, extra: str) -> None:
        super().__init__(
            f"{section}.enabled is true but the package {package!r} cannot be imported; "
            f"install it with: pip install {package} (the extra {extra!r} of dsx-monitor)"
        )


class ReportError(ValueError):
    """A run directory holds nothing that a report can show, or a file that cannot be read."""
