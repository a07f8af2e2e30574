"""`save` and `load`: a sharded model and its optimizer in a folder, for any stage and number of ranks.

Each rank writes what it owns, through dsx-checkpoint: whole tensors in safetensors files, complete or absent, with
hashes. What one stage, number of ranks or wrapper has saved, `load` and `dsx_checkpoint.load_training` give to any
other, plain PyTorch, DDP and FSDP2 among them.

Left out: parameters that only some of the data-parallel ranks hold (experts, tensor slices), saves while training
goes on, and retention: `engine.save_checkpoint` of the package dsx has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsx_checkpoint  # gives its names on first use: programs that do not save do not load its modules
import dsx_comm
from torch import nn

from .errors import ZeroOptimizerError, ZeroStateError
from .full_state import check_plain

if TYPE_CHECKING:
    from dsx_checkpoint import Loaded, Ranks

    from .optimizer import ZeroOptimizer

__all__ = ["load", "save"]

_LOAD, _SAVE = "dsx_zero.load", "dsx_zero.save"


def save(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: ZeroOptimizer,
    *,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write model and optimizer to `<directory>/<tag>/` (collective over the ranks of `shard`); returns this path.

    Args:
        directory: a folder that all ranks see.
        tag: the name of this checkpoint, such as "step100".
        model, optimizer: what `dsx_zero.shard` returned.
        state: what the program wants back, such as the step or `scheduler.state_dict()`: numbers, texts, tensors, lists
            and dictionaries. Rank 0's is saved.

    Raises:
        ZeroOptimizerError: the two are not what one call of `shard` returned.
        ZeroStateError: only some ranks hold a tensor, or the optimizer communicates by itself.
        dsx_checkpoint.CheckpointError: the folder cannot be written, or a rank failed; the same on all ranks. The
            checkpoints that were there are as before.
    """
    ranks = _checked(_SAVE, model, optimizer)
    return dsx_checkpoint.save_training(directory, tag, model, optimizer, state=state, ranks=ranks)


def load(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: ZeroOptimizer, *, tag: str | None = None
) -> Loaded | None:
    """Go on from a checkpoint, at any stage and number of ranks (collective over the ranks of `shard`).

    Parameters, master weights, optimizer states and the settings of the parameter groups (if there are as many as were
    saved) become those of the checkpoint. Everything is read and verified before anything is changed.

    Args:
        directory: what `save` was given; also a checkpoint of an engine, or of `dsx_checkpoint.save_training`.
        model, optimizer: what `dsx_zero.shard` returned for the same model.
        tag: the checkpoint; None: the latest.

    Returns:
        What was loaded; its `state` is what `save` was given. None if the folder has no checkpoint.

    Raises:
        ZeroOptimizerError: the two are not what one call of `shard` returned.
        ZeroStateError: only some ranks hold a tensor, or the optimizer communicates by itself.
        dsx_checkpoint.CheckpointError: the checkpoint is damaged or does not fit; the same on all ranks.
    """
    if isinstance(directory, nn.Module):
        raise ZeroOptimizerError(
            f"{_LOAD}: got a model first, expected load(directory, model, optimizer); to fill a model with the weights"
            " in safetensors files use dsx_zero.load_weights(model, path)"
        )
    ranks = _checked(_LOAD, model, optimizer)
    return dsx_checkpoint.load_training(directory, model, optimizer, tag=tag, ranks=ranks)


def _checked(call: str, model: nn.Module, optimizer: Any) -> Ranks:
    """The ranks that save or load together; raises on all of them where one was given something else."""
    run = getattr(optimizer, "runtime", None)
    if run is None:
        raise ZeroOptimizerError(
            f"{call}: got {type(optimizer).__name__} as the optimizer, expected the one that dsx_zero.shard returned;"
            " of an engine use engine.save_checkpoint, without dsx-zero dsx_checkpoint.save_training"
        )

    def check() -> None:
        if run.model is not getattr(model, "_orig_mod", model):  # torch.compile(model)
            raise ZeroOptimizerError(
                "got a model and the optimizer of another model; expected both from one call of dsx_zero.shard"
            )
        check_plain(optimizer)

    dsx_comm.together(run.ranks.group, kinds=(ZeroOptimizerError, ZeroStateError)).keep(call, check)
    from dsx_checkpoint.ranks import default_ranks

    return default_ranks(run.ranks.group)
