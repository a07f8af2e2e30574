"""The arguments of `dsx.initialize`: which take precedence, and which contradict each other.

Mistakes in the arguments or the configuration are found before a process group exists. So every rank raises the same
error, and no rank waits for another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from .engine.errors import EngineArgumentError
from .engine.request import Request
from .siblings import check_siblings

if TYPE_CHECKING:
    from dsx_zero import ZeroOptimizer

    from .data import TrainingLoader
    from .engine import Engine
    from .extension import Extension

# Two signatures, so that an editor knows whether there is a loader to iterate over. The type of the optimizer is not
# optional, because it is None only if neither the configuration nor the caller names one.


@overload
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    extensions: Sequence[Extension] = (),
) -> tuple[Engine, ZeroOptimizer, None, Any]: ...
@overload
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = ...,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    extensions: Sequence[Extension] = (),
) -> tuple[Engine, ZeroOptimizer, TrainingLoader, Any]: ...
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    extensions: Sequence[Extension] = (),
) -> tuple[Engine, ZeroOptimizer, TrainingLoader | None, Any]:
    """Build an engine around `model`. Every rank must call it with equal arguments.

    Args:
        args: parsed command line; its `deepspeed_config` is the configuration if `config` is not given.
        model: the module to train. It is sharded in place; rank 0's values are given to all ranks.
        optimizer: an optimizer over the model's parameters, or a callable from parameters to one; overrides the
            configuration.
        model_parameters: parameters or groups to train, as for an optimizer; None: all parameters of the model. There
            may be none only where no optimizer is made.
        training_data: a dataset; then a loader of this rank's micro-batches is returned.
        lr_scheduler: a scheduler, or a callable from an optimizer to one; overrides the configuration. The engine steps
            it.
        distributed_port: port of rank 0 if a process group has to be made and the environment names none.
        mpu: model-parallel unit; gradients are averaged over its data-parallel group.
        dist_init_required: make a process group; None: only if there is none and a launcher started this process.
        collate_fn: makes a micro-batch from samples.
        config: dictionary (`dsx.Config` makes one that an editor checks), path of a JSON file, or base64 of JSON.
            `config_params` is an older name of it.
        mesh_param: (data-parallel ranks, sequence-parallel ranks): the same as `sequence_parallel_size` in the
            configuration. Or a `DeviceMesh` of the data-parallel ranks, for a model whose parameters are DTensors
            (torch's `parallelize_module`, a `tp_plan`).
        extensions: objects that take part in building the engine (`dsx.Extension`), beside those of installed
            packages.

    Returns:
        `(engine, optimizer, training_dataloader, lr_scheduler)`; a part that does not exist is None.

    Raises:
        DsxConfigError: the configuration is wrong; names path, value, expectation and fix.
        EngineArgumentError: the arguments contradict each other.
    """
    source = config_source(args, config, config_params)
    from .extension import checked_extensions  # lazy import: it needs torch's modules

    checked = checked_extensions(extensions)
    request = Request(
        model=_checked_model(model),
        optimizer=_checked(optimizer, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer"),
        model_parameters=None if model_parameters is None else list(model_parameters),
        lr_scheduler=_checked_scheduler(lr_scheduler),
        training_data=training_data,
        collate_fn=collate_fn,
        mpu=mpu,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        mesh=_checked_mesh(mesh_param),
        device_mesh=mesh_param if _is_device_mesh(mesh_param) else None,
    )
    check_siblings()
    # Lazy import: the wiring imports most sibling packages, which a mistake in the arguments should not wait for.
    from .wiring import build_engine

    engine = build_engine(source, request, checked)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among three arguments of `initialize`.

    Raises:
        EngineArgumentError: there is none, or more than one.
    """
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": from_args,
    }
    present = {name: value for name, value in given.items() if value is not None}
    if len(present) > 1:
        raise EngineArgumentError(
            f"initialize: got the configuration more than once ({' and '.join(present)}), expected it once; leave out"
            " all but one"
        )
    if not present:
        raise EngineArgumentError(
            "initialize: got no configuration; pass config=<dict, path or base64>, or args with deepspeed_config set "
            "(an option --deepspeed_config of the script)"
        )
    (source,) = present.values()
    return source


def _is_device_mesh(mesh: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")  # a program that has one has imported it
    return module is not None and isinstance(mesh, module.DeviceMesh)


def _checked_mesh(mesh: Any) -> tuple[int, int] | None:
    if mesh is None or _is_device_mesh(mesh):
        return None
    sizes = tuple(mesh) if isinstance(mesh, Sequence) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise EngineArgumentError(
            f"initialize(mesh_param=...): got {mesh!r}, expected two numbers: data-parallel ranks and sequence-parallel"
            " ranks; or a DeviceMesh of the data-parallel ranks"
        )
    return sizes


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise EngineArgumentError(f"initialize(model=...): got {type(model).__name__}, expected a torch.nn.Module")
    return model


def _checked(value: Any, name: str, kind: type, expected: str) -> Any:
    if value is None or isinstance(value, kind) or callable(value):
        return value
    raise EngineArgumentError(
        f"initialize({name}=...): got {type(value).__name__}, expected {expected} or a callable that makes one"
    )


def _checked_scheduler(scheduler: Any) -> Any:
    if scheduler is None or callable(scheduler) or callable(getattr(scheduler, "step", None)):
        return scheduler
    raise EngineArgumentError(
        f"initialize(lr_scheduler=...): got {type(scheduler).__name__}, expected an object with step() or a callable"
        " that makes one from an optimizer"
    )
