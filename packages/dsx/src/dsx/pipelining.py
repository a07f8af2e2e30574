"""Connects `dsx_pipe` with the engine: for a `PipelineModule` that is given to `dsx.initialize`.

The module has the grid of ranks (which is the `mpu`), the schedule and the weights that stages share. This file passes
them to the engine, and gives the runtime the functions of `dsx_zero` and `dsx_comm` that it needs. If the configuration
asks for stages (`pipeline.stages`) or tensor slices (`tensor_parallel.autotp_size`), an ordinary model is cut first,
because the grid determines how the batch is divided.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import dsx_comm
import dsx_zero
import torch
from dsx_comm import RankSets
from dsx_zero.homes.freed_memory import keep_freed_blocks
from torch import nn

from .config import Config
from .engine.engine import Engine
from .engine.errors import EngineArgumentError
from .engine.parts import EngineParts
from .engine.pipeline import PipelineEngine, PipelineParts
from .engine.request import Request, joins_others
from .engine.shared_weights import SharedWeights, shared_weight_ranks
from .extension import Extension, Watch, Watched
from .utils.logging import logger

__all__ = ["Pipelines", "is_pipeline", "rank_sets", "with_parallelism"]


class Pipelines(Extension):
    """The sections `pipeline` and `tensor_parallel`, and a `PipelineModule` that the script has made."""

    name = "pipeline"

    def prepare(self, keys: Mapping[str, Any], request: Request) -> Request:
        """See `with_parallelism`."""
        request = with_parallelism(keys, request, joins_others(request.dist_init_required))
        self._model = request.model
        return request

    def configured(self, config: Config) -> None:
        """Record which sections have had their effect: they were read before the configuration was loaded."""
        if config.tensor_parallel.autotp_size > 1:
            config.use("tensor_parallel")
        if is_pipeline(self._model) or config.pipeline.stages == 1:
            config.use("pipeline")

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Make each layer of a stage a unit of ZeRO."""
        if not is_pipeline(request.model):
            return request
        prepare(request.model)
        return dataclasses.replace(request, ranks_of=rank_sets(request.model, topology))

    def join(self, watch: Watch, to: Watched) -> None:
        """Let the engine be one of a pipeline."""
        if is_pipeline(to.module):
            watch.make_engine = build


def is_pipeline(model: nn.Module) -> bool:
    """Whether a model is divided into stages. `dsx_pipe` is not imported for this: without it no such model exists."""
    pipe = sys.modules.get("dsx_pipe")
    return pipe is not None and isinstance(model, pipe.PipelineModule)


