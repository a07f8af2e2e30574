"""The part of `Engine` that saves and loads checkpoints, and ends the run when the machine is taken away."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .live_state import Wanted
from .preemption import PreemptionWatch

if TYPE_CHECKING:
    from .parts import EngineParts

Folder = str | os.PathLike[str]


class Companion(Protocol):
    """An object that is called between updates on every rank, and is closed with the engine (`Engine.accompany`)."""

    def after_update(self) -> None: ...

    def close(self) -> None: ...


class EngineCheckpoints:
    """Checkpoint methods of `Engine`."""

    _parts: EngineParts
    training_dataloader: Any
    _preemption: PreemptionWatch | None = None
    _companions: tuple[Companion, ...] = ()

    def _living(self) -> EngineParts:
        raise NotImplementedError

    def forget_micro_batches(self) -> None:
        """Restart the current update."""
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: Folder,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool | None = None,
    ) -> str:
        """Save everything that is needed to continue, under `save_dir/tag`; every rank must call it.

        Args:
            tag: name of the checkpoint; None: `global_step<N>`.
            client_state: a dictionary that `load_checkpoint` returns: numbers, text, lists, tuples, dicts, tensors,
                numpy values, `argparse.Namespace`, dtypes and devices. The dictionary of rank 0 is saved.
            save_latest: `load_checkpoint` without a tag loads this checkpoint.
            exclude_frozen_parameters: leave out parameters that are not trained.
            asynchronous: copy to host memory, return, and write while training goes on; None: as
                `checkpoint.asynchronous` says. The folder gets its name when the checkpoint is complete;
                `wait_for_checkpoints` waits for that. An error is raised on all ranks by the same later `step()`, or by
                the next save, `wait_for_checkpoints` or `destroy`.

        Returns:
            The folder that was written, or will be.
        """
        parts = self._living()
        parts.gate.at_rest()
        return parts.checkpointer.save(
            save_dir,
            tag,
            {} if client_state is None else client_state,
            loader=self.training_dataloader,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            asynchronous=asynchronous,
        )

    store_checkpoint = save_checkpoint

    def load_checkpoint(
        self,
        load_dir: Folder,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        load_random_states: bool = True,
        only: Sequence[str] | None = None,
        key_mapping: Mapping[str, str] | None = None,
        padded_vocabulary: Sequence[str] = (),
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint that was saved at any stage and with any number of ranks; every rank must call it.

        With the same number of ranks, the next steps are bitwise identical to those of an uninterrupted run. If no tag
        is given and the latest checkpoint is damaged, the previous one is loaded, with a warning.

        Args:
            tag: the checkpoint's tag; None: the latest.
            load_module_strict: names that do not fit are an error; False: the names that fit are loaded.
            load_optimizer_states, load_lr_scheduler_states: False starts these new.
            load_module_only: load only weights and buffers, and not the counters either.
            custom_load_fn: called as `custom_load_fn(src=weights, dst=module)` to fill the module, instead of loading
                weights by name. `weights` reads each tensor when it is asked for. The values that the function writes
                on rank 0 are used for all ranks. Optimizer states are loaded where names and shapes fit.
            load_random_states: False leaves the random generators unchanged.
            only: regular expressions; tensors that none of them matches stay unchanged and may be missing in the
                checkpoint. For an adapter alone: `only=["lora_"]`.
            key_mapping: regular expression -> replacement, from names in the checkpoint to names in the model.
            padded_vocabulary: regular expressions of tensors that may have another number of rows than in the
                checkpoint; new rows become zeros.

        Returns:
            Folder and client state, or `(None, {})` if there is no checkpoint.
        """
        parts = self._living()
        wanted = Wanted(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            load_random_states,
            only,
            key_mapping or {},
            padded_vocabulary,
            custom_load_fn,
        )
        path, client_state = parts.checkpointer.load(load_dir, tag, wanted, loader=self.training_dataloader)
        if path is not None:
            self.forget_micro_batches()
        return path, client_state

    def wait_for_checkpoints(self) -> None:
        """Wait until every asynchronous save is on disk.

        Raises:
            dsx.checkpoint.CheckpointError: one of them has failed.
        """
        self._living().checkpointer.wait()

    def register_for_checkpointing(self, *objects: Any, name: str | None = None, per_rank: bool = False) -> None:
        """Save and load the state of other objects together with the engine: an average of the weights, a sampler, ...

        Register the same objects in the same order before `load_checkpoint`.

        Args:
            objects: each has `state_dict()`, with values of the kinds that a client state may have, and
                `load_state_dict(state)`.
            name: name of the state in the checkpoint, for a single object; None: its class and a number.
            per_rank: save each rank's state, and restore it if as many ranks load; False: rank 0's state is for all.
        """
        self._living().checkpointer.live.registered.add(objects, name, per_rank)

    def save_on_preemption(
        self,
        save_dir: Folder,
        tag: str | None = None,
        client_state: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
    ) -> None:
        """When one of these signals reaches any rank, save on all ranks after the same update and end the process with
        the exit code 75 (`dsx_launch.exit_codes.RESUME_EXIT_CODE`); every rank must call this, on its main thread.

        The process ends with a `SystemExit` raised from `step()`, `forward` or `train_batch`, so that `finally` blocks
        run. An evaluation under `torch.no_grad()` is interrupted. `dsx launch` passes the exit code on.

        Args:
            save_dir, tag: as for `save_checkpoint`.
            client_state: as for `save_checkpoint`, or a function that returns it at that moment.
            signals: names of signals.
        """
        from dsx_checkpoint.ranks import ranks_of_own

        parts = self._living()
        if self._preemption is not None:
            self._preemption.close()

        def save() -> str:
            state = client_state() if callable(client_state) else client_state
            return parts.checkpointer.save(
                save_dir, tag, state or {}, loader=self.training_dataloader, latest=True, exclude_frozen=False,
                asynchronous=False, at_rest=True,
            )  # fmt: skip

        ranks = ranks_of_own()
        store = job_store() if ranks.world_size > 1 else None
        self._preemption = PreemptionWatch(ranks, parts.gate, save, signals, store)
        parts.checkpointer.note_rest(self.training_dataloader)

    def accompany(self, companion: Companion) -> None:
        """Call `companion.after_update()` after each update, and `companion.close()` when the engine is destroyed.

        For parts of dsx that are built on top of the engine; every rank must call it at the same point.
        """
        self._living()
        self._companions = (*self._companions, companion)

    def _tell_companions(self) -> None:
        """Called when an update is over, if there are companions or a signal to stop for."""
        self._parts.checkpointer.note_rest(self.training_dataloader)
        for companion in self._companions:
            companion.after_update()

    def _close_checkpoints(self) -> None:
        """Restore the signal handlers, and wait for saves in flight."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        companions, self._companions = self._companions, ()
        try:
            for companion in companions:
                companion.close()
        finally:
            self._parts.checkpointer.close()


def job_store() -> Any:
    """The job's store, which holds a few bytes by name and needs no collective."""
    import torch

    return torch.distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateImportUsage]
