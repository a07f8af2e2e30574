"""`mpu` objects: the interface by which Megatron-style model-parallel code tells which ranks are in which group.

`read_mpu` accepts any object with Megatron's functions, such as a module, and returns plain records. `Mpu` has the same
functions over a `GroupRegistry`, for code that expects such an object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import TopologyError
from .groups import get_all_ranks_from_group, get_rank, get_world_size
from .registry import AxisGroup, GroupRegistry

# the function names are get_<name>_group / _rank / _world_size; the first that is there counts
NAMES = {
    "data": ("data_parallel",),
    "model": ("model_parallel", "tensor_model_parallel", "slice_parallel"),
    "tensor": ("tensor_model_parallel", "slice_parallel"),  # without the stages of a pipeline
    "pipe": ("pipeline_model_parallel", "pipe_parallel"),
    "sequence": ("sequence_parallel", "context_parallel"),
    "sequence_data": ("sequence_data_parallel",),
    "expert": ("expert_model_parallel", "expert_parallel"),
    "expert_data": ("expert_data_parallel", "data_modulo_expert_parallel"),
}


@dataclass(frozen=True)
class MpuGroups:
    """The groups an mpu told of; None where it has none."""

    data: AxisGroup
    model: AxisGroup
    tensor: AxisGroup | None = None
    pipe: AxisGroup | None = None
    sequence: AxisGroup | None = None
    sequence_data: AxisGroup | None = None
    expert: AxisGroup | None = None
    expert_data: AxisGroup | None = None


def read_mpu(mpu: Any) -> MpuGroups:
    """Ask an mpu for all groups it knows.

    Data- and model-parallel groups are needed; pipeline, sequence and expert variants are taken where they are. Rank
    and size come from the group itself, and are compared with what the mpu's own functions say.

    Raises:
        TopologyError: a needed function is missing, a group is None, or rank and size contradict the group.
    """
    found = {axis: _read(mpu, axis, names) for axis, names in NAMES.items()}
    for axis in ("data", "model"):
        if found[axis] is None:
            expected = " or ".join(f"get_{name}_group()" for name in NAMES[axis])
            raise TopologyError(f"mpu {type(mpu).__name__} has no {axis}-parallel group: expected {expected}")
    return MpuGroups(**{axis: group for axis, group in found.items() if group is not None})


def _read(mpu: Any, axis: str, names: tuple[str, ...]) -> AxisGroup | None:
    for name in names:
        getter = getattr(mpu, f"get_{name}_group", None)
        if getter is None:
            continue
        group = getter()
        if group is None and axis not in ("data", "model"):
            return None  # an optional kind of parallelism that is not in use
        if group is None:
            raise TopologyError(f"mpu: get_{name}_group() returned None, expected a process group")
        found = AxisGroup(group, tuple(get_all_ranks_from_group(group)), get_rank(group))
        _agree(mpu, f"get_{name}_rank", found.rank)
        _agree(mpu, f"get_{name}_world_size", found.size)
        return found
    return None


def _agree(mpu: Any, name: str, expected: int) -> None:
    function: Callable[[], int] | None = getattr(mpu, name, None)
    if function is not None and (got := function()) != expected:
        raise TopologyError(f"mpu: {name}() says {got}, its group says {expected}")


class Mpu:
    """Megatron's functions over a registry: model, data, pipeline, sequence and, with `expert_size`, expert groups.

    Groups are made here, so all ranks construct it together. "model" is the tensor-slicing axis. With a sequence axis,
    gradients are averaged over data and sequence together: that is `get_sequence_data_parallel_group`.
    """

    def __init__(self, registry: GroupRegistry, *, expert_size: int | None = None) -> None:
        self.registry = registry
        self._axes = {name: registry.axis(name) for name in ("data", "model", "pipe", "sequence")}
        self._axes["sequence_data"] = registry.axis("data", "sequence")
        if expert_size is not None:
            self._axes["expert"], self._axes["expert_data"] = registry.expert(expert_size)

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """get_<kind>_group, get_<kind>_rank and get_<kind>_world_size for all names in `NAMES`."""
        for axis, kinds in NAMES.items():
            for kind in kinds:
                for suffix, attribute in (("group", "group"), ("rank", "rank"), ("world_size", "size")):
                    if name == f"get_{kind}_{suffix}" and axis in self.__dict__.get("_axes", {}):
                        return lambda: getattr(self._axes[axis], attribute)
        raise AttributeError(f"{type(self).__name__} has no {name!r} (expert functions need expert_size)")

    def get_global_rank(self) -> int:
        """The rank in the world."""
        return get_rank()

    def get_world_size(self) -> int:
        """The size of the world."""
        return get_world_size()

    def get_model_parallel_src_rank(self) -> int:
        """The global rank of the first member of this rank's model-parallel group."""
        return self._axes["model"].ranks[0]

    get_tensor_model_parallel_src_rank = get_model_parallel_src_rank
