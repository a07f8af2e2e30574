"""What dsx-monitor raises. Writers raise only when they are built from a wrong configuration; never while training."""

from __future__ import annotations

__all__ = ["BackendMissing", "MonitorConfigError", "ReportError"]


class MonitorConfigError(ValueError):
    """The monitor's configuration is wrong."""


class BackendMissing(RuntimeError):
    """A package that a writer needs is not installed. Turned into one warning; training goes on."""

    def __init__(self, section: str, package: str, extra: str) -> None:
        super().__init__(
            f"{section}.enabled is true but the package {package!r} cannot be imported; "
            f"install it with: pip install {package} (or: pip install 'dsx-monitor[{extra}]')"
        )


class ReportError(ValueError):
    """A run directory holds nothing a report could be made of, or something unreadable."""
