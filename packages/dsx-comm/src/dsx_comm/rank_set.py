"""`RankSet`: which ranks share one flat buffer, as a value.

Most parameters of a model are equal on all data-parallel ranks. Some are not: only some of the ranks have an expert,
and a slice of a matrix (tensor slicing) has other values on each model-parallel rank. Code that divides buffers among
ranks, reduces gradients or takes a norm asks a `RankSet` and nothing else. So experts, tensor slicing, secondary shards
and pipelines are different values, not different branches of code.

`RankSets` chooses the set of each parameter: from the process groups of this process (`parallel_groups`, a topology or
an `mpu`) and from the marks on the parameter:

* `tensor_model_parallel = True` or `model_parallel = True` (Megatron): this rank holds a slice of the tensor;
* `allreduce = False` and `group_name = "ep_size_2"` (experts): only the ranks of the expert-data-parallel group of this
  name hold it.

    sets = RankSets.current()                      # or RankSets.of_mpu(mpu), RankSets.over(process_group)
    sets.data                                      # ordinary parameters
    sets.of(ParameterMarks.read(parameter))        # any parameter

Left out: how a buffer travels between the ranks, and the making of groups for gathers (`dsx_zero`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from . import parallel_groups
from .errors import TopologyError
from .groups import get_all_ranks_from_group, get_rank, get_world_group, get_world_size, is_initialized
from .groups_in_use import ParallelGroups
from .registry import AxisGroup

__all__ = ["ParameterMarks", "RankSet", "RankSets"]


@dataclass(frozen=True)
class RankSet:
    """The ranks that share one flat buffer, as one of them sees it. Equal for equal values, and hashable.

    Args:
        group: their process group; None is the default group. It is not used where `size` is 1.
        rank, size: this process' place among them, and how many they are.
        divisor: what the sum of their gradients is divided by for a mean; 0 stands for `size`. An expert's gradients
            are summed over the ranks that hold it and divided by the number of all data-parallel ranks, because the
            tokens of all of them reach it.
        gathers: a group of the same ranks for gathers that run beside reductions; None: `group`.
        norm_groups: the groups over which sums of squares are added up, one after the other, until all ranks of the
            model have the norm of all of it. The same for all parameters of one model.
        counts_in_norm: False where another rank holds the same values and counts them.
        tensor_groups: groups whose ranks hold other slices of the same tensors; a norm of one tensor is summed over
            them too.
        kind: a word for messages.
        copies: hybrid sharding (MiCS): the ranks that have the same shard, each in another group of ranks that share a
            whole buffer. Gradients are summed over them too, and the buffer's divisor counts them.
        whole: all ranks that hold the parameters, where `copies` says that there are more of them than share one
            buffer; None is the default group.
        near: secondary shards (hpZ): ranks close to each other that have a second copy of the gathered values, divided
            among them.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    divisor: int = 0
    gathers: Any = None
    norm_groups: tuple[Any, ...] = ()
    counts_in_norm: bool = True
    tensor_groups: tuple[Any, ...] = ()
    kind: str = "data"
    copies: RankSet | None = None
    whole: Any = None
    near: RankSet | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise TopologyError(f"RankSet: got rank {self.rank} of {self.size}, expected 0 <= rank < size")
        if self.divisor < 0:
            raise TopologyError(f"RankSet: got divisor {self.divisor}, expected at least 1, or 0 for the size")
        if not self.divisor:
            object.__setattr__(self, "divisor", self.size)

    @classmethod
    def over(cls, process_group: Any = None) -> RankSet:
        """Plain data parallelism over a process group (None: all ranks). Without a process group: this process alone.

        Raises:
            CommArgumentError: this rank is not in the group.
        """
        if not is_initialized():
            return cls()
        group, size = _plain(process_group), len(get_all_ranks_from_group(process_group))
        return cls(group, get_rank(group), size, norm_groups=(group,) if size > 1 else ())

    @property
    def gather_group(self) -> Any:
        """The group for gathers."""
        return self.group if self.gathers is None else self.gathers

    @property
    def holders(self) -> Any:
        """The group of all ranks that hold the parameters."""
        return self.group if self.copies is None else self.whole

    @property
    def first_copy(self) -> bool:
        """Does this rank speak for its shard, where others have the same?"""
        return self.copies is None or self.copies.rank == 0

    def __str__(self) -> str:
        copies = "" if self.copies is None else f", {self.copies.size} copies"
        near = "" if self.near is None else f", secondary shards on {self.near.size}"
        mean = "" if self.divisor == self.size else f", mean over {self.divisor}"
        return f"{self.kind} ({self.size} ranks{mean}{copies}{near})"


@dataclass(frozen=True)
class ParameterMarks:
    """The placement of a parameter, as its owner marked it.

    Attributes:
        sliced: model-parallel ranks hold other slices of the same tensor.
        expert: name of the expert-parallel group of an expert's parameter; "" for the only one; None: it is no
            expert's.
    """

    sliced: bool = False
    expert: str | None = None

    @classmethod
    def read(cls, parameter: Any) -> ParameterMarks:
        """The marks on a parameter: the attributes of the module's text."""
        found = [getattr(parameter, name, False) for name in ("tensor_model_parallel", "model_parallel")]
        expert = None
        if getattr(parameter, "allreduce", True) is False:
            expert = str(getattr(parameter, "group_name", None) or "")
        return cls(any(value is True for value in found), expert)


