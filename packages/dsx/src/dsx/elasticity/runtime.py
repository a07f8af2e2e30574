"""Going on after ranks have left or joined: the state of the last update, from the nodes' memories or from disk.

    run = resume(engine, "ckpt", snapshot_every=10, save_every=1000)

Every `snapshot_every` updates the ranks keep a snapshot in the memory of their nodes (`peers.py`), written behind
training. Ranks that are asked to end (because nodes join or leave, or the machine is taken away) take one more after
the update that runs, so that nothing is lost; ranks that are killed cost the updates since the last snapshot, which are
computed again, with the same samples. The agents then start all ranks again, and `resume` finds the newest state.

At another number of ranks the global batch stays, because the section `elasticity` chooses micro-batch and accumulation
for it; random generators cannot go on as they were, and begin a stream that no earlier round has used.

Left out: who takes part (`membership.py`), and starting ranks, which is the agents' work.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dsx_launch.notes import (
    AGENT_VARIABLE,
    BUILT,
    LOADED,
    MEMORY,
    MIN_TIME,
    PROGRESS,
    RESTARTING,
    UPDATED,
    tell_agent,
)

from ..utils.logging import logger
from .api import ElasticityConfigError, ElasticityIncompatibleWorldSize
from .membership import announce_end
from .stragglers import StragglerJudge

if TYPE_CHECKING:
    from dsx_checkpoint.nodes.topology import Nodes

    from ..engine import Engine
    from .memory import NodeMemory
    from .peers import Snapshot

__all__ = ["ElasticRun", "resume"]


def resume(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    snapshot_every: int = 10,
    save_every: int | None = None,
    client_state: Callable[[], dict[str, Any]] | None = None,
    memory: bool | str | os.PathLike[str] = True,
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
    grace_s: float = 15.0,
) -> ElasticRun:
    """Load the newest state there is, and keep it safe from now on. Every rank calls it, once, before training.

    Args:
        engine: what `dsx.initialize` returned.
        folder: of the checkpoints on disk, which all nodes reach; it is made if it is not there.
        snapshot_every: updates between two snapshots in memory.
        save_every: updates between two checkpoints on disk; None: only when the ranks are asked to end.
        client_state: gives a dictionary that is kept with each state; see `ElasticRun.client_state`.
        memory: keep snapshots in /dev/shm; or in this folder, which must lie in memory; False: disk alone.
        signals: upon which all ranks keep their state and end with exit code 75.
        grace_s: seconds after which a rank that was asked to end, and cannot because another rank is gone, ends.

    Raises:
        ElasticityIncompatibleWorldSize: the state was trained with another global batch than this number of ranks gets.
        ElasticityConfigError: an argument is wrong, or checkpoints go to the disks of the nodes.
        dsx.checkpoint.CheckpointError: there is a state, but none that can be loaded.
    """
    for name, value in (("snapshot_every", snapshot_every), ("save_every", save_every)):
        if not (value is None and name == "save_every") and (type(value) is not int or value < 1):
            raise ElasticityConfigError(f"elasticity.resume({name}=...): got {value!r}, expected a positive number")
    if engine._parts.config.checkpoint.use_node_local_storage:
        raise ElasticityConfigError(
            "elasticity.resume: got checkpoint.use_node_local_storage: true, expected false: a node that joins has to"
            " reach the checkpoints; name a folder that all nodes see (snapshots in memory need none)"
        )
    if not grace_s > 0:
        raise ElasticityConfigError(f"elasticity.resume(grace_s=...): got {grace_s!r}, expected seconds above 0")
    run = ElasticRun(engine, Path(folder), snapshot_every, save_every, client_state)
    run._begin(memory, signals, grace_s)
    return run


class _Facts:
    """The facts that an elastic run saves with every state: the global batch, and the number of ranks."""

    def __init__(self, batch: int, ranks: int) -> None:
        self.batch, self.ranks = batch, ranks
        self.loaded_batch, self.loaded_ranks = batch, ranks

    def state_dict(self) -> dict[str, Any]:
        return {"train_batch_size": self.batch, "ranks": self.ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded_batch, self.loaded_ranks = int(state["train_batch_size"]), int(state["ranks"])


class ElasticRun:
    """The run that `resume` returns.

    Attributes:
        source: "memory", "disk", or "" where the training begins.
        path: the folder of the state that was loaded; None where the training begins.
        client_state: what was saved with it.
        received_bytes: how much of it came to this rank from other nodes.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        snapshot_every: int,
        save_every: int | None,
        client_state: Callable[[], dict[str, Any]] | None,
    ) -> None:
        from dsx_checkpoint.ranks import default_ranks

        self.source, self.received_bytes = "", 0
        self.path: Path | None = None
        self.client_state: dict[str, Any] = {}
        self._engine, self._folder = engine, folder
        self._snapshot_every, self._save_every = snapshot_every, save_every
        self._client: Callable[[], dict[str, Any]] = client_state or dict
        self._checkpointer = engine._parts.checkpointer
        self._ranks = default_ranks()
        self._facts = _Facts(engine.train_batch_size(), self._ranks.world_size)
        self._memory: NodeMemory | None = None
        self._behind: Any = None
        self._watch: Any = None
        self._judge = StragglerJudge.of(engine)
        self._in_memory = -1  # the update of the newest snapshot
        self._is_first = True

    # - Beginning

    def _begin(self, memory: bool | str | os.PathLike[str], signals: Sequence[str], grace_s: float) -> None:
        from dsx_checkpoint.behind import WriteBehind
        from dsx_checkpoint.nodes.topology import Nodes
        from dsx_checkpoint.ranks import ranks_of_own

        from ..engine.checkpoints import job_store
        from ..engine.preemption import PreemptionWatch
        from .memory import node_name

        engine = self._engine
        self._nodes: Nodes = Nodes.labelled(self._ranks.gather(node_name()))
        self._tell_agent(BUILT, f"{time.time()}")
        engine.register_for_checkpointing(self._facts, name="elasticity")
        self._open(memory)
        self._load()
        self._tell_agent(LOADED, f"{time.time()} {self.source}".rstrip())
        self._check_batch()
        self._tell_agent(MIN_TIME, str(60 * engine._parts.config.elasticity.min_time))
        if self._memory is not None:
            self._tell_agent(MEMORY, str(self._memory.path))
            self._behind = WriteBehind(1, ranks=ranks_of_own)
        own = ranks_of_own()
        store = job_store() if own.world_size > 1 else None
        self._watch = PreemptionWatch(own, engine._parts.gate, self._keep_and_end, signals, store, grace_s)
        engine.accompany(self)
        self._checkpointer.note_rest(engine.training_dataloader)
        self._snapshot()  # with the nodes there are now: until then some bytes may be on one node alone

    def _open(self, memory: bool | str | os.PathLike[str]) -> None:
        from dsx_checkpoint.errors import CheckpointError

        from .memory import NodeMemory, node_name, remove_leftovers

        if memory is False:
            return
        place, node = (None if memory is True else memory), node_name()
        try:
            self._memory = self._ranks.keep(
                "opening the memory of the node", lambda: NodeMemory.open(self._folder, node, place)
            )
        except CheckpointError as error:
            logger.warning("%s; snapshots are not kept in memory, only on disk", error)
            return
        if self._memory is not None and self._nodes.leads(self._ranks.rank):
            remove_leftovers(self._memory)

    def _load(self) -> None:
        from dsx_checkpoint.errors import CheckpointError

        from .peers import find_snapshots

        ranks, memory = self._ranks, self._memory
        look = self._newest_on_disk if ranks.rank == 0 else (lambda: None)
        on_disk = ranks.run(f"looking for a checkpoint in {self._folder}", look)[0]
        snapshots = [] if memory is None else find_snapshots(ranks, memory, self._nodes)
        for snapshot in snapshots:
            if memory is None or (on_disk is not None and snapshot.step <= on_disk):
                break
            try:
                self._load_from_memory(snapshot, memory)
                return
            except CheckpointError as error:
                logger.warning("%s; looking for an older state", error)
        if on_disk is not None:
            path, state = self._engine.load_checkpoint(self._folder)
            self._loaded("disk", path, state)

    def _newest_on_disk(self) -> int | None:
        """The update of the checkpoint that a load would take; None where there is none."""
        from dsx_checkpoint import CheckpointError, open_checkpoint, resolve_tag
        from dsx_checkpoint.keeping import updates_of

        tag = resolve_tag(self._folder, None)
        if tag is None:
            return None
        try:
            return updates_of(open_checkpoint(self._folder, tag).index.state) or 0
        except CheckpointError as error:
            logger.debug("%s", error)
            return 0  # the load says what is wrong, or takes an older one

    def _load_from_memory(self, snapshot: Snapshot, memory: NodeMemory) -> None:
        from ..engine.live_state import Wanted
        from .peers import NodeFolders, fetch

        engine, parts = self._engine, self._engine._parts
        path, self.received_bytes = fetch(
            self._ranks, snapshot, memory, self._nodes,
            module=parts.module, optimizer=parts.shards, places=parts.checkpointer.places,
        )  # fmt: skip
        _, state = self._checkpointer.load(
            memory.path, path.name, Wanted(), loader=engine.training_dataloader, disks=NodeFolders(self._nodes)
        )
        engine.forget_micro_batches()
        self._loaded("memory", path, state)

    def _loaded(self, source: str, path: Any, state: dict[str, Any]) -> None:
        self.source, self.path, self.client_state = source, Path(path), state
        saved_by = self._facts.loaded_ranks
        if saved_by != self._ranks.world_size:
            _new_random_stream(self._engine.global_steps, self._ranks.rank, self._ranks.world_size)
        if self._ranks.rank == 0:
            logger.info(
                "elasticity: going on after update %d, from %s (%s): %d ranks, %d before; batch %d",
                self._engine.global_steps, source, path, self._ranks.world_size, saved_by, self._facts.batch,
            )  # fmt: skip

    def _check_batch(self) -> None:
        was, now = self._facts.loaded_batch, self._facts.batch
        if was != now:
            raise ElasticityIncompatibleWorldSize(
                f"elasticity: got a batch of {now} samples on {self._ranks.world_size} ranks; expected {was}, with"
                f" which {self.path} was trained; call elasticity.join(config) first, which lets as many ranks take"
                " part as share the batch out, or use the batch settings of that run"
            )

    # - During training

    def after_update(self) -> None:
        """Keep what is due. Called by the engine behind each update."""
        step = self._engine.global_steps
        if self._is_first:
            self._is_first = False
            self._tell_agent(UPDATED, f"{time.time()} {step}")
        if step % self._snapshot_every == 0:
            self._snapshot()
        if self._save_every is not None and step % self._save_every == 0:
            self._engine.save_checkpoint(self._folder, client_state=self._client())
        self._judge.after_update()

    def _snapshot(self, *, now: bool = False) -> None:
        """Keep the state of this update in memory. Without room for it, a warning says so and disk has to do."""
        from dsx_checkpoint.errors import CheckpointError

        memory, step = self._memory, self._engine.global_steps
        if memory is None or step == self._in_memory:
            return
        try:
            planned = self._planned(memory)
            if now:
                self._behind.wait()
                planned.run(self._ranks)
            else:
                self._behind.submit(planned, self._ranks)
        except CheckpointError as error:  # the same on all ranks
            self._forget_memory(error)
            return
        self._in_memory = step
        self._tell_agent(PROGRESS, str(step))

    def _planned(self, memory: NodeMemory) -> Any:
        from .peers import PeerSave

        step = self._engine.global_steps
        planned = self._checkpointer.plan(memory.root, f"step{step}", self._client())
        return PeerSave.of(planned, memory, self._nodes)

    def _forget_memory(self, error: Exception) -> None:
        memory, self._memory = self._memory, None
        if self._ranks.rank == 0:
            logger.warning("%s; no snapshots in memory from now on, only checkpoints on disk", error)
        if memory is not None and self._nodes.leads(self._ranks.rank):
            memory.clear()

    # - Ending

    def _keep_and_end(self) -> str:
        """Save on all ranks after the same update, when they are asked to end. Returns the path of the state."""
        self._snapshot(now=True)
        restarts = all(self._ranks.gather(self._is_restarting()))
        if self._memory is not None and restarts:
            return str(self._memory.path)
        return self._checkpointer.save(
            self._folder, None, self._client(), loader=self._engine.training_dataloader, latest=True,
            exclude_frozen=False, asynchronous=False, at_rest=True,
        )  # fmt: skip

    def _is_restarting(self) -> bool:
        """Whether this node's agent only starts its ranks again, so that the memory of the nodes is enough."""
        folder = os.environ.get(AGENT_VARIABLE)
        return folder is not None and (Path(folder) / RESTARTING).exists()

    def _tell_agent(self, name: str, text: str) -> None:
        if self._nodes.leads(self._ranks.rank):
            tell_agent(name, text)

    def close(self) -> None:
        """End with the engine: wait for what is being written, let waiting ranks end, and free the memory unless it
        has updates that are not on disk.
        """
        from dsx_checkpoint.errors import CheckpointError

        if self._watch is not None:
            self._watch.close()
        if self._behind is not None:
            try:
                self._behind.close()
            except CheckpointError as error:
                self._forget_memory(error)
        if sys.exc_info()[0] is None and self._ranks.rank == 0:
            announce_end()
        self._checkpointer.wait()
        if self._memory is not None and self._nodes.leads(self._ranks.rank) and self._is_on_disk():
            self._memory.clear()

    def _is_on_disk(self) -> bool:
        from dsx_checkpoint.errors import CheckpointError

        try:
            found = self._newest_on_disk()
        except CheckpointError:
            return False
        return found is not None and found >= self._in_memory


def _new_random_stream(step: int, rank: int, world_size: int) -> None:
    """Seed the generators that programs use without naming them, with what no other rank or round has."""
    from dsx_data.randomness import mixed

    seed = mixed((step, rank, world_size, torch.initial_seed())) >> 1
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
