"""Memory of the phases of a job that shares its devices with a generator: training, sleep, generation, a push.

Sleep and push are replayed as the step is: the engine's states leave for the host, and its weights stream through one
bucket. The generator is arithmetic: its copy of the weights, and keys and values of as many tokens as it holds at a
time. How many bytes a token takes is read off the model itself, which is asked for its cache on a short sequence.

Left out: models in stages, generators with weights in another dtype, their workspace and graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dsx_zero
import torch

from .engine import BuiltEngine
from .errors import PlanError
from .ledger import DEVICE, HOST, Ledger

__all__ = ["Generator", "replay_phases"]

_PROBE = 8
"""Tokens of the sequence on which the model is asked for its cache."""


@dataclass(frozen=True)
class Generator:
    """The generator beside the training, and how weights go to it.

    Attributes:
        tokens: of all sequences, whose keys and values it holds on one device at a time.
        ranks: that divide its weights and its cache (tensor parallelism); 0: it has devices of its own.
        bucket_bytes: of a push.
    """

    tokens: int = 0
    ranks: int = 1
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name, least in (("tokens", 0), ("ranks", 0), ("bucket_bytes", 1)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise PlanError(f"generator {name}: got {value!r}, expected a number of at least {least}")


def replay_phases(
    built: BuiltEngine, ledger: Ledger, batch: Any, generator: Generator, notes: list[str]
) -> dict[str, dict[str, int]]:
    """Bytes on the device by phase and class, at each phase's peak.

    Args:
        built: an engine that has been trained, between two steps.
        ledger: which has recorded the peak of a step.
        batch: of the model; with `input_ids` its cache is asked for.
        generator: beside it.
        notes: they get what the reader should know.
    """
    found = {"train": dict(ledger.peaks[DEVICE].classes)}
    shards = built.shards
    whole = sum(info.numel * info.dtype.itemsize for info in shards.runtime.infos)
    beside = {"generator": -(-whole // generator.ranks)} if generator.ranks else {}
    with ledger.apart():
        cache = _bytes_per_token(built, ledger, batch, notes) if generator.ranks and generator.tokens else 0.0
        shards.offload_states()
        _count_on_host(shards, ledger)
        ledger.reset_peaks()
        found["sleep"] = dict(ledger.peaks[DEVICE].classes)
        for _ in dsx_zero.export.weight_buckets(shards, bucket_bytes=generator.bucket_bytes):
            pass
        push = dict(ledger.peaks[DEVICE].classes)
        shards.reload_states()
    keys = round(cache * generator.tokens / max(1, generator.ranks))
    found["generate"] = {**found["sleep"], **beside, **({"keys and values": keys} if keys else {})}
    found["push"] = {**push, **beside}
    return found


def _count_on_host(shards: dsx_zero.ZeroOptimizer, ledger: Ledger) -> None:
    """Count what sleeps as host memory. A function of its own, so that no name keeps a copy alive."""
    for moved in shards.moved.stashes.values():
        for stash in moved.stashes.values():
            ledger.move(stash.reading(), "states", HOST)


def _bytes_per_token(built: BuiltEngine, ledger: Ledger, batch: Any, notes: list[str]) -> float:
    """Bytes of keys and values of one token, on all ranks of a generator together."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    cache: Any = None
    if tokens is not None:
        with torch.no_grad():
            cache = getattr(built.engine(input_ids=tokens[:1, :_PROBE], use_cache=True), "past_key_values", None)
    if cache is None:
        notes.append("the model gives no keys and values (past_key_values), so that its generator is planned without")
        return 0.0
    held = ledger.total[DEVICE]
    length = min(_PROBE, tokens.shape[1])
    del cache
    return (held - ledger.total[DEVICE]) / length
