"""The settings of this process, and the functions that change them, under the names that scripts know.

There is one `State` per process, like PyTorch's default generators, because checkpoints are called from inside models,
which get no such object as an argument.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dsx_comm
from dsx_comm.groups_in_use import ParallelGroups
from dsx_comm.lanes import Lane

from .divided import Divided
from .errors import ActivationConfigError, ActivationStateError
from .kept import Keeper
from .places import DevicePlace, HostPlace, Place, SlotPlace
from .rng import MODEL_PARALLEL_STREAM, RngTracker, seed_default_stream
from .settings import PATH, CheckpointingSettings

__all__ = [
    "State",
    "configure",
    "current",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "settings_apart",
    "use_count",
]


class State:
    """State that all checkpoints of this process share.

    Attributes:
        settings: the settings of the last `configure`.
        keeper: packs inputs as the settings say.
        rng: the tracked random streams.
        depth: number of checkpoints that are running, one inside the other.
        uses: number of checkpoints that were called.
    """

    def __init__(self) -> None:
        self.settings = CheckpointingSettings()
        self.configured = False
        self.num_layers: int | None = None
        self.keeper = Keeper(None, DevicePlace())
        self.rng = RngTracker()
        self.groups: ParallelGroups | None = None
        self.lane: Lane | None = None
        self.depth = self.uses = 0

    def apply(self, settings: CheckpointingSettings) -> None:
        """Pack inputs as these settings say from now on; inputs that are kept already stay where they are. Collective
        if inputs are divided and the model-parallel group has to be made.
        """
        divided = self._divided() if settings.partition_activations else None
        self.keeper = Keeper(divided, self._place(settings))
        self.settings = settings

    def _divided(self) -> Divided:
        groups = self.model_parallel()
        if groups is None or groups.size("tensor") == 1:
            return Divided(None, 0, 1)
        axis = groups.axis("tensor")
        return Divided(axis.group, axis.rank, axis.size)

    def _place(self, settings: CheckpointingSettings) -> Place:
        number = settings.number_checkpoints if settings.contiguous_memory_optimization else None
        if settings.cpu_checkpointing:
            return HostPlace(number, self.lane)
        return DevicePlace() if number is None else SlotPlace(number)

    def model_parallel(self) -> ParallelGroups | None:
        """The groups that were given, otherwise those of this process; None without a process group."""
        if self.groups is not None:
            return self.groups
        return dsx_comm.parallel_groups.current() if dsx_comm.is_initialized() else None

    @property
    def tensor_rank(self) -> int:
        """This process' place among the ranks that hold slices of the same tensors."""
        groups = self.model_parallel()
        return 0 if groups is None else groups.rank("tensor")


_STATE = State()


def current() -> State:
    """The state of this process."""
    return _STATE


