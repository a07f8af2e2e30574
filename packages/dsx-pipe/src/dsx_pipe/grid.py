"""This rank's groups in a grid of pipe x data x sequence x model ranks.

`ProcessTopology`, `PipeDataParallelTopology` and `PipeModelDataParallelTopology` are dsx_comm's. `RankGrid` makes this
rank's groups over one of them. It can be given as an `mpu`: `dsx_comm.read_mpu` finds the groups in it.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
from dsx_comm import GroupRegistry, ProcessTopology
from dsx_comm.errors import TopologyError
from dsx_comm.registry import AxisGroup
from dsx_comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

from .errors import PipelineError

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "RankGrid",
    "topology_for",
]


def topology_for(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """The grid for `num_stages` or `topology`, of which exactly one is given.

    Ranks that a launcher started join a process group first, if there is none (`dsx_comm.join_launched_ranks`).

    Raises:
        PipelineError: both or none are given, or a process that no launcher started has no process group.
        TopologyError: the world size is not a multiple of the stages, or not the size of the topology.
    """
    if (num_stages is None) == (topology is None):
        raise PipelineError("got both num_stages and topology, or neither of them; expected exactly one")
    if topology is not None:
        world = _world_size()
        if topology.world_size() != world:
            raise TopologyError(f"{topology} has {topology.world_size()} ranks, the world has {world}")
        return topology
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise PipelineError(f"num_stages: got {num_stages!r}, expected a whole number of at least 1")
    world = _world_size()
    if world % num_stages:
        raise TopologyError(
            f"num_stages={num_stages}: the world has {world} ranks, expected a multiple of {num_stages}"
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)


def _world_size() -> int:
    dsx_comm.join_launched_ranks()
    if not dsx_comm.is_initialized():
        raise PipelineError("a pipeline needs a process group: call dsx_comm.init_distributed() first")
    return dsx_comm.get_world_size()


class RankGrid:
    """This rank's coordinates and groups. All ranks of the world construct it together.

    Args:
        topology: the grid; default: one stage, all ranks data-parallel.
        process_group: the world that the grid covers; only the default group is supported.

    Attributes:
        topology: the grid's axes and sizes.
        registry: makes groups along further axes.
        pipe: group of the ranks of this pipeline, one per stage.
        data: group of the ranks that hold the same stage and slice, and have batches of their own.
        sequence: group of the ranks that hold the same stage and slice, and parts of the same sequences; None where the
            grid has no such axis.
        copies: group of all ranks that hold the same stage and slice: `data` and `sequence` together.
        model: group of the ranks that share the slices of one stage ("slice parallel").
        whole_model: group of the ranks that hold parts of one copy of the model, which DeepSpeed and Megatron call
            "model parallel": stages and slices together.
        global_rank, world_size: of the world.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        if process_group is not None and process_group is not dsx_comm.get_world_group():
            raise PipelineError("process_group: a grid covers the default group; leave process_group out")
        self.topology = topology or PipeDataParallelTopology(num_pp=1, num_dp=dsx_comm.get_world_size())
        self.registry = registry = GroupRegistry(self.topology)
        self.pipe, self.data, self.model = (registry.axis(name) for name in ("pipe", "data", "model"))
        self.whole_model = registry.axis("pipe", "model")
        cut = self.topology.axis_size("sequence") > 1
        self.sequence = registry.axis("sequence") if cut else None
        self.copies = registry.axis("data", "sequence") if cut else self.data
        self.global_rank, self.world_size = dsx_comm.get_rank(), dsx_comm.get_world_size()

    def axis(self, *names: str) -> AxisGroup:
        """This rank's group along one or several axes."""
        return self.registry.axis(*names)

    # - what `dsx_comm.read_mpu` asks for

    def get_pipe_parallel_group(self) -> Any:
        """Group of the stages."""
        return self.pipe.group

    def get_data_parallel_group(self) -> Any:
        """Group of the copies of this stage."""
        return self.data.group

    def get_sequence_parallel_group(self) -> Any:
        """Group of the ranks that have parts of the same sequences; None where sequences are not cut."""
        return None if self.sequence is None else self.sequence.group

    def get_sequence_data_parallel_group(self) -> Any:
        """Group of the copies of this stage, over which gradients are averaged, if sequences are cut; else None."""
        return None if self.sequence is None else self.copies.group

    def get_model_parallel_group(self) -> Any:
        """Group of all ranks that hold parts of this copy of the model, as in DeepSpeed: stages and slices together."""
        return self.whole_model.group

    def get_slice_parallel_group(self) -> Any:
        """Group of the slices of this stage."""
        return self.model.group