class RankSets:
    """The rank sets of one process: see the module's text.

    Attributes:
        data: the set of ordinary parameters: all ranks over which gradients are averaged.
        rank, world_size, local_rank: of this process in the job.
        batches: (place, number) of the data-parallel ranks that get batches of their own: `data`, but for ranks that
            share sequences.
        tensor_slice: (place, number) of the ranks that hold slices of the same tensors.
        slice_group: these ranks; None where there are no slices.
        groups: the process groups behind the sets; None without a process group.
        model_size: number of ranks that share one copy of the model in slices (the model-parallel ranks).
    """

    def __init__(
        self,
        data: RankSet,
        groups: ParallelGroups | None = None,
        *,
        tensor: AxisGroup | None = None,
        batches: tuple[int, int] | None = None,
        model_size: int = 1,
    ) -> None:
        self.groups = groups
        self.tensor_slice = (0, 1) if tensor is None else (tensor.rank, tensor.size)
        self.slice_group = tensor
        self.batches = (data.rank, data.size) if batches is None else batches
        self.model_size = model_size
        self.rank, self.world_size = (get_rank(), get_world_size()) if is_initialized() else (0, 1)
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._sliced = data
        if tensor is not None and tensor.size > 1:
            self._sliced = replace(data, tensor_groups=(_plain(tensor.group),), kind="slices")
            data = replace(data, counts_in_norm=tensor.rank == 0)
        self.data = data

    @classmethod
    def over(cls, process_group: Any = None) -> RankSets:
        """Plain data parallelism over a process group; experts' groups are those of `parallel_groups`."""
        return cls(RankSet.over(process_group), parallel_groups.given() if is_initialized() else None)

    @classmethod
    def of_mpu(cls, mpu: Any) -> RankSets:
        """As an `mpu` object says (see `read_mpu`), which `parallel_groups` speaks of from now on. Collective.

        Raises:
            TopologyError: groups are missing, or contradict what the mpu says of them.
        """
        if not is_initialized():
            raise TopologyError(
                f"got an mpu ({type(mpu).__name__}) and no process group; call dsx_comm.init_distributed first"
            )
        groups = parallel_groups.groups_of(mpu)
        if not parallel_groups.is_in_use(groups):  # what an engine holds ends with the engine
            parallel_groups.hold(mpu)
        return cls.of_groups(groups)

    @classmethod
    def current(cls) -> RankSets:
        """The groups last given to `parallel_groups.use`, else data parallelism over all ranks. Groups of an `mpu` or
        pipeline that another engine holds are not included.
        """
        return cls.of_groups(parallel_groups.given()) if is_initialized() else cls(RankSet())

    @classmethod
    def of_groups(cls, groups: ParallelGroups) -> RankSets:
        """The sets over the groups of this process. Collective where groups have to be made."""
        data = groups.axis("sequence_data" if groups.size("sequence") > 1 else "data")
        norm = [data]
        for kind in ("model", "tensor", "pipe"):
            # Megatron's model-parallel group has the stages of a pipeline in it, a topology's axis has not
            if groups.size(kind) > 1 and not any(set(groups.axis(kind).ranks) <= set(axis.ranks) for axis in norm):
                norm.append(groups.axis(kind))
        sums = tuple(_plain(axis.group) for axis in norm if axis.size > 1)
        tensor = groups.axis("tensor") if groups.size("tensor") > 1 else None
        return cls(
            RankSet(_plain(data.group), data.rank, data.size, norm_groups=sums),
            groups,
            tensor=tensor,
            batches=(groups.rank("data"), groups.size("data")),
            model_size=groups.size("model"),
        )

    def with_slices(self, tensor: AxisGroup) -> RankSets:
        """These sets, for a model whose slices lie on the ranks of `tensor`, of which only this rank is among `data`.

        The norm is summed over them too.
        """
        sums = (*self.data.norm_groups, *((_plain(tensor.group),) if tensor.size > 1 else ()))
        data = replace(self.data, norm_groups=sums)
        return RankSets(data, self.groups, tensor=tensor, batches=self.batches, model_size=tensor.size)

    def of(self, marks: ParameterMarks) -> RankSet:
        """The set of a parameter with these marks.

        Raises:
            TopologyError: it is an expert's, and the groups of experts are not there yet.
        """
        if marks.expert is None:
            return self._sliced if marks.sliced else self.data
        like = self._sliced if marks.sliced else self.data
        if self.groups is None:
            return like
        found = self.groups.expert_data(marks.expert or self._only_expert_group())
        return replace(
            like, group=_plain(found.group), rank=found.rank, size=found.size, divisor=self.data.size, kind="experts"
        )

    def part_of_model(self, marks: ParameterMarks) -> str:
        """A word for which part of the model a parameter with these marks is on this rank, the same on all ranks that
        have the same part; "" where all ranks have it.
        """
        words = []
        if marks.expert is not None and self.groups is not None:
            found = self.groups.expert(marks.expert or self._only_expert_group())
            words = [f"expert_rank_{found.rank:02d}_of_{found.size:02d}"] if found.size > 1 else []
        place, number = self.tensor_slice
        if marks.sliced and number > 1:
            words.append(f"model_rank_{place:02d}_of_{number:02d}")
        return ".".join(words)

    def __call__(self, info: Any) -> RankSet:
        """The set of a parameter, given its facts (`info.marks`): what `dsx_zero.shard(ranks_of=...)` takes."""
        return self.of(info.marks)

    def _only_expert_group(self) -> str:
        names = [] if self.groups is None else self.groups.expert_names()
        if len(names) != 1:
            raise TopologyError(
                f"an expert's parameter (allreduce=False) has no group_name, and there are {len(names)} groups of"
                f" experts ({', '.join(names) or 'none'}); set parameter.group_name to the name of its group"
            )
        return names[0]


def _plain(group: Any) -> Any:
    """None for the default group, so that there is one word for it."""
    return None if group is None or group is get_world_group() else group
