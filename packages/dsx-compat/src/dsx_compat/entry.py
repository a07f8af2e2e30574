"""`deepspeed.initialize`, `zero.Init` and `zero.GatheredParameters`: those of dsx with DeepSpeed's
signatures.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import dsx
import dsx.zero
import dsx_zero
from dsx.engine import EngineArgumentError
from dsx.entry import config_source

from .accelerate_sizes import with_accelerate_sizes
from .engine import renamed
from .errors import CompatWarning
from .getters import DeepSpeedConfig
from .sequence import convert
from .settings import client_config
from .slicing import with_recorded_slices

__all__ = ["GatheredParameters", "Init", "ModelMissingError", "initialize"]


class ModelMissingError(EngineArgumentError, AssertionError):
    """`initialize` got no model. DeepSpeed raises an AssertionError."""


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """`dsx.initialize`, whose engine also has DeepSpeed's names (`engine.DeepSpeedEngine`).

    All arguments are those of `dsx.initialize`. In a program of Accelerate its `ParallelismConfig` counts too.

    Returns:
        (engine, optimizer, data loader, scheduler); None in place of those that do not exist.

    Raises:
        ModelMissingError: there is no model; it is an AssertionError too, which DeepSpeed raises.
    """
    if model is None:
        raise ModelMissingError("initialize(model=...): got None, expected a torch.nn.Module")
    source = config_source(args, config, config_params)
    source = source.loaded if isinstance(source, DeepSpeedConfig) else client_config(source)
    source = with_accelerate_sizes(source)
    source, mpu = with_recorded_slices(source, model, mpu)
    convert(model, mpu)
    found = dsx.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=source,
        mesh_param=mesh_param,
    )
    engine = renamed(found[0])
    return engine, engine.optimizer, found[2], found[3]


class Init(dsx.zero.Init):
    """`dsx.zero.Init`. Keys of the configuration that have no effect are removed first (`settings`)."""

    def __init__(self, module: Any = None, *args: Any, **kwargs: Any) -> None:
        for name in ("config_dict_or_path", "config"):
            if isinstance(kwargs.get(name), Mapping):
                kwargs[name] = client_config(kwargs[name])
        super().__init__(module, *args, **kwargs)


class GatheredParameters(dsx_zero.GatheredParameters):
    """`dsx_zero.GatheredParameters`; changes without a `modifier_rank` are undone with a warning, not with an error.

    DeepSpeed drops them without a word, and programs rely on it: trl, ms-swift and axolotl merge adapters into gathered
    weights for a generator and unmerge them, which leaves other last digits.
    """

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            super().__exit__(kind, value, trace)
        except dsx_zero.UnownedEditError as error:
            warnings.warn(f"{error} (DeepSpeed drops such changes, too)", CompatWarning, stacklevel=2)
