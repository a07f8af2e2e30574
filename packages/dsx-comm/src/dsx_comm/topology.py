"""Named axes over ranks: which rank has which coordinates, and which ranks communicate along an axis. Arithmetic only.

    topology = ProcessTopology(axes=("pipe", "data", "model"), dims=(2, 4, 2))
    topology.get_rank(pipe=1, data=0, model=1)      # 9
    topology.get_coord(9).data                      # 0
    topology.get_axis_comm_lists("data")            # [[0, 2, 4, 6], [1, 3, 5, 7], ...]

The first axis varies slowest, the last fastest (row-major), so put the axis that communicates most last. Nothing here
talks to torch.distributed; groups are made from it in `registry.py`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from operator import mul
from typing import Any

from .errors import TopologyError

AXES = ("pipe", "data", "expert", "sequence", "model")  # names that the adapters in `mpu.py` understand


class ProcessTopology:
    """A grid of ranks with named axes. Immutable."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = tuple(axes), tuple(dims)
        if len(self.axes) != len(self.dims) or not self.axes:
            raise TopologyError(f"axes {self.axes} and dims {self.dims}: expected one size per axis, at least one axis")
        if len(set(self.axes)) != len(self.axes) or not all(isinstance(a, str) and a.isidentifier() for a in self.axes):
            raise TopologyError(f"axes: got {self.axes}, expected distinct identifiers")
        if not all(isinstance(d, int) and d >= 1 for d in self.dims):
            raise TopologyError(f"dims: got {self.dims}, expected whole numbers of at least 1")
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)

    def __repr__(self) -> str:
        inner = ", ".join(f"{a}={d}" for a, d in zip(self.axes, self.dims))
        return f"{type(self).__name__}({inner})"

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(reduce(mul, self.dims[i + 1 :], 1) for i in range(len(self.dims)))

    def world_size(self) -> int:
        """Number of ranks."""
        return reduce(mul, self.dims, 1)

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Number of ranks along `axis`; 0 for an axis the grid does not have, as in DeepSpeed (see `axis_size`)."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def axis_size(self, axis: str) -> int:
        """Number of ranks along `axis`; 1 for an axis the grid does not have: this rank alone."""
        return max(1, self.get_dim(axis))

    def get_rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates, one per axis. Raises `TopologyError` for an axis that is missing or
        unknown, and for a coordinate beyond its axis.
        """
        if set(coordinates) != set(self.axes):
            raise TopologyError(f"got coordinates for {sorted(coordinates)}, expected one for each of {self.axes}")
        for axis, at in coordinates.items():
            if not 0 <= at < self.get_dim(axis):
                raise TopologyError(f"{axis}={at}: expected 0 <= {axis} < {self.get_dim(axis)}")
        return sum(coordinates[axis] * stride for axis, stride in zip(self.axes, self._strides))

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, as a named tuple over the axes. Raises `TopologyError` for a rank beyond the
        grid.
        """
        if not 0 <= rank < self.world_size():
            raise TopologyError(f"rank {rank}: expected 0 <= rank < {self.world_size()}")
        return self.ProcessCoord(*((rank // stride) % dim for stride, dim in zip(self._strides, self.dims)))

    def filter_match(self, **fixed: int) -> list[int]:
        """All ranks whose coordinates have the given values, ascending."""
        self._known(fixed)
        ranks = [0]
        for axis, dim, stride in zip(self.axes, self.dims, self._strides):
            at = fixed.get(axis)
            if at is not None and not 0 <= at < dim:
                return []
            places: Iterable[int] = range(dim) if at is None else (at,)
            ranks = [rank + place * stride for rank in ranks for place in places]
        return ranks

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks with coordinate `idx` on `axis`, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, *axes: str) -> list[list[int]]:
        """Lists of ranks that differ only in `axes`: the groups along them. They partition the world.

        [] for axes the grid does not have at all.
        """
        present = [axis for axis in self.axes if axis in axes]
        if not present:
            return []
        others = [axis for axis in self.axes if axis not in axes]
        starts = self.filter_match(**dict.fromkeys(present, 0))
        return [
            self.filter_match(**{axis: getattr(self.get_coord(start), axis) for axis in others}) for start in starts
        ]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A name for the rank's place, for files: "model_01", axes in `omit_axes` left out."""
        coordinates = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coordinates, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def _known(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.axes]
        if unknown:
            raise TopologyError(f"unknown axis {unknown[0]!r}: the axes are {', '.join(self.axes)}")


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel ranks: neighbours reduce gradients, stages are far apart."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data"), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor slicing: slices of one layer are neighbours, since they communicate most. `num_pp`
    stages x `num_dp` replicas x `num_mp` slices are the number of ranks.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data", "model"), (num_pp, num_dp, num_mp))


# - expert parallelism: how the ranks of the data axis are shared out to experts


def expert_groups(
    world_size: int,
    expert_size: int,
    *,
    model_size: int = 1,
    pipe_size: int = 1,
    data_before_expert: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """(expert-parallel groups, expert-data-parallel groups) of a world of pipe x data x model ranks.

    Within each pipeline stage the ranks of equal model coordinate form a data-parallel list. Expert-parallel groups are
    blocks of `expert_size` neighbours of that list, expert-data groups the ranks at equal places of the blocks;
    `data_before_expert` swaps the two (the blocks are then expert-data groups).

        world 8, expert_size 2: [0,1] [2,3] [4,5] [6,7] and [0,2,4,6] [1,3,5,7]

    Raises TopologyError if the sizes do not divide.
    """
    sizes = {"expert_size": expert_size, "model_size": model_size, "pipe_size": pipe_size}
    if min(sizes.values()) < 1 or world_size % (expert_size * model_size * pipe_size):
        raise TopologyError(f"world size {world_size}: expected a multiple of the product of {sizes}")
    per_stage = world_size // pipe_size
    expert: list[list[int]] = []
    expert_data: list[list[int]] = []
    for start in range(0, world_size, per_stage):
        for model in range(model_size):
            data = list(range(start + model, start + per_stage, model_size))
            copies = len(data) // expert_size
            block = copies if data_before_expert else expert_size
            blocks = [data[i : i + block] for i in range(0, len(data), block)]
            across = [data[i::block] for i in range(block)]
            expert += across if data_before_expert else blocks
            expert_data += blocks if data_before_expert else across
    return expert, expert_data


def block_groups(world_size: int, size: int) -> list[list[int]]:
    """Blocks of `size` consecutive ranks: sequence-parallel groups, secondary shards within a machine (hpZ). Raises
    `TopologyError` where `size` does not divide `world_size`.
    """
    if size < 1 or world_size % size:
        raise TopologyError(f"world size {world_size}: expected a multiple of the group size {size}")
    return [list(range(i, i + size)) for i in range(0, world_size, size)]
