"""`deepspeed.initialize`, `DeepSpeedConfig`, `zero.Init` and `zero.GatheredParameters`: dsx's, as DeepSpeed's callers
call them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dsx
import dsx.zero
import dsx_comm
import dsx_zero
from dsx.config import load_config

from .engine import renamed
from .settings import client_config

__all__ = ["DeepSpeedConfig", "GatheredParameters", "Init", "initialize"]


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
    """`dsx.initialize`; the engine has DeepSpeed's names besides (`engine.DeepSpeedEngine`).

    Args:
        model_parameters: as for `dsx.initialize`; an empty iterable means that nothing is trained.

    Returns:
        Engine, optimizer, data loader and scheduler; None for what there is not.
    """
    parameters = None if model_parameters is None else list(model_parameters)
    found = dsx.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=parameters or None,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=client_config(config),
        mesh_param=mesh_param,
        config_params=client_config(config_params),
    )
    engine = renamed(found[0])
    return engine, engine.optimizer, found[2], found[3]


def DeepSpeedConfig(config: Any, mpu: Any = None, mesh_device: Any = None) -> Any:
    """The configuration, read and checked: a `dsx.config.Config` for the data-parallel ranks there are."""
    if mpu is not None:
        ranks = mpu.get_data_parallel_world_size()
    elif dsx_comm.is_initialized():
        ranks = dsx_comm.parallel_groups.get_data_parallel_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return load_config(client_config(config), world_size=ranks)


class Init(dsx.zero.Init):
    """`dsx.zero.Init`; of a configuration that a client has filled in, what has no effect is left out."""

    def __init__(self, module: Any = None, *args: Any, **kwargs: Any) -> None:
        for name in ("config_dict_or_path", "config"):
            if isinstance(kwargs.get(name), Mapping):
                kwargs[name] = client_config(kwargs[name])
        super().__init__(module, *args, **kwargs)


GatheredParameters = dsx_zero.GatheredParameters
