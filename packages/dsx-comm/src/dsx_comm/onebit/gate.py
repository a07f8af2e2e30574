"""The benefit gate: it decides whether compression saves time on this link, with these parameters.

With `compression="auto"` every rank measures, at the first step, the link (the latency and the rate of an all-reduce)
and the codec (seconds per element to compress and decompress). From these follow two estimates:

    exact       a + bytes / r                     a: latency, r: bytes per second of all-reduces
    compressed  2 a + bytes' / r + c elements     c: codec's seconds per element, over worker, server and result

Compression is off where the second is not below the first; the ranks agree on the slowest rank's numbers. With "on" and
"off" the answer is known, so nothing is measured. The exact time does not count what an engine hides behind backward:
where it hides everything, compression saves nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..collectives import ReduceOp, reduce_everywhere
from ..compressed.codec import codec_for
from ..compressed.layout import OneBitLayout
from ..errors import CommArgumentError
from ..exchange import barrier
from ..groups import get_rank, get_world_size
from ..stopwatch import shortest_time

if TYPE_CHECKING:
    from .arena import Arena

_log = logging.getLogger(__name__)

Compression = Literal["on", "off", "auto"]
_SAMPLES = (
    1 << 10,
    1 << 14,
    1 << 18,
    1 << 22,
)  # elements; the next size is tried while the last took less than _ENOUGH
_ENOUGH = 0.02  # seconds
OPERATION = "measure_link"  # its name in counters and log


def check_compression(value: Any) -> Compression:
    """`value` if it is one of the three.

    Raises:
        CommArgumentError: it is not.
    """
    if value not in ("on", "off", "auto"):
        raise CommArgumentError(f'compression: got {value!r}, expected "on", "off" or "auto"')
    return value


@dataclass(frozen=True)
class Link:
    """What was measured on the slowest rank.

    Attributes:
        latency: seconds of an all-reduce of next to nothing.
        rate: bytes per second and rank that an all-reduce sends.
        codec: seconds per element of compressing and decompressing, worker, server and result together.
    """

    latency: float
    rate: float
    codec: float


@dataclass(frozen=True)
class Estimate:
    """Bytes one rank sends and seconds it takes, for one exact and one compressed averaging of all parameters."""

    exact_bytes: float
    compressed_bytes: float
    exact_seconds: float
    compressed_seconds: float

    @property
    def pays(self) -> bool:
        """Whether compression saves time."""
        return self.compressed_seconds < self.exact_seconds

    def __str__(self) -> str:
        return (
            f"exact {self.exact_bytes / 1e6:.3g} MB in {self.exact_seconds * 1e3:.3g} ms, "
            f"compressed {self.compressed_bytes / 1e6:.3g} MB in {self.compressed_seconds * 1e3:.3g} ms "
            "per averaging and rank"
        )


def estimate(link: Link, numel: int, itemsize: int, layout: OneBitLayout) -> Estimate:
    """The formulas of the module's text, for `numel` parameters whose gradients travel with `itemsize` bytes."""
    size = layout.world_size
    exact, compressed = 2 * (size - 1) / size * numel * itemsize, float(layout.sent_bytes)
    return Estimate(
        exact,
        compressed,
        link.latency + exact / link.rate,
        2 * link.latency + compressed / link.rate + link.codec * numel,
    )


def measure(device: torch.device, group: Any = None, largest: int = _SAMPLES[-1]) -> Link:
    """Measure the link and the codec (collective; a fraction of a second); counted as operation "measure_link".

    Args:
        largest: elements of the largest message tried.
    """
    size = get_world_size(group)
    latency, rate = _time_all_reduce(1, device, group), 0.0
    for numel in sorted({min(sample, largest) for sample in _SAMPLES}):
        seconds = _time_all_reduce(numel, device, group)
        rate = 2 * (size - 1) / size * 4 * numel / max(seconds - latency, 0.1 * seconds, 1e-9)
        if _slowest([seconds], device, group)[0] > _ENOUGH:
            break
    codec = _measure_codec(device, size, get_rank(group))
    latency, inverse, codec = _slowest([latency, 1 / rate, codec], device, group)
    return Link(latency, 1 / inverse, codec)


def _slowest(numbers: list[float], device: torch.device, group: Any) -> list[float]:
    """The highest of every rank's numbers."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    reduce_everywhere(OPERATION, tensor, ReduceOp.MAX, group, False, {})
    return tensor.tolist()


def _time_all_reduce(numel: int, device: torch.device, group: Any) -> float:
    sample = torch.zeros(numel, device=device)

    def once() -> None:
        reduce_everywhere(OPERATION, sample, ReduceOp.SUM, group, False, {})

    return shortest_time(once, device, lambda: barrier(group))


def _measure_codec(device: torch.device, size: int, rank: int) -> float:
    layout = OneBitLayout.of(1 << 18, size)
    codec = codec_for(layout, rank, device, "rms")
    values, error = torch.randn(layout.numel, device=device), torch.zeros(layout.numel, device=device)
    part, kept = torch.empty(layout.chunk, device=device), torch.zeros(layout.chunk, device=device)
    messages = torch.zeros(size * layout.message_bytes, dtype=torch.uint8, device=device)
    own = messages.view(size, -1)[rank]

    def once() -> None:
        codec.compress(values, error, messages)
        codec.mean(messages, part)
        codec.compress_chunk(part, kept, own)
        codec.decompress(messages, values)

    return shortest_time(once, device, lambda: None) / (1 << 18)


class Gate:
    """Whether a compressed optimizer compresses. "auto" is decided once, at its first step; until then it counts as
    on.
    """

    def __init__(self, wish: Compression) -> None:
        self.wish = wish
        self.active = wish != "off"
        self.link: Link | None = None
        self.estimate: Estimate | None = None

    def decide(self, numel: int, itemsize: int, arena: Arena, group: Any) -> None:
        """With "auto", measure and decide (collective) at the first call; every other call does nothing."""
        if self.estimate is not None or self.wish != "auto":
            return
        self.link = measure(arena.flat.device, group, max(1, min(_SAMPLES[-1], numel)))
        self.estimate = estimate(self.link, numel, itemsize, arena.layout)
        self.active = self.estimate.pays
        if get_rank(group) == 0:
            _log.info("1-bit compression is %s: %s", "on" if self.active else "off", self.estimate)
