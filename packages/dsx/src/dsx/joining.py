"""The processes of an engine: which ranks it has, in which groups, and the device of this one."""

from __future__ import annotations

from contextlib import ExitStack

import dsx_comm
import torch
from dsx_comm import RankSets
from dsx_core.device import Device, accelerator_kind
from dsx_zero.from_dtensors import rank_sets_of

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.request import Request, launched_as

__all__ = ["batch_ranks", "device_of", "join_processes", "rank_sets"]


def batch_ranks(request: Request, topology: RankSets | None) -> int:
    """Number of ranks that get different batches. Without a topology there is no process group yet.

    Raises:
        EngineArgumentError: there is an mpu and no process group.
    """
    if topology is not None:
        return topology.batches[1]
    if request.mpu is not None:
        raise EngineArgumentError(
            f"initialize(mpu=...): got a {type(request.mpu).__name__} and no process group, expected the groups it"
            " tells of; call dsx.init_distributed and make the mpu's groups first"
        )
    return launched_as()[1]


def rank_sets(request: Request, held: ExitStack) -> RankSets:
    """The groups of ranks: those of the mpu, which are in use until `held` is closed, or those given to
    `dsx_comm.parallel_groups.use`. The groups that other engines hold are not meant. Of a device mesh: its ranks, and
    those that hold parts of the model's DTensors.
    """
    if request.device_mesh is not None:
        if request.mpu is not None:
            raise EngineArgumentError(
                "initialize: got an mpu and a DeviceMesh (mesh_param), and each names the data-parallel ranks; give one"
            )
        return rank_sets_of(request.model, request.device_mesh)
    if request.mpu is not None and dsx_comm.is_initialized():
        held.callback(dsx_comm.parallel_groups.hold(request.mpu))
    return dsx_comm.RankSets.current() if request.mpu is None else dsx_comm.RankSets.of_mpu(request.mpu)


def join_processes(config: Config, request: Request, joins: bool, held: ExitStack) -> RankSets:
    if joins:
        dsx_comm.init_distributed(distributed_port=request.distributed_port)
    if config.use("comms_logger").enabled:
        dsx_comm.configure(config=config.comms_logger)
    return rank_sets(request, held)


def device_of(topology: RankSets) -> torch.device | None:
    """This process' device, which is made the current one; None: parameters are not moved."""
    kind = accelerator_kind()
    if kind is None or not _uses(kind, topology):
        return None
    device = Device(kind, topology.local_rank % Device.count())
    device.make_current()
    return device.torch_device


def _uses(kind: str, topology: RankSets) -> bool:
    """Whether the ranks use the backend of this kind of device (or there is only one process)."""
    if not torch.distributed.is_initialized():
        return True
    backend = torch.distributed.get_default_backend_for_device(kind)
    return backend in dsx_comm.get_backend(topology.data.group)
