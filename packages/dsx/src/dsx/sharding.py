"""Shards a model as the configuration says, and opens the store for state on disk."""

from __future__ import annotations

from typing import Any

import dsx_comm
import dsx_zero
import torch
from torch import nn

from .config import Config
from .swap_space import SwapSpace, remove_leftovers

__all__ = ["sharded", "store_on_disk"]


def sharded(
    model: nn.Module, optimizer: Any, config: Config, *, ranks_of: Any, device: torch.device | None, store: Any
) -> tuple[nn.Module, dsx_zero.ZeroOptimizer]:
    """The model and its optimizer, divided as the configuration says. Collective.

    Args:
        ranks_of: the argument of `dsx_zero.shard`.
        store: for state on disk; None: a folder, if the configuration names one.
    """
    section = config.use("zero")
    precision, store = config.precision, store_on_disk(config) if store is None else store
    try:
        model, shards = dsx_zero.shard(
            model,
            optimizer,
            ranks_of=ranks_of,
            config=section,
            store=store,
            device=device,
            sparse_gradients=config.use("sparse_gradients"),
            precision=dsx_zero.Precision(
                gradients=precision.dtype("grad_accum"),
                communication=precision.dtype("reduce"),
                master=precision.dtype("master"),
                check_overflow=precision.check_overflow,
            ),
            reduction=dsx_zero.Reduction(
                op=config.use("gradient_allreduce_op"),
                prescale=config.use("prescale_gradients"),
                predivide_factor=config.use("gradient_predivide_factor"),
            ),
        )
    except BaseException:
        if store is not None:
            store.close()
        raise
    if store is not None:
        # The swap space is deleted with the engine, with parameters in it.
        shards.control.on_release.append(store.close)
    return model, shards


def _on_disk(section: Any) -> bool:
    return section is not None and section.device == "nvme"


def store_on_disk(config: Config) -> Any:
    """This rank's store for offload to disk, in its own folder; None if nothing is offloaded to disk."""
    section = config.use("zero")
    paths = {s.nvme_path for s in (section.offload_param, section.offload_optimizer) if _on_disk(s)}
    if not paths:
        return None
    if len(paths) > 1:
        raise dsx_zero.ZeroConfigError(
            "zero_optimization.offload_param.nvme_path",
            f"got {len(paths)} folders for state on disk ({', '.join(sorted(map(str, paths)))}), expected one; give"
            " offload_param and offload_optimizer the same nvme_path",
        )
    rank, world_size = (dsx_comm.get_rank(), dsx_comm.get_world_size()) if dsx_comm.is_initialized() else (0, 1)
    (folder,) = paths
    remove_leftovers(folder, rank, world_size)
    return SwapSpace(folder, f"dsx-rank{rank}", config.use("aio"))
