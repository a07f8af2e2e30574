"""Memory of the phases that share a device: training, sleep, generation, a push of weights.

A phase has two figures: what of the model lies on the device when it ends, by class, and the most that was allocated
in it. The difference is what the phase itself needs: activations, gathered parameters, a cache of keys and values, a
bucket. Both are counters of torch's allocator, so that nobody waits for the device.

Left out: a device that another process shares (vLLM in its own process counts for itself), and a CPU, whose allocator
does not count: there only the classes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .errors import ReportError
from .picture import Bar, bytes_text, step_picture

__all__ = ["Phase", "PhaseMemory"]


@dataclass
class Phase:
    """Bytes on the device in one phase; of a phase that came several times those of the time with the highest peak.

    Attributes:
        name: its name.
        times: how often it came.
        before: allocated when it began.
        peak: the most that was allocated in it.
        after: allocated when it ended.
        classes: of the model's state, what lay on the device when it ended.
    """

    name: str
    times: int
    before: int
    peak: int
    after: int
    classes: dict[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """The peak by class: the model's state, and "activations" for all that is beside it."""
        held = sum(self.classes.values())
        return {**self.classes, "activations": max(0, self.peak - held)}


class PhaseMemory:
    """Measures the memory of phases on the device that this process uses.

        phases = PhaseMemory(engine.optimizer.state_bytes_by_tier)
        with phases("push"):
            for bucket in engine.weights.buckets():
                ...
        print(phases.report())

    Phases do not lie inside each other. Every rank measures its own device; nothing is sent.

    Args:
        states: gives bytes of the model's state by class and tier, as `ZeroOptimizer.state_bytes_by_tier` does; None:
            only the allocator's figures.
    """

    def __init__(self, states: Callable[[], Mapping[str, Mapping[str, int]]] | None = None) -> None:
        self._states = states
        self._phases: dict[str, Phase] = {}
        self._open: str | None = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases so far, in the order in which they first came."""
        return tuple(self._phases.values())

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what the block does as the phase `name`. It restarts the allocator's peaks. A block that raises is
        not counted.

        Raises:
            ReportError: inside another phase.
        """
        if self._open is not None:
            raise ReportError(f"phase {name!r}: got it inside of {self._open!r}, expected one after the other")
        device = _device()
        device.restart_peaks()
        before = device.allocated()
        self._open = name
        try:
            yield
        finally:
            self._open = None
        self._add(Phase(name, 1, before, device.peak_allocated(), device.allocated(), self._classes()))

    def _add(self, phase: Phase) -> None:
        known = self._phases.get(phase.name)
        if known is not None:
            phase.times = known.times + 1
            if known.peak > phase.peak:
                known.times = phase.times
                return
        self._phases[phase.name] = phase

    def _classes(self) -> dict[str, int]:
        if self._states is None:
            return {}
        return {name: tiers["device"] for name, tiers in self._states().items() if tiers.get("device")}

    def report(self) -> str:
        """A table: of each phase the bytes before, the most, and after, and what is beside the model's state."""
        rows = [("phase", "times", "before", "peak", "after", "beside the model's state")]
        rows += [
            (one.name, str(one.times), *map(bytes_text, (one.before, one.peak, one.after, one.parts["activations"])))
            for one in self.phases
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + "\n" for row in rows)

    def picture(self, title: str = "Memory of the device by phase") -> str:
        """The phases as stacked bars in one SVG.

        Raises:
            ReportError: no phase has been measured.
        """
        return step_picture(title, [Bar(one.name, one.parts) for one in self.phases], [])


def _device() -> Any:
    from dsx_core.device import Device  # lazy import: it brings torch

    return Device.current()
