"""`longest`: the longest sequence that fits, and the settings that reach it.

Settings are tried in an order in which each costs more time than the one before: more ranks for a sequence,
recomputation, its inputs in host memory, sharded parameters, states and parameters in host memory, chunks of attention
in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .answer import RESERVE
from .configs import ready, with_values
from .engine import EngineToPlan, engine_to_plan
from .errors import PlanError
from .machine import Machine
from .models import Batch
from .planner import Asked, Config, MachineLike, Model
from .plans import Plan
from .reaching import Reach, Reached, Setting, climb, described, device_bytes, ladder, speed

__all__ = ["describe_longest", "longest"]

CHUNKS = 8
"""Chunks of attention in host memory."""


def longest(
    model: Model,
    config: Config,
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Callable[[int], Batch] | None = None,
    recompute: bool | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    start: int = 4096,
    report: Callable[[str], object] = lambda text: None,
    engine: EngineToPlan | None = None,
) -> Reached:
    """The longest sequence that can be trained, one sample at a time on each rank.

    Args:
        batch: makes an example of one micro-batch with sequences of a given length; large tensors best on the meta
            device. None: tokens, for models that say how large their vocabulary is.
        recompute: True or False: the model recomputes its blocks, or does not. None: both are tried.
        settings: what is tried: changes of the configuration by dotted path, by name; None: see the module's text.
        start: tokens of the first plan.
        report: hears what is planned.
        others: as for `plan`.

    Raises:
        PlanError: nothing fits, or nothing can be planned.
        DsxConfigError: the configuration is wrong.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise PlanError(f"start: got {start!r}, expected a number of tokens from 1")
    found_engine = engine_to_plan(engine)
    base = found_engine.read(config if isinstance(config, (str, os.PathLike)) else dict(config))
    base = with_values(base, {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1})
    device = Machine.of(machine)

    def plan_of(reach: Reach, length: int) -> Plan:
        given = None if batch is None else batch(length)
        asked = Asked(
            model, world_size, ranks_per_host, device, given, length if batch is None else None, loss, optimizer,
            found_engine,
        )  # fmt: skip
        return asked.plan(with_values(base, reach.values), reach.recompute)

    if settings is None:
        tried = _ladder(base, ready(dict(base), world_size, found_engine).layout, recompute)
    else:
        tried = [Reach(name, dict(values), bool(recompute)) for name, values in settings.items()]
    return climb(
        tried, plan_of, what="a sequence of {} tokens", start=start,
        step_of=lambda reach: 2 * _sequence_ranks(base, reach), room=int(device.memory_bytes * RESERVE),
        chosen=settings is None and recompute is None, report=report,
    )  # fmt: skip


def _sequence_ranks(base: Mapping[str, Any], reach: Reach) -> int:
    return int(with_values(base, reach.values).get("sequence_parallel_size", 1) or 1)


def _ladder(base: Mapping[str, Any], layout: Mapping[str, int], recompute: bool | None) -> list[Reach]:
    whole = layout["data"] * layout["sequence"]
    first: list[Setting] = [(f"each sequence over {whole} ranks", {"sequence_parallel_size": whole})]
    last: list[Setting] = [("attention in chunks that wait in host memory", {"sequence_parallel.host_chunks": CHUNKS})]
    if layout["sequence"] == whole:
        first = []
    return ladder(base, layout["stage"], recompute, first=first, last=last if whole > 1 else ())


def describe_longest(found: Reached) -> str:
    """A table of settings, and the longest sequence, for a terminal."""
    columns = {"device": device_bytes, "tokens/s": speed}
    return described(found, columns, "tokens", "longest sequence: {size} tokens ({what})")