@contextmanager
def settings_apart() -> Iterator[None]:
    """Inside the block checkpoints have settings of their own, which begin as the defaults; behind it those of before
    are in force again. For engines that are built to be looked at (plans). Random streams are not set apart.
    """
    state = current()
    before = dict(vars(state))
    vars(state).update({**vars(State()), "rng": state.rng})
    try:
        yield
    finally:
        vars(state).update(before)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    lane: Lane | None = None,
) -> None:
    """Say how `checkpoint` keeps inputs from now on. `dsx.initialize` calls this for a configuration with the section.

    An argument that is not given gets its default: settings of an earlier call are forgotten. Collective with
    `partition_activations`.

    Args:
        mpu_: an object with Megatron's functions; inputs are divided among its model-parallel group. None: the groups
            of `dsx_comm.parallel_groups`.
        deepspeed_config: a configuration as a mapping or the path of a JSON file, of which the section
            `activation_checkpointing` is read, or that section as an object. The arguments below override it.
        partition_activations: each model-parallel rank keeps a slice.
        contiguous_checkpointing: slices go into buffers that are made once.
        num_checkpoints: how many inputs such a buffer holds; None: the number given to `set_num_layers`.
        checkpoint_in_cpu: inputs are kept in host memory.
        synchronize: wait for the device at the boundaries of checkpoints.
        profile: log the time of each checkpoint, at level INFO of the logger `dsx_activations`.
        lane: where copies to and from host memory run; host tensors are then copied too. None: a stream per device.

    Raises:
        ActivationConfigError: settings that contradict each other, or cannot be read.
    """
    state = current()
    section = _section(deepspeed_config)
    number = _given(section, "number_checkpoints") if num_checkpoints is None else num_checkpoints
    read = _as_mapping(section)
    read.update({
        name: value
        for name, value in {
            "partition_activations": partition_activations,
            "contiguous_memory_optimization": contiguous_checkpointing,
            "number_checkpoints": state.num_layers if number is None else number,
            "cpu_checkpointing": checkpoint_in_cpu,
            "synchronize_checkpoint_boundary": synchronize,
            "profile": profile,
        }.items()
        if value is not None
    })  # fmt: skip
    settings = CheckpointingSettings.read(read)
    before = state.groups, state.lane
    state.groups, state.lane = None if mpu_ is None else ParallelGroups(mpu_), lane
    try:
        state.apply(settings)
    except BaseException:
        state.groups, state.lane = before
        raise
    state.configured = True


def _section(source: Any) -> Any:
    """The section of a configuration."""
    if isinstance(source, (str, os.PathLike)):
        try:
            with open(source, encoding="utf-8") as file:
                source = json.load(file)
        except (OSError, ValueError) as error:
            raise ActivationConfigError(PATH, f"the configuration {source} cannot be read: {error}") from error
    if source is None:
        return {}
    if isinstance(source, Mapping):
        section = source.get(PATH, {})
        if not isinstance(section, Mapping):
            raise ActivationConfigError(PATH, f"got {section!r}, expected an object")
        return section
    return getattr(source, PATH, source)


def _given(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def _as_mapping(section: Any) -> dict[str, Any]:
    if isinstance(section, Mapping):
        return dict(section)
    names = CheckpointingSettings.__dataclass_fields__
    return {name: getattr(section, name) for name in names if hasattr(section, name)}


def is_configured() -> bool:
    """Was `configure` called?"""
    return current().configured


def use_count() -> int:
    """The number of calls of `checkpoint` in this process, recomputations not counted."""
    return current().uses


def reset() -> None:
    """Release buffers that are kept between steps. Settings stay, and so do inputs that are still needed."""
    current().keeper.place.reset()


def set_num_layers(nlayers: int) -> None:
    """Say how many checkpoints a forward pass has, where `num_checkpoints` is not given to `configure`.

    Raises:
        ActivationStateError: it is no whole number of at least 1.
    """
    if isinstance(nlayers, bool) or not isinstance(nlayers, int) or nlayers < 1:
        raise ActivationStateError(f"set_num_layers: got {nlayers!r}, expected a whole number of at least 1")
    current().num_layers = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Divide inputs among the model-parallel ranks from now on, or stop doing so. Collective.

    Raises:
        ActivationConfigError: contiguous buffers are configured, which need it.
    """
    state = current()
    state.apply(state.settings.with_given(partition_activations=bool(partition_activation)))


def get_cuda_rng_tracker() -> RngTracker:
    """The tracker whose streams every checkpoint saves and restores."""
    return current().rng


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default stream with `seed`, the same on all model-parallel ranks, and the stream of
    `get_cuda_rng_tracker().fork()` with `seed + 2718 + rank`, which differs between them. Other streams are forgotten.
    """
    state = current()
    state.rng.reset()
    seed_default_stream(seed)
    state.rng.add(MODEL_PARALLEL_STREAM, seed + 2718 + state.tensor_rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the model-parallel stream again, with `seed + 2718 + rank`; all other streams go on.

    Raises:
        ActivationStateError: there is no such stream; `model_parallel_cuda_manual_seed` makes it.
    """
    state = current()
    with state.rng.fork():
        seed_default_stream(seed + 2718 + state.tensor_rank)
