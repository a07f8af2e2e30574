"""The choice of the ranks that take part: as many as split the global batch evenly; the others wait for the next round.

torch's elastic agent starts as many ranks as there are. A batch of 48 samples in micro-batches of 4 is shared out by 1,
2, 3, 4, 6 or 12 ranks, not by 5. `join` is called by every rank before anything else: the first ranks, as many as suit
the batch, go on and see this number in WORLD_SIZE; the others wait, without a process group, until their agent ends
them for the next round, or the training has ended.

Left out: the number of ranks itself, which the agents' rendezvous decides.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dsx_launch.notes import JOINED, tell_agent

from ..utils.logging import enable_console, logger
from .api import ElasticityConfigError, ElasticityIncompatibleWorldSize, resolve, settings_of

__all__ = ["Membership", "announce_end", "join"]

_ENDED, _SEEN = "dsx_elastic/ended", "dsx_elastic/seen"
_LOOK_EVERY_S = 0.5
_LAST_WAIT_S = 60.0  # a rank that stands by waits so long for its agent after the others' store is gone
_TELL_WAIT_S = 3.0
_STANDBY_VARIABLE = "DSX_ELASTIC_STANDBY"
_SHARED_STORE_SWITCH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Membership:
    """The state of this round of the job.

    Attributes:
        rank, world_size: of those that take part.
        standby: how many ranks wait.
        batch: samples of one update, in every round.
    """

    rank: int
    world_size: int
    standby: int
    batch: int


def join(config: Any) -> Membership:
    """Take part in this round, or wait for the next one. Called by every rank before anything else of dsx or torch.

    Sets WORLD_SIZE to the number of ranks that take part. A rank that does not take part does not return from here: its
    agent ends it when the job changes, else it exits with 0 when the training has ended (`engine.destroy()`).
    A process that no launcher started is a world of its own.

    Args:
        config: the configuration, or the path of its JSON file; with the section `elasticity`.

    Raises:
        ElasticityConfigError: the section is missing, off or contradicts itself.
        ElasticityIncompatibleWorldSize: there are fewer ranks than any that share the batch out.
        ElasticityError: torchrun would give the ranks of a later round the addresses of an earlier one.
    """
    section = _section_of(config)
    batch = resolve(settings_of(section), 0)
    rank, there = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    fitting = [size for size in batch.world_sizes if size <= there]
    if not fitting:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: got {there} ranks; expected at least {batch.world_sizes[0]}: the batch of {batch.batch} is "
            f"shared out by {', '.join(map(str, batch.world_sizes[:20]))}; start more processes, or change"
            " micro_batch_sizes, max_train_batch_size or min_gpus"
        )
    world = max(fitting)
    _check_store()
    _end_with_agent()
    if rank >= world:
        _stand_by(rank, world, there)
    if world != there:
        if rank == 0:
            enable_console()  # the engine would do so, but it is not there yet
            logger.warning(
                "elasticity: %d of %d ranks take part: a batch of %d is not shared out evenly by more; %d wait",
                world, there, batch.batch, there - world,
            )  # fmt: skip
        os.environ["WORLD_SIZE"] = str(world)
    os.environ[_STANDBY_VARIABLE] = str(there - world)
    if os.environ.get("LOCAL_RANK") == "0":
        tell_agent(JOINED, f"{time.time()}")
    return Membership(rank, world, there - world, batch.batch)


def _section_of(config: Any) -> Mapping[str, Any]:
    from ..config.source import read  # lazy import: a process that only imports the package needs none of it

    section = read(config).data.get("elasticity", {})
    if not isinstance(section, Mapping) or not section.get("enabled", False):
        raise ElasticityConfigError(
            'elasticity: got a configuration without it; expected {"elasticity": {"enabled": true, ...}}; add it, or'
            " leave elasticity.join out"
        )
    return section


def _check_store() -> None:
    """torch 2.13 shares the agents' store with the ranks, and gives later rounds what an earlier one left in it: the
    addresses of ranks that are gone, or of a first node that has left. A store of their own avoids that. `dsx launch`
    without elasticity has one round.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "CROSS_RANK" not in os.environ:
        raise ElasticityConfigError(
            f"elasticity.join: the ranks would use their agents' store, in which later rounds find the addresses of"
            f" earlier ones; start torchrun with the variable {_SHARED_STORE_SWITCH}=1, or the job with dsx launch"
            " --elastic_training"
        )


def _end_with_agent() -> None:
    """A rank whose agent was killed would train on alone, or keep the others waiting: the kernel ends it too."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    import ctypes

    agent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != agent:
        os._exit(1)


# - Ranks that wait


def _store() -> Any:
    """A connection to the store of the ranks that take part, which does not count among them."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=5), wait_for_workers=False,
    )  # fmt: skip


def _stand_by(rank: int, world: int, there: int) -> None:
    """Wait until the agent ends this process, or the training has ended. Does not return."""
    enable_console()
    logger.warning("elasticity: rank %d of %d waits for the next round: %d ranks take part", rank, there, world)
    lost_at: float | None = None
    store: Any = None
    known = False
    while lost_at is None or time.monotonic() - lost_at < _LAST_WAIT_S:
        time.sleep(_LOOK_EVERY_S)
        try:
            store = store or _store()
            known, lost_at = True, None
            if store.check([_ENDED]):
                store.add(_SEEN, 1)
                sys.exit(0)
        except RuntimeError:  # not there yet, or gone with the rank that held it
            store = None
            lost_at = (lost_at or time.monotonic()) if known else None
    logger.warning("elasticity: rank %d: the ranks that took part are gone; ending", rank)
    sys.exit(0)


def announce_end() -> None:
    """Let the ranks that stand by end, because the training has ended. On rank 0, while its store is there."""
    waiting = int(os.environ.get(_STANDBY_VARIABLE, "0"))
    if not waiting:
        return
    try:
        store = _store()
        store.set(_ENDED, "1")
        deadline = time.monotonic() + _TELL_WAIT_S
        while time.monotonic() < deadline and store.add(_SEEN, 0) < waiting:
            time.sleep(0.05)
    except RuntimeError as error:
        logger.debug("elasticity: the store does not answer: %s", error)