def with_parallelism(keys: Mapping[str, Any], request: Request, joins: bool) -> Request:
    """The request with the model cut as the configuration asks, and the grid of the ranks as its `mpu`. Collective.

    Args:
        keys: of the configuration as they were written; `load_config` reports their mistakes later.
        joins: whether a process group has to be made.

    Raises:
        EngineArgumentError: an `mpu` has other groups than the configuration asks for, an optimizer or parameters
            cannot be given the parameters of the cut model, or the ranks cannot be divided.
    """
    pipeline, slices = _sections(keys)
    stages = pipeline.stages if pipeline is not None and pipeline.stages != "auto" else 1
    sliced = slices.autotp_size if slices is not None else 0
    if is_pipeline(request.model):
        _apply(pipeline, stages, request.model)
        if sliced > 1:
            raise EngineArgumentError(
                f"tensor_parallel.autotp_size: got {sliced} beside a PipelineModule, whose layers exist already; slice"
                " the model with dsx.pipe.tensor.slice_model before, and give PipelineModule a topology with a model"
                " axis"
            )
        return _with_grid(request)
    if stages <= 1 and sliced <= 1:
        return request
    import dsx_pipe  # lazy import: most programs have no pipeline

    if joins:
        dsx_comm.init_distributed(distributed_port=request.distributed_port)
    world, parts = dsx_comm.get_world_size() if dsx_comm.is_initialized() else 1, stages * max(1, sliced)
    if request.mpu is not None:
        _check_mpu(request.mpu, stages, sliced, world)
    if world % parts:
        raise EngineArgumentError(
            f"pipeline.stages={stages}, tensor_parallel.autotp_size={sliced}: got {world} ranks, expected a multiple of"
            f" {parts}"
        )
    names = _check_old_parameters(request, stages)
    if stages > 1 and request.model_parameters:  # all of them, but those of the uncut model
        request = dataclasses.replace(request, model_parameters=None)
    shared = 1 if stages <= 1 or request.mesh is None else request.mesh[1]  # ranks of one sequence (`sequences.py`)
    sizes = {"pipe": stages, "data": world // parts // shared, "sequence": shared, "model": max(1, sliced)}
    topology = dsx_comm.ProcessTopology(tuple(sizes), tuple(sizes.values()))
    model, grid = request.model, request.mpu or dsx_pipe.RankGrid(topology)
    if slices is not None and sliced > 1:
        ranks = dsx_comm.read_mpu(grid).model if request.mpu is not None else grid.model
        _make_equal(model, ranks)
        from dsx_pipe.tensor import slice_model  # lazy import: only slices need it

        model = slice_model(model, ranks.group, **slices.slice_options())
    if pipeline is not None and stages > 1:
        options = {key: value for key, value in pipeline.module_options().items() if key != "num_stages"}
        model = dsx_pipe.PipelineModule(model, topology=topology, **options)
        grid = model.mpu()
    else:
        request = _over_new_parameters(request, names, dict(model.named_parameters(remove_duplicate=False)))
    return dataclasses.replace(request, model=model, mpu=grid)


def _sections(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The two validated sections of a configuration; None for a section that is missing or wrong."""
    if not isinstance(data.get("pipeline"), dict) and not isinstance(data.get("tensor_parallel"), dict):
        return None, None
    from dsx_pipe.config import Pipeline, TensorParallel  # lazy import: pydantic
    from pydantic import ValidationError

    found: list[Any] = []
    for name, kind in (("pipeline", Pipeline), ("tensor_parallel", TensorParallel)):
        try:
            found.append(kind.model_validate(data[name]) if isinstance(data.get(name), dict) else None)
        except ValidationError:
            found.append(None)
    return found[0], found[1]


def _apply(pipeline: Any, stages: int, module: Any) -> None:
    """Apply the section to a module that the script has made."""
    if pipeline is None:
        return
    if pipeline.stages != "auto" and stages != module.num_pipeline_stages():
        raise EngineArgumentError(
            f"pipeline.stages: got {stages}, and the PipelineModule has {module.num_pipeline_stages()} stages; make"
            ' them equal, or write "auto"'
        )
    options = pipeline.module_options()
    made = {"schedule": module.schedule, "chunks": len(module.stage_modules)}
    for key, has in made.items():
        if key in options and options[key] != has:
            raise EngineArgumentError(
                f"pipeline.{key}: got {options[key]!r}, and the PipelineModule was made with {has!r}; give"
                f" PipelineModule({key}=...), or leave the key out"
            )
    if "activation_checkpoint_interval" in options:
        module.set_checkpoint_interval(options["activation_checkpoint_interval"])
    if "activation_checkpoint_func" in options:
        module.set_checkpoint_function(options["activation_checkpoint_func"])
    late = [key for key in ("partition", "seed_layers") if key in pipeline.model_fields_set]
    if late:
        logger.warning("pipeline.%s: the PipelineModule was made before, with its own", ", pipeline.".join(late))


def _check_mpu(mpu: Any, stages: int, sliced: int, world: int) -> None:
    """Raise unless the groups of a given mpu are as many as the configuration asks for."""
    fix = "leave the mpu out, or take the size from it"
    if stages > 1:
        raise EngineArgumentError(
            f"initialize(mpu=...): got one beside pipeline.stages={stages} in the configuration, which makes the"
            " groups; leave out one of the two"
        )
    if not dsx_comm.is_initialized():
        raise EngineArgumentError(
            f"initialize(mpu=...): got a {type(mpu).__name__} and no process group, expected the groups it tells of;"
            " call dsx.init_distributed and make the mpu's groups first"
        )
    found = dsx_comm.read_mpu(mpu)
    sequences = 1 if found.sequence is None else found.sequence.size
    if found.model.size != sliced or found.data.size * sequences * sliced != world:
        raise EngineArgumentError(
            f"initialize(mpu=...): got {found.model.size} model-parallel and {found.data.size} data-parallel ranks,"
            f" expected {sliced} and {world // sliced}: tensor_parallel.autotp_size is {sliced} and there are {world}"
            f" ranks; {fix}"
        )
    if set(found.model.ranks) & set(found.data.ranks) != {dsx_comm.get_rank()}:
        raise EngineArgumentError(
            f"initialize(mpu=...): got the model-parallel ranks {list(found.model.ranks)} and the data-parallel ranks"
            f" {list(found.data.ranks)}, expected that only rank {dsx_comm.get_rank()} is in both; {fix}"
        )


def _check_old_parameters(request: Request, stages: int) -> dict[int, str]:
    """The names of the uncut model's parameters, by id.

    Raises:
        EngineArgumentError: the optimizer or the parameter groups cannot be given the parameters of the cut model.
    """
    names: dict[int, str] = {}
    for name, parameter in request.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    given, optimizer = request.model_parameters or [], request.optimizer
    if stages > 1:
        _check_whole_model(request)
        return names
    held = [p for group in given for p in (group["params"] if isinstance(group, dict) else [group])]
    if isinstance(optimizer, torch.optim.Optimizer):
        held += [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.state:
            raise EngineArgumentError(
                f"initialize(optimizer=...): got a {type(optimizer).__name__} that has states of the whole model, which"
                " tensor_parallel.autotp_size cuts; pass it before its first step, or a callable that makes one"
            )
    if any(id(p) not in names for p in held):
        raise EngineArgumentError(
            "initialize(optimizer=..., model_parameters=...): got a tensor that is no parameter of the model, expected"
            " parameters of the model, which tensor_parallel.autotp_size cuts; leave it out"
        )
    return names


def _check_whole_model(request: Request) -> None:
    """Raise if the request depends on single parameters of a model that is cut into stages."""
    if isinstance(request.optimizer, torch.optim.Optimizer):
        raise EngineArgumentError(
            "initialize(optimizer=...): got an optimizer over the whole model, which the configuration cuts; pass a"
            " callable that makes one from parameters, or name one in the configuration"
        )
    given = request.model_parameters
    if not given:  # an empty list: refused later if an optimizer is to be made
        return
    all_of_them = {id(p) for p in request.model.parameters() if p.requires_grad}
    if not all(isinstance(p, torch.nn.Parameter) for p in given) or not all_of_them <= {id(p) for p in given}:
        raise EngineArgumentError(
            "initialize(model_parameters=...): got groups, or some of the parameters of a model that the configuration"
            " cuts; leave it out and freeze what is not to train"
        )


def _over_new_parameters(request: Request, names: dict[int, str], cut: dict[str, nn.Parameter]) -> Request:
    """The request whose optimizer and parameter groups have the slices in place of the whole parameters."""

    def slices_of(parameters: Any) -> list[nn.Parameter]:
        return list({id(p): p for p in (cut[names[id(old)]] for old in parameters)}.values())

    if isinstance(request.optimizer, torch.optim.Optimizer):
        for group in request.optimizer.param_groups:
            group["params"] = slices_of(group["params"])
    if not request.model_parameters:
        return request
    groups = [
        {**item, "params": slices_of(item["params"])} if isinstance(item, dict) else cut[names[id(item)]]
        for item in request.model_parameters
    ]
    return dataclasses.replace(request, model_parameters=groups)


def _make_equal(model: nn.Module, ranks: Any) -> None:
    """Give all ranks that slice one model the same values: those of the first rank."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.detach().contiguous()
            dsx_comm.broadcast(values, group=ranks.group, group_src=0)
            tensor.copy_(values)


def _with_grid(request: Request) -> Request:
    """The request, with the grid of a `PipelineModule` as its `mpu`."""
    grid: Any = request.model.mpu()  # type: ignore[operator]
    if request.mpu is not None and request.mpu is not grid:
        raise EngineArgumentError(
            f"initialize(mpu=...): got a {type(request.mpu).__name__} beside a PipelineModule, expected none: the grid"
            " of the module is the mpu. Give the topology to PipelineModule"
        )
    return dataclasses.replace(request, mpu=grid)


def prepare(model: nn.Module) -> None:
    """Make each layer of a stage a unit of ZeRO, which is gathered, reduced and freed separately."""
    for child in model.children():
        if next(child.parameters(), None) is not None and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            dsx_zero.set_z3_leaf_module(child, True)


def rank_sets(model: nn.Module, sets: RankSets) -> Any:
    """The argument `ranks_of` of `dsx_zero.shard` for a pipeline."""
    ties = tuple(model.ties.ties)  # type: ignore[union-attr]
    return shared_weight_ranks(sets, ties) if ties else sets


def build(parts: EngineParts) -> Engine:
    """The engine of a pipeline."""
    model: Any = parts.module
    import dsx_pipe  # lazy import: most programs have no pipeline

    # No hook knows whether a stage's parameters are gathered for a separate backward of the weights (decision 0032).
    split = not any(isinstance(p, dsx_zero.PartitionedParameter) for p in model.parameters())
    data = parts.topology.data
    parts.shards.control.defer_failures()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        keep_freed_blocks()  # activations are freed and allocated in every micro-batch
    # All ranks, of all pipelines: they end a failed update with one error.
    ranks = list(range(dsx_comm.get_world_size()))
    everyone = dsx_comm.get_world_group() if device.type == "cpu" else dsx_comm.new_group(ranks, backend="gloo")

    def runtime(parts: EngineParts, micro_batches: int, callbacks: Any) -> Any:
        module: Any = parts.module
        schedule = module.schedule
        if not isinstance(schedule, str) and schedule.micro_batches != micro_batches:
            raise EngineArgumentError(
                f"gradient_accumulation_steps: got {micro_batches}, and the PipelineModule's schedule has "
                f"{schedule.micro_batches} micro-batches; make them equal, or give the schedule by name"
            )
        made = dsx_pipe.Pipeline(
            list(module.stage_modules),  # not the module, which would add up `.grad` of shared weights itself
            schedule,
            module.pipe_group,
            loss_fn=module.loss_fn,
            dynamic_shape=module.dynamic_shape,
            micro_batches=micro_batches,
            device=device,
            nonfinite="ignore" if parts.config.precision.check_overflow else "raise",
            # copies without an error would not take part in the gathers, nor in attention over their tokens
            find_layer=data.size == 1 or (split and module.grid.sequence is None),
            split_backward=split,
            callbacks=callbacks,
            slice_group=module.grid.model.group if module.grid.model.size > 1 else None,
            pipe_partitioned=parts.config.use("pipeline").pipe_partitioned,
            grad_partitioned=parts.config.use("pipeline").grad_partitioned,
            everyone=everyone,
        )
        if made.schedule.splits_backward and not split:
            logger.warning(
                "pipeline schedule %s at ZeRO stage 3: each backward is done whole, because the parameters are not"
                " gathered for a backward of the weights alone; to have them apart, use stage 2, or keep all parameters"
                " gathered between two updates (stage3_param_persistence_threshold above the largest)",
                made.schedule.name,
            )
        return made

    def mean_over_data(loss: torch.Tensor) -> torch.Tensor:
        if data.size > 1:
            dsx_comm.all_reduce(loss, op=dsx_comm.ReduceOp.AVG, group=data.group)
        return loss

    return PipelineEngine(
        parts,
        PipelineParts(
            build=runtime,
            callbacks=dsx_pipe.runtime.StageCallbacks,
            shared=SharedWeights(
                model,
                model.ties.ties,  # type: ignore[union-attr]
                reduce=parts.shards.reduce_gradients,
                sum_over=lambda tensor, group: dsx_comm.all_reduce(tensor, group=group),
                read_gradient=partial(dsx_zero.safe_get_full_grad, optimizer=parts.shards),
                write_gradient=partial(dsx_zero.safe_set_full_grad, optimizer=parts.shards),
                fills_unused=split,
            ),
            mean_over_data=mean_over_data,
            check_update=parts.shards.control.check_step,
        ),
    )
