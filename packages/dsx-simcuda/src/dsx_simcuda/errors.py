"""The errors of dsx-simcuda. Each says what was found, what is needed and what to do, and ends with its code."""

from __future__ import annotations

__all__ = ["BuildFailed", "ImportedTooLate", "RefusedHere", "SimcudaError"]


class SimcudaError(RuntimeError):
    """Base class: the simulated device cannot do what was asked."""

    code = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} [{self.code}] docs: dsx explain {self.code}" if self.code else text


class ImportedTooLate(SimcudaError):
    """torch was imported before the simulated device was installed."""

    code = "DSX901"


class BuildFailed(SimcudaError):
    """The native library cannot be built: no compiler, no headers of Python, or the compiler failed."""

    code = "DSX902"


class RefusedHere(SimcudaError):
    """This machine or this torch is none that the simulated device takes over: another version, a GPU, a CUDA build."""

    code = "DSX903"
