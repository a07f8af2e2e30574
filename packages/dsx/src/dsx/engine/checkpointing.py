"""The engine's checkpointer: saves the sharded tensors and the training state to a folder, and loads them.

`dsx.checkpoint` handles the tensors and the files. This part adds the training state (`live_state.py`), agrees with
the other ranks on folder and tag, and decides which parts of a checkpoint are restored.

A load changes nothing until every rank has read and verified everything it needs. Then the small parts are restored,
whose changes can be undone, and last the tensors.

Some state belongs to one rank alone: random states, the position of a loader that counts samples per rank, objects
registered with `per_rank=True`. It is restored if as many ranks load as have saved; otherwise it starts new, and a log
line says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx_core import with_code

from ..utils.logging import logger
from .errors import EngineArgumentError
from .live_state import LiveState, Rest, Wanted
from .registered import ShardsWithCopies
from .stepper import StepGate
from .training_state import Undo

if TYPE_CHECKING:
    from dsx_checkpoint.loading import LoadDisks
    from dsx_checkpoint.writing import PlannedSave
    from dsx_zero import ZeroOptimizer
    from torch import nn

    from ..config.training import Checkpoint

__all__ = ["Checkpointer"]


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one engine's model, optimizer and training state.

    Attributes:
        module: the sharded model; its persistent buffers are saved.
        shards: the sharded state: parameters, fp32 master weights and optimizer states.
        live: the objects of the engine that have training state.
        settings: the `checkpoint` section.
        gate: stops all ranks together between two updates.
        places: the place (`dsx.checkpoint.Place`) of each tensor of which this rank holds only a part, because of model
            parallelism.
        gather: gathers parameters, and writes back the values that rank 0 has changed.
    """

    module: nn.Module
    shards: ZeroOptimizer
    live: LiveState
    settings: Checkpoint
    gate: StepGate
    gather: Callable[..., AbstractContextManager[Any]]
    places: Mapping[str, Any] = field(default_factory=dict)

    _behind: list[Any] = field(default_factory=list)
    _rest: list[Rest] = field(default_factory=list)

    @property
    def _ranks(self) -> Any:
        # Lazy import: training without checkpoints does not need the format.
        from dsx_checkpoint.ranks import default_ranks

        return default_ranks() if self._disks is None else self._ranks_of_own

    @functools.cached_property
    def _ranks_of_own(self) -> Any:
        """A group of ranks that can send host memory to each other. All ranks make it together, at the first save."""
        from dsx_checkpoint.ranks import ranks_of_own

        return ranks_of_own()

    @functools.cached_property
    def _disks(self) -> Any:
        """The disks of the nodes, if each node has its own folder; None if all ranks see the same folder."""
        if not self.settings.use_node_local_storage:
            return None
        from dsx_checkpoint.nodes.disks import NodeDisks

        return NodeDisks.find(self._ranks_of_own)

    @functools.cached_property
    def behind(self) -> Any:
        """Writes saves while training goes on (`dsx_checkpoint.behind.WriteBehind`); made when it is first needed."""
        from dsx_checkpoint.behind import WriteBehind
        from dsx_checkpoint.ranks import ranks_of_own

        def surface(error: Exception, ranks: Any) -> None:
            self.gate.agree(ranks, made.raise_failures)

        made = WriteBehind(self.settings.max_in_flight, ranks=ranks_of_own, report=surface)
        self._behind.append(made)
        return made

    def wait(self) -> None:
        """Wait until every save is on disk and older ones are gone. Raises `CheckpointError` if a save failed."""
        for behind in self._behind:
            behind.wait()
        self._wait_for_removals()

    def close(self) -> None:
        """Wait for the saves in flight, and end their thread. Raises `CheckpointError` like `wait`."""
        for behind in self._behind:
            behind.close()
        self._wait_for_removals()

    def _wait_for_removals(self) -> None:
        if self.settings.keep_last is not None:
            from dsx_checkpoint.keeping import Keeping

            Keeping.wait()

    def note_rest(self, loader: Any) -> None:
        """Keep data position and random states for a save between this update and the next one. When a signal arrives,
        the next batch may have been read already.
        """
        self._rest[:] = [Rest.take(loader)]

    # - Saving

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: dict[str, Any],
        *,
        loader: Any,
        latest: bool,
        exclude_frozen: bool,
        asynchronous: bool | None = None,
        at_rest: bool = False,
    ) -> str:
        """Save. Collective. Returns the folder that was written, or will be.

        Args:
            loader: the training loader; None without one.
            asynchronous: write while training goes on; None: as the configuration says.
            at_rest: use the data position and random states of `note_rest`.
        """
        behind = self.behind if (self.settings.asynchronous if asynchronous is None else asynchronous) else None
        self.wait() if behind is None else behind.raise_failures()
        wanted = f"global_step{self.live.counters.global_steps}" if tag is None else str(tag)
        tag = self._agreed_tag(save_dir, wanted, client_state)
        rest = None if at_rest and self._rest else Rest.take(loader)
        planned = self.plan(save_dir, tag, client_state, rest=rest, latest=latest, exclude_frozen=exclude_frozen)
        if behind is None:
            return str(planned.run(self._ranks))
        behind.submit(planned, self._ranks)
        return str(planned.target)

    def plan(
        self,
        save_dir: str | os.PathLike[str],
        tag: str,
        client_state: dict[str, Any],
        *,
        rest: Rest | None = None,
        latest: bool = True,
        exclude_frozen: bool = False,
    ) -> PlannedSave:
        """Plan a save: everything is decided, and nothing is written. Collective.

        Args:
            rest: data position and random states; None: those of `note_rest`, or the present ones if there are none.
        """
        from dsx_checkpoint.keeping import Keeping
        from dsx_checkpoint.writing import plan_save

        self.shards.synchronize()  # with some optimizers the ranks' parameters differ between two steps
        rest = rest or (self._rest[0] if self._rest else Rest.take(None))
        return plan_save(
            save_dir,
            tag,
            module=self.module,
            slices=map(self._to_write, self._with_copies.slices(lazily=True)),
            state={"engine": self.live.take(rest).to_dict(), "client": client_state},
            rank_state={
                "random": rest.random, "data": rest.rank_data, "objects": self.live.registered.states(per_rank=True)
            },
            ranks=self._ranks,
            places=self.places,
            exclude_frozen=exclude_frozen,
            save_latest=latest,
            keeping=Keeping(self.settings.keep_last, self.settings.keep_every),
            disks=self._disks,
        )  # fmt: skip

    @property
    def _with_copies(self) -> Any:
        copies = self.live.registered.copies()
        return ShardsWithCopies(self.shards, copies) if copies else self.shards

    def _to_write(self, part: Any) -> Any:
        """The part of a parameter that this rank writes: nothing if another rank's copy counts (weights that
        stages share). Each stage cuts its copy in its own way, so the pieces of several copies are not one tensor.
        """
        ranks = self.shards.layout.group_of(part.name).ranks
        return part if ranks.size == 1 or ranks.counts_in_norm else part.without_elements()

    def _agreed_tag(self, save_dir: Any, tag: str, client_state: Any) -> str:
        """Rank 0's tag. If other ranks have another tag, that is ignored, warned about or refused, as configured."""
        from dsx_checkpoint import CheckpointArgumentError
        from dsx_checkpoint.folder import check_folder, check_tag

        def checked() -> str:
            check_folder(save_dir, "save_dir")
            if not isinstance(client_state, dict):
                raise CheckpointArgumentError(f"client_state: got {type(client_state).__name__}, expected a dictionary")
            return check_tag(tag)

        tags = self._ranks.run("save_checkpoint", checked)
        if len(set(tags)) == 1:
            return tag
        message = f"save_checkpoint: ranks save under different tags: {dict(enumerate(tags[:10]))}"
        policy = self.settings.tag_validation.lower()
        if policy == "fail":
            raise EngineArgumentError(f"{message}; pass the same tag on every rank")
        if policy == "warn":
            logger.warning(with_code("%s; using rank 0's, %r", "DSX552"), message, tags[0])
        return tags[0]

    # - Loading

    def load(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None,
        wanted: Wanted,
        *,
        loader: Any,
        disks: LoadDisks | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load. Collective. Returns folder and client state, or (None, {}) if there is no checkpoint.

        Args:
            disks: the disks of the nodes (`dsx.checkpoint.prepare_load`); None: as the configuration says.
        """
        from dsx_checkpoint import prepare_load
        from dsx_checkpoint.selecting import Selection

        self.wait()
        for held in self.live.registered.copies():
            held.was_read = False
        prepared = prepare_load(
            load_dir,
            None if tag is None else str(tag),
            module=self.module,
            optimizer=self._with_copies if wanted.only is None else self.shards,
            ranks=self._ranks,
            places=self.places,
            strict=wanted.strict,
            optimizer_states=wanted.optimizer_states,
            selection=Selection(wanted.only, wanted.key_mapping, wanted.padded_vocabulary, wanted.custom is None),
            disks=disks or self._disks,
        )
        if prepared is None:
            logger.warning(with_code("load_checkpoint: %s has no checkpoint", "DSX553"), load_dir)
            return None, {}
        state, rank_state = prepared.loaded.state, prepared.loaded.rank_state
        if rank_state is None and prepared.loaded.saved_by and not wanted.module_only and self.live.rank == 0:
            logger.info(
                "load_checkpoint: saved by %d ranks, now %d: random states and other states of a rank are not loaded",
                prepared.loaded.saved_by, self._ranks.world_size,
            )  # fmt: skip
        with Undo() as undo:
            if not wanted.module_only:
                restore = functools.partial(self.live.restore, state.get("engine"), rank_state, wanted, loader, undo)
                self._ranks.keep(f"restoring the training state of {prepared.loaded.path}", restore)
        prepared.install()
        if wanted.custom is not None:
            self._load_by_hand(prepared.loaded.path, wanted.custom)
        return str(prepared.loaded.path), state.get("client", {})

    def _load_by_hand(self, path: Path, custom: Callable[..., Any]) -> None:
        """Let the caller's function fill the module from the weights. The values on rank 0 are used for all ranks."""
        from dsx_checkpoint.whole import WholeTensors

        def fill() -> None:
            custom(src=WholeTensors.of(path), dst=self.module)

        with self.gather(list(self.module.parameters()), modifier_rank=0):
            self._ranks.keep("load_checkpoint(custom_load_fn=...)", fill)
