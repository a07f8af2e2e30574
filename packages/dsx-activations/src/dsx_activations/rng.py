"""Random streams that a checkpoint saves before its forward and restores for its recomputation.

In model-parallel code some dropout masks are equal on all model-parallel ranks and others differ. So `RngTracker` keeps
named streams in addition to the default one, as Megatron's tracker does; `fork` draws from one of them. A user's own
`torch.Generator` is tracked too, after it was given to `track`.

The streams belong to the current accelerator if one is in use, otherwise to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from dsx_core.device import Device

from .errors import ActivationStateError

__all__ = ["MODEL_PARALLEL_STREAM", "RngSnapshot", "RngTracker"]

MODEL_PARALLEL_STREAM = "model-parallel-rng"


@dataclass(frozen=True)
class RngSnapshot:
    """States of all streams and generators of a tracker at one moment."""

    streams: Mapping[str, torch.Tensor]
    generators: Mapping[str, torch.Tensor]


class RngTracker:
    """Named random streams and generators."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.Tensor] = {}
        self._seeds: dict[int, str] = {}
        self._generators: dict[str, torch.Generator] = {}

    def reset(self) -> None:
        """Forget all streams and generators."""
        self._streams.clear()
        self._seeds.clear()
        self._generators.clear()

    def add(self, name: str, seed: int) -> None:
        """Add a stream that begins at `seed`.

        Raises:
            ActivationStateError: the name or the seed is in use; two streams of one seed would draw the same numbers.
        """
        if name in self._streams:
            raise ActivationStateError(f"RngTracker.add({name!r}): there is a stream of this name; call reset() first")
        if seed in self._seeds:
            raise ActivationStateError(
                f"RngTracker.add({name!r}, {seed}): the stream {self._seeds[seed]!r} has this seed, so that both would"
                " draw the same numbers; give another seed"
            )
        self._seeds[seed] = name
        with _default_stream_kept():
            _device().seed(seed)
            self._streams[name] = _device().random_state()

    def track(self, name: str, generator: torch.Generator) -> None:
        """Save and restore your own generator with every checkpoint. `fork` does not know it; draw from it directly.

        Raises:
            ActivationStateError: another generator has the name.
        """
        if self._generators.get(name, generator) is not generator:
            raise ActivationStateError(f"RngTracker.track({name!r}): another generator has this name; give another one")
        self._generators[name] = generator

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Inside the context the default generator draws from the stream `name`; afterwards it goes on where it was.

        Raises:
            ActivationStateError: there is no such stream.
        """
        if name not in self._streams:
            known = ", ".join(sorted(self._streams)) or "none"
            raise ActivationStateError(
                f"RngTracker.fork({name!r}): no such stream, known: {known}; call"
                " model_parallel_cuda_manual_seed(seed) or add(name, seed) first"
            )
        with _default_stream_kept():
            _device().set_random_state(self._streams[name])
            try:
                yield
            finally:
                self._streams[name] = _device().random_state()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Copies of the streams' states, for a checkpoint on disk."""
        return {name: state.clone() for name, state in self._streams.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Continue from states that `get_states` gave. Streams that are not among them are forgotten."""
        self._streams = {name: state.clone() for name, state in states.items()}

    def snapshot(self) -> RngSnapshot:
        """All present states. Nothing is copied: a state tensor is replaced, and never changed in place."""
        return RngSnapshot(dict(self._streams), {name: g.get_state() for name, g in self._generators.items()})

    def restore(self, snapshot: RngSnapshot) -> None:
        """Go back to the states of `snapshot`. Streams and generators that were added later keep their state."""
        self._streams.update(snapshot.streams)
        for name, state in snapshot.generators.items():
            if name in self._generators:
                self._generators[name].set_state(state)


def seed_default_stream(seed: int) -> None:
    """Seed the default generator of the device that the streams belong to."""
    _device().seed(seed)


def _device() -> Device:
    return Device.in_use() or Device("cpu")


@contextmanager
def _default_stream_kept() -> Iterator[None]:
    before = _device().random_state()
    try:
        yield
    finally:
        _device().set_random_state(before)
