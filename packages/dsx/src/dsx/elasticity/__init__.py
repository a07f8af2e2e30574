"""A number of devices that changes: one global batch that many world sizes divide, and runs that go on when it does.

    dsx.elasticity.join("dsx.json")                    # as many ranks take part as share the batch out
    engine, _, loader, _ = dsx.initialize(...)
    dsx.elasticity.resume(engine, "ckpt")              # go on from the newest state; keep it safe from now on

Modules, from data to doing:

    api.py, command.py        `compute_elastic_config` and its errors by DeepSpeed's names; `dsx elastic`
    memory.py                 snapshots in the memory of a node
    peers.py                  snapshots over several nodes, of which any one may be lost
    membership.py             which ranks take part in a round
    notes.py                  what ranks and their agent tell each other
    stragglers.py, runtime.py  a slow node leaves; `resume`, and what happens behind each update

Ranks are started again by torch's elastic agent: `dsx launch --elastic_training`, or torchrun. The arithmetic of
batches is `dsx.elastic_batch`'s, from which the configuration takes batch sizes too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .api import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
)

if TYPE_CHECKING:
    from .membership import Membership, join
    from .runtime import ElasticRun, resume

_LATE = {"Membership": "membership", "join": "membership", "ElasticRun": "runtime", "resume": "runtime"}
"""Needed at run time only: `compute_elastic_config` needs neither torch nor checkpoints."""

__all__ = [
    "ElasticRun",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "Membership",
    "compute_elastic_config",
    "elasticity_enabled",
    "join",
    "resume",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
