"""Connects attention over sequence shards (`dsx_activations`) with the engine: `sequence_parallel_size`.

The ranks of a sequence are data-parallel ranks of ZeRO: they hold the same parameters, whose gradients are averaged
over both, and states are divided over both. They are one rank for the batch arithmetic and for loaders. So the groups
are made first, the model's attention is converted before the model is divided, and the engine gets the handle that cuts
tensors (`Engine.sequence_parallel`).
In a pipeline each stage is converted, and passes on its rank's tokens. Its grid has an axis for sequences, which
`Pipelines` or the caller makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dsx_comm
from dsx_comm import RankSets

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.hooks import StepHook
from .engine.request import Request, joins_others
from .extension import Extension, Watch, Watched
from .pipelining import is_pipeline
from .utils.logging import logger

if TYPE_CHECKING:
    from dsx_activations import SequenceParallel

__all__ = ["Sequences"]


class Sequences(Extension):
    """`sequence_parallel_size`, `mesh_param` and the section `sequence_parallel`."""

    name = "sequence_parallel"
    _parallel: SequenceParallel | None = None

    def prepare(self, keys: Mapping[str, Any], request: Request) -> Request:
        """See `_with_groups`."""
        return _with_groups(keys, request, joins_others(request.dist_init_required))

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Let the model's attention run over the ranks of its sequences, unless the model does so by itself."""
        config.use("sequence_parallel_size")
        groups = topology.groups
        asked = config.sequence_parallel_size > 1 or (request.mesh is not None and request.mesh[1] > 1)
        if not asked or groups is None or groups.size("sequence") == 1:
            return request
        if is_pipeline(request.model):
            _check_loss(request.model)
        section = config.use("sequence_parallel")
        if section.convert:
            import dsx_activations  # lazy import: most programs cut no sequences

            group = groups.axis("sequence").group
            self._parallel = dsx_activations.sequence_parallel(request.model, group, **section.options())
            self._parallel.mean_group = topology.data.group
            if is_pipeline(request.model):
                self._parallel.stages = groups.axis("pipe").group
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Give the engine the handle, which ends with the engine."""
        if self._parallel is not None:
            watch.sequence_parallel = self._parallel
            to.optimizer.control.on_release.append(self._parallel.remove)
            if self._parallel.stages is not None:
                watch.add(_AttentionIsSomewhere(self._parallel))
            logger.info("sequences are cut over %d ranks: %r", self._parallel.size, self._parallel)


def _with_groups(keys: Mapping[str, Any], request: Request, joins: bool) -> Request:
    """The request with an `mpu` whose groups have a sequence axis, if the configuration or `mesh_param` asks for one.
    Collective.

    Args:
        keys: of the configuration as they were written; `load_config` reports their mistakes later.
        joins: whether a process group has to be made.

    Raises:
        EngineArgumentError: the ranks cannot be divided, or the mpu has other groups.
    """
    size, slices = _sizes(keys, request)
    if size <= 1 and request.mesh is None:
        return request
    if joins:
        dsx_comm.init_distributed(distributed_port=request.distributed_port)
    world = dsx_comm.get_world_size() if dsx_comm.is_initialized() else 1
    if is_pipeline(request.model):
        _check_grid(request.model, size)
        return request
    if request.mpu is not None:
        found = dsx_comm.read_mpu(request.mpu).sequence
        if found is None or found.size != size:
            raise EngineArgumentError(
                f"initialize(mpu=...): got {1 if found is None else found.size} ranks for each sequence, expected"
                f" sequence_parallel_size={size}; leave the mpu out, or take the size from it"
            )
        return request
    stages = _stages(keys)
    parts = size * slices * stages
    if world % parts or (request.mesh is not None and request.mesh[0] * parts != world):
        mesh = "" if request.mesh is None else f" and mesh_param {request.mesh}"
        raise EngineArgumentError(
            f"sequence_parallel_size: got {size}{mesh} on {world} ranks, expected that {parts} (sequence x slice"
            " ranks x stages) divides the number of ranks; start a multiple of it"
        )
    if stages > 1:  # the model is cut next, for a grid with all axes
        return dataclasses.replace(request, mesh=(world // parts, size))
    if size == 1 or dsx_comm.parallel_groups.given().size("sequence") == size:
        return request  # groups that the program has made before, for its layers of experts
    axes = ("data", "sequence", "model")
    topology = dsx_comm.ProcessTopology(axes, (world // size // slices, size, slices))
    return dataclasses.replace(request, mpu=dsx_comm.Mpu(dsx_comm.GroupRegistry(topology)))


def _sizes(keys: Mapping[str, Any], request: Request) -> tuple[int, int]:
    """Ranks of a sequence and of a slice."""
    size, slices = keys.get("sequence_parallel_size", 1), keys.get("tensor_parallel")
    sliced = slices.get("autotp_size", 1) if isinstance(slices, dict) else 1
    size = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1
    if request.mesh is not None:
        if size not in (1, request.mesh[1]):
            raise EngineArgumentError(
                f"initialize(mesh_param=...): got {request.mesh[1]} sequence-parallel ranks, expected"
                f" sequence_parallel_size={size} of the configuration; leave one of the two out"
            )
        size = request.mesh[1]
    return size, max(1, sliced) if isinstance(sliced, int) else 1


def _check_grid(module: Any, size: int) -> None:
    """Raise unless the grid of a `PipelineModule` has as many ranks for each sequence."""
    found = module.topology().axis_size("sequence")
    if found != size:
        raise EngineArgumentError(
            f"sequence_parallel_size: got {size} beside a PipelineModule whose grid has {found} ranks for each"
            ' sequence; give it a grid with that axis: PipelineModule(layers, topology=ProcessTopology(("pipe", "data",'
            f' "sequence"), (stages, copies, {size})))'
        )


def _check_loss(module: Any) -> None:
    """Raise if the loss is the one that `dsx_pipe` takes for a Hugging Face model."""
    if getattr(module.loss_fn, "__module__", "") == "dsx_pipe.models":
        raise EngineArgumentError(
            "sequence_parallel_size: the PipelineModule has no loss_fn, and that of a Hugging Face model takes the mean"
            " of a rank's own tokens (and shifts their labels, if it predicts the next token); give PipelineModule a"
            " loss_fn that takes labels shifted before the cut and returns dsx_activations.token_mean(sum, tokens,"
            " dsx_comm.parallel_groups.get_sequence_data_parallel_group())"
        )


class _AttentionIsSomewhere(StepHook):
    """Looks once, before the first update of a pipeline, whether any of its stages has called attention."""

    def __init__(self, parallel: SequenceParallel) -> None:
        self._parallel = parallel

    def after_batch(self) -> None:
        """See `SequenceParallel.check_attention`."""
        self._parallel.check_attention()


def _stages(keys: Mapping[str, Any]) -> int:
    section = keys.get("pipeline")
    stages = section.get("stages", 1) if isinstance(section, dict) else 1
    return stages if isinstance(stages, int) else 1
