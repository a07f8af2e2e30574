"""Coordinates and groups of ranks in a grid of pipe x data x model ranks, under DeepSpeed's names.

`ProcessTopology`, `PipeDataParallelTopology` and `PipeModelDataParallelTopology` are dsx_comm's. `PipelineParallelGrid`
makes this rank's groups over one of them. It is also an `mpu`: engines and Megatron-style models ask it for groups.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
from dsx_comm import (
    AxisGroup,
    GroupRegistry,
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TopologyError,
)

from .errors import PipelineError

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
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


class PipelineParallelGrid:
    """This rank's coordinates and groups. All ranks of the world construct it together.

    Args:
        topology: the grid; default: one stage, all ranks data-parallel.
        process_group: the world that the grid covers; only the default group is supported.

    Attributes:
        pipe: group of the ranks of this pipeline, one per stage.
        data: group of the ranks that hold the same stage and slice.
        model: group of the ranks that share the slices of one stage ("slice parallel").
        whole_model: group of the ranks that hold parts of one copy of the model, which DeepSpeed and Megatron call
            "model parallel": stages and slices together.
        is_first_stage, is_last_stage: whether this rank is the first or the last of its pipeline.
        p2p_groups: global ranks of each pair of neighbouring stages; the last and the first stage are a pair too.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        if process_group is not None and process_group is not dsx_comm.get_world_group():
            raise PipelineError("process_group: a grid covers the default group; leave process_group out")
        self._topo = topology or PipeDataParallelTopology(num_pp=1, num_dp=dsx_comm.get_world_size())
        registry = GroupRegistry(self._topo)
        self.registry = registry
        self.pipe, self.data, self.model = (registry.axis(name) for name in ("pipe", "data", "model"))
        self.whole_model = registry.axis("pipe", "model")
        self.global_rank, self.world_size = dsx_comm.get_rank(), dsx_comm.get_world_size()
        self.pipe_parallel_size = self._topo.axis_size("pipe")
        self.data_parallel_size = self._topo.axis_size("data")
        self.model_parallel_size = self.slice_parallel_size = self._topo.axis_size("model")
        self.stage_id, self.data_parallel_id = self.pipe.rank, self.data.rank
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        lists = self._topo.get_axis_comm_lists("pipe") or [[r] for r in range(self.world_size)]
        self.p2p_groups = [
            sorted((ranks[i], ranks[(i + 1) % len(ranks)])) for ranks in lists for i in range(len(ranks))
        ] if self.pipe_parallel_size > 1 else []  # fmt: skip

    @property
    def topology(self) -> ProcessTopology:
        """The grid's axes and sizes."""
        return self._topo

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Global rank of a stage of this pipeline. Other coordinates (data=, model=) choose another pipeline."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**place, "pipe": stage_id, **coordinates})

    def get_stage_id(self) -> int:
        """Pipeline stage of this rank."""
        return self.pipe.rank

    def get_data_parallel_id(self) -> int:
        """Data-parallel coordinate of this rank."""
        return self.data.rank

    def get_global_rank(self) -> int:
        """Rank in the world."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Rank among the stages."""
        return self.pipe.rank

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.pipe.size

    def get_pipe_parallel_group(self) -> Any:
        """Group of the stages."""
        return self.pipe.group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Rank among the copies of this stage."""
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Number of copies of this stage."""
        return self.data.size

    def get_data_parallel_group(self) -> Any:
        """Group of the copies of this stage."""
        return self.data.group

    def get_data_parallel_src_rank(self) -> int:
        """Global rank of the first copy."""
        return self.data.ranks[0]

    def get_model_parallel_rank(self) -> int:
        """Rank among those that hold parts of one copy of the model: stages and slices together, as in DeepSpeed."""
        return self.whole_model.rank

    def get_model_parallel_world_size(self) -> int:
        """Number of stages times number of slices."""
        return self.whole_model.size

    def get_model_parallel_group(self) -> Any:
        """Group of all ranks that hold parts of this copy of the model."""
        return self.whole_model.group

    def get_slice_parallel_rank(self) -> int:
        """Rank among the slices of this stage."""
        return self.model.rank

    def get_slice_parallel_world_size(self) -> int:
        """Number of slices of this stage."""
        return self.model.size

    def get_slice_parallel_group(self) -> Any:
        """Group of the slices of this stage."""
        return self.model.group

    def get_slice_parallel_src_rank(self) -> int:
        """Global rank of the first slice."""
        return self.model.ranks[0]

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
    get_tensor_model_parallel_src_rank = get_slice_parallel_src_rank

    def axis(self, *names: str) -> AxisGroup:
        """This rank's group along one or several axes."""
        return self.registry.axis(*names)
