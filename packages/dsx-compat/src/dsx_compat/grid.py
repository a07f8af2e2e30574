"""DeepSpeed's names of the grid of ranks, and the `PipelineModule` whose grid has them.

The groups are those of `dsx_pipe.RankGrid`. The names serve as an `mpu`: engines and Megatron-style models ask it.
"""

from __future__ import annotations

import dsx_pipe
from dsx_pipe import RankGrid

from .refusing import RefusingClass
from .unsupported import UNSUPPORTED_PIPELINE_MEMBERS

__all__ = ["PipelineModule", "PipelineParallelGrid", "renamed"]


class PipelineParallelGrid(RankGrid):
    """This rank's coordinates and groups. All ranks of the world construct it together.

    Args and further attributes: as for `dsx_pipe.RankGrid`.

    Attributes:
        stage_id, data_parallel_id: this rank's stage, and its place among the copies of it.
        pipe_parallel_size, data_parallel_size, model_parallel_size, slice_parallel_size: lengths of the axes.
        is_first_stage, is_last_stage: whether this rank is the first or the last of its pipeline.
        p2p_groups: global ranks of each pair of neighbouring stages; the last and the first stage are a pair too.
    """

    @property
    def stage_id(self) -> int:
        """Pipeline stage of this rank."""
        return self.pipe.rank

    @property
    def data_parallel_id(self) -> int:
        """Data-parallel coordinate of this rank."""
        return self.data.rank

    @property
    def pipe_parallel_size(self) -> int:
        """Number of stages."""
        return self.pipe.size

    @property
    def data_parallel_size(self) -> int:
        """Number of copies of each stage."""
        return self.data.size

    @property
    def model_parallel_size(self) -> int:
        """Number of slices of each stage."""
        return self.model.size

    slice_parallel_size = model_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first of its pipeline."""
        return self.pipe.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last of its pipeline."""
        return self.pipe.rank == self.pipe.size - 1

    @property
    def p2p_groups(self) -> list[list[int]]:
        """Global ranks of each pair of neighbouring stages, in all pipelines."""
        lists = self.topology.get_axis_comm_lists("pipe") if self.pipe.size > 1 else []
        return [sorted((ranks[i], ranks[(i + 1) % len(ranks)])) for ranks in lists for i in range(len(ranks))]

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Global rank of a stage of this pipeline. Other coordinates (data=, model=) choose another pipeline."""
        place = self.topology.get_coord(self.global_rank)._asdict()
        return self.topology.get_rank(**{**place, "pipe": stage_id, **coordinates})

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

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = RankGrid.get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Rank among the copies of this stage."""
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Number of copies of this stage."""
        return self.data.size

    def get_data_parallel_src_rank(self) -> int:
        """Global rank of the first copy."""
        return self.data.ranks[0]

    def get_model_parallel_rank(self) -> int:
        """Rank among those that hold parts of one copy of the model: stages and slices together, as in DeepSpeed."""
        return self.whole_model.rank

    def get_model_parallel_world_size(self) -> int:
        """Number of stages times number of slices."""
        return self.whole_model.size

    def get_slice_parallel_rank(self) -> int:
        """Rank among the slices of this stage."""
        return self.model.rank

    def get_slice_parallel_world_size(self) -> int:
        """Number of slices of this stage."""
        return self.model.size

    def get_slice_parallel_src_rank(self) -> int:
        """Global rank of the first slice."""
        return self.model.ranks[0]

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = RankGrid.get_slice_parallel_group
    get_tensor_model_parallel_src_rank = get_slice_parallel_src_rank


def renamed(module: dsx_pipe.PipelineModule) -> None:
    """Give a pipeline that dsx has made itself, as the configuration asks, the class and the grid with these names."""
    if type(module) is dsx_pipe.PipelineModule:
        module.__class__ = PipelineModule
    if type(module.grid) is RankGrid:
        module.grid.__class__ = PipelineParallelGrid


class PipelineModule(dsx_pipe.PipelineModule, metaclass=RefusingClass):
    """`dsx_pipe.PipelineModule`, whose `mpu()` and `grid` are a `PipelineParallelGrid`."""

    _refused, _shown = UNSUPPORTED_PIPELINE_MEMBERS, "PipelineModule"
    grid_type = PipelineParallelGrid
