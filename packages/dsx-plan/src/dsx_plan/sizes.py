"""`largest`: the deepest model that a machine can train, and the placement that reaches it.

The width of a model stays, and blocks are added. Settings are tried in an order in which each costs more time than the
one before: recomputation, its inputs in host memory, sharded parameters, optimizer states and parameters in host
memory, and both on disk. Where the machine does not say how large its disk is (`Machine.disk_bytes`), nothing is too
large for it, and the bytes that must lie there are printed.
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
from .ledger import DISK, HOST
from .machine import Machine
from .models import Batch, Deep, deep
from .planner import Asked, Config, MachineLike
from .plans import Plan
from .reaching import Reach, Reached, Setting, climb, described, device_bytes, ladder, speed
from .text import bytes_text

__all__ = ["describe_largest", "largest"]

_ON_DISK = {"device": "nvme", "nvme_path": "/local_nvme"}


def largest(
    model: Deep,
    config: Config,
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Batch | None = None,
    sequence: int | None = None,
    recompute: bool | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    start: int = 4,
    report: Callable[[str], object] = lambda text: None,
    engine: EngineToPlan | None = None,
) -> Reached:
    """The deepest model of a family that can be trained, one sample at a time on each rank.

    Args:
        model: a function of the number of blocks that makes a model, `file.py:name` or `package.module:name` of one,
            or a folder with a `config.json` of Hugging Face's format, whose number of layers is changed.
        recompute: True or False: the model recomputes its blocks, or does not. None: both are tried.
        settings: what is tried: changes of the configuration by dotted path, by name; None: see the module's text.
        start: blocks of the first plan.
        report: hears what is planned.
        others: as for `plan`.

    Returns:
        What was reached; sizes are numbers of blocks, and `best.plan.parameters` says how many parameters they have.

    Raises:
        PlanError: nothing fits, nothing can be planned, or the model has no number of blocks that can be changed.
        DsxConfigError: the configuration is wrong.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise PlanError(f"start: got {start!r}, expected a number of blocks from 1")
    makers = deep(model)
    found_engine = engine_to_plan(engine)
    base = found_engine.read(config if isinstance(config, (str, os.PathLike)) else dict(config))
    base = with_values(base, {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1})
    device = Machine.of(machine)

    def plan_of(reach: Reach, blocks: int) -> Plan:
        asked = Asked(
            makers(blocks), world_size, ranks_per_host, device, batch, sequence, loss, optimizer, found_engine
        )  # fmt: skip
        return asked.plan(with_values(base, reach.values), reach.recompute)

    if settings is None:
        tried = ladder(base, ready(dict(base), world_size, found_engine).layout["stage"], recompute, last=_disk(base))
    else:
        tried = [Reach(name, dict(values), bool(recompute)) for name, values in settings.items()]
    return climb(
        tried, plan_of, what="a model of {} blocks", start=start, step_of=lambda reach: 1,
        room=int(device.memory_bytes * RESERVE), chosen=settings is None and recompute is None, report=report,
    )  # fmt: skip


def _disk(base: Mapping[str, Any]) -> list[Setting]:
    zero = base.get("zero_optimization") or {}
    found: list[Setting] = []
    for word, key in (("optimizer states", "offload_optimizer"), ("parameters", "offload_param")):
        if (zero.get(key) or {}).get("device") != "nvme":
            found.append((f"{word} on disk", {f"zero_optimization.{key}": _ON_DISK}))
    return found


def describe_largest(found: Reached) -> str:
    """A table of settings, and the largest model, for a terminal. Bytes of host and disk are those of one host."""

    def of_host(tier: str) -> Callable[[Plan], str]:
        return lambda plan: bytes_text(plan.ranks_per_host * plan.peak.get(tier, 0))

    columns = {
        "parameters": lambda plan: f"{plan.parameters / 1e9:,.2f} B", "device": device_bytes, "host": of_host(HOST),
        "disk": of_host(DISK), "tokens/s": speed,
    }  # fmt: skip
    best = found.best.plan
    whole = f", {best.parameters / 1e9:,.2f} B parameters" if best else ""
    return described(found, columns, "blocks", f"largest model: {{size}} blocks{whole} ({{what}})")
