"""Moves states off the device for a while, at run time: `offload_states` and `reload_states`.

This serves programs that share a device between training and something else, such as reinforcement learning, where the
model generates between two updates. The bytes of each storage are copied into host memory and freed on the device;
tensor objects stay. When the bytes are back, every view (masters, slices, states, parameters) is valid again. Until
then no value can be read by mistake: homes raise, a forward and the model's `state_dict()` raise, and parameters and
`.grad` show NaNs of their shape. What only reads this rank's values can have them where they lie, in host memory
(`lying`): checkpoints of states that sleep, and weights for a generator.

State that already lives on the host or on disk (`offload_optimizer`, `offload_param`) stays where it is, and so does
memory that the ranks of a host share, which is host memory. Moves to disk are left out; `offload_optimizer` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from dsx_core.device import Device

from ..errors import ZeroConfigError, ZeroStateError
from ..homes.home import DeviceHome, Home
from ..homes.pinned import locked_empty
from ..runtime import Runtime
from ..step.states import OptimizerStates

__all__ = ["MovedStates", "OffloadDeviceEnum", "OffloadStateTypeEnum"]


class OffloadStateTypeEnum(str, Enum):
    """The classes of state that can be moved, by the names that scripts use."""

    optim_states = "optim_states"
    """The values that the optimizer keeps per element."""
    hp_params = "hp_params"
    """Masters, where they are memory of their own."""
    lp_params = "lp_params"
    """Parameters: whole ones at stages 0-2, shards at stage 3."""
    lp_grads = "lp_grads"
    """Gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Buffers that are kept for the gradients of later backwards. They hold no values, so they are freed."""


class OffloadDeviceEnum(str, Enum):
    """The devices where state can live, by the names of configurations."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


_CLASSES = {
    OffloadStateTypeEnum.lp_params: "params",
    OffloadStateTypeEnum.hp_params: "master",
    OffloadStateTypeEnum.lp_grads: "grads",
    OffloadStateTypeEnum.optim_states: "optimizer",
}
"""The name in `state_bytes` under which each class is counted."""


@dataclass
class _Found:
    """The parts of one class of state: tensors whose storages move, homes over them, and tensors that users see."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    homes: list[DeviceHome] = field(default_factory=list)
    faces: list[torch.Tensor] = field(default_factory=list)


class _Stash:
    """The bytes of one storage, in host memory. The storage object stays, but has no memory meanwhile."""

    def __init__(self, tensor: torch.Tensor, *, pin: bool, non_blocking: bool) -> None:
        self._storage, self._device = tensor.untyped_storage(), tensor.device
        self.nbytes = self._storage.nbytes()
        empty = locked_empty if pin and self._device.type == "cuda" else torch.empty
        self._host = empty(self.nbytes, dtype=torch.uint8)
        data = self._bytes()
        self._host.copy_(data, non_blocking=non_blocking)
        device = Device.of(self._device)
        stream: Any = device.stream()
        if stream is not None and device.kind != "mps":  # MPS has one stream, and torch no such call for it
            data.record_stream(stream)
        self._left = device.event()
        """Of the way out; None on the CPU."""
        self._storage.resize_(0)

    def reading(self) -> torch.UntypedStorage:
        """The bytes in host memory, once they are all there."""
        if self._left is not None:
            self._left.synchronize()
        return self._host.untyped_storage()

    def bring_back(self, *, non_blocking: bool) -> None:
        """Allocate the storage's memory again and copy its values back."""
        Device.of(self._device).wait_for(self._left)  # the caller's stream may be another one than on the way out
        self._storage.resize_(self.nbytes)
        self._bytes().copy_(self._host, non_blocking=non_blocking)

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Moved:
    """One class of state in host memory, and what has to be made whole again when it comes back."""

    stashes: dict[int, _Stash]  # by the identity of the storage in this process
    homes: list[DeviceHome]
    faces: list[tuple[torch.Tensor, torch.Tensor]]


class MovedStates:
    """Moves the states of one sharded model off the device and back."""

    def __init__(self, runtime: Runtime, states: OptimizerStates) -> None:
        self._runtime, self._states = runtime, states
        self.stashes: dict[OffloadStateTypeEnum, _Moved] = {}
        """The states that are in host memory now, by class."""
        self._guards: list[Any] = []

    @property
    def away(self) -> tuple[OffloadStateTypeEnum, ...]:
        """The classes of state that are in host memory now."""
        return tuple(self.stashes)

    def check(self, *kinds: OffloadStateTypeEnum) -> None:
        """Refuse an operation that needs all states on the device, or those of some classes.

        Raises:
            ZeroStateError: some states are offloaded; names them.
        """
        if self.stashes and (not kinds or any(kind in self.stashes for kind in kinds)):
            raise ZeroStateError(self._refusal())

    def lying(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor of the model's states where they lie now, for reading: itself, or its bytes in host
        memory while they are offloaded. The host waits for a copy that is under way.
        """
        key = tensor.untyped_storage()._cdata
        stash = next((moved.stashes[key] for moved in self.stashes.values() if key in moved.stashes), None)
        if stash is None:
            return tensor
        storage: Any = stash.reading()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def _refusal(self) -> str:
        names = ", ".join(kind.value for kind in self.stashes)
        return (
            f"{names} of this model are in host memory since offload_states(); expected them on the device: call"
            " reload_states() on every rank first"
        )

    def nbytes(self) -> dict[str, int]:
        """Bytes in host memory, by the classes of `state_bytes`."""
        return {_CLASSES[kind]: sum(s.nbytes for s in moved.stashes.values()) for kind, moved in self.stashes.items()}

    def move_out(
        self, include: Iterable[OffloadStateTypeEnum | str] | None, device: Any, *, pin: bool, non_blocking: bool
    ) -> None:
        """See `ZeroOptimizer.offload_states`."""
        kinds = _kinds(include, "offload_states")
        _check_device(device)
        if not self.stashes:
            self._runtime.gradients.complete(due=True)  # nothing may be under way
        for kind in kinds:
            if kind is OffloadStateTypeEnum.contiguous_grad_buffer:
                self._runtime.gradients.reductions.drop_idle()
                self._states.blocks.drop()
            elif kind not in self.stashes:
                self.stashes[kind] = self._move(self._find(kind), pin=pin, non_blocking=non_blocking)
        if self.stashes and not self._guards:
            model = self._runtime.model
            self._guards = [
                model.register_forward_pre_hook(self._before_forward, prepend=True),
                model.register_state_dict_pre_hook(self._before_state_dict),
            ]
        self._runtime.gradients.refusal = self._refusal() if self.stashes else None

    def bring_back(
        self, include: Iterable[OffloadStateTypeEnum | str] | None = None, *, non_blocking: bool = False
    ) -> None:
        """See `ZeroOptimizer.reload_states`."""
        for kind in _kinds(include, "reload_states"):
            moved = self.stashes.pop(kind, None)
            if moved is None:
                continue
            for stash in moved.stashes.values():
                stash.bring_back(non_blocking=non_blocking)
            for home in moved.homes:
                home.away = None
            for face, values in moved.faces:
                face.data = values
        if not self.stashes:
            for guard in self._guards:
                guard.remove()
            self._guards = []
        self._runtime.gradients.refusal = self._refusal() if self.stashes else None

    def _move(self, found: _Found, *, pin: bool, non_blocking: bool) -> _Moved:
        faces = []
        for face in found.faces:
            faces.append((face, face.detach()))
            nothing = float("nan") if face.is_floating_point() else 0
            face.data = torch.full((), nothing, dtype=face.dtype, device=face.device).expand(face.shape)
        for home in found.homes:
            home.away = "offload_states() has moved it to host memory; call reload_states() on every rank first"
        storages = {
            tensor.untyped_storage()._cdata: tensor
            for tensor in found.tensors
            if tensor.untyped_storage().nbytes() and tensor.untyped_storage().resizable()
        }
        stashes = {key: _Stash(tensor, pin=pin, non_blocking=non_blocking) for key, tensor in storages.items()}
        return _Moved(stashes, found.homes, faces)

    def _before_forward(self, module: Any, args: Any) -> None:
        if OffloadStateTypeEnum.lp_params in self.stashes or torch.is_grad_enabled():
            self.check()

    def _before_state_dict(self, module: Any, prefix: str, keep_vars: bool) -> None:
        if self._runtime.stage < 3:  # at stage 3 there are partitioned parameters in it, which raise when they are read
            self.check(OffloadStateTypeEnum.lp_params)

    # What there is ----------------------------------------------------------------------------------------------------

    def _find(self, kind: OffloadStateTypeEnum) -> _Found:
        finders: dict[OffloadStateTypeEnum, Callable[[], _Found]] = {
            OffloadStateTypeEnum.lp_params: self._parameters,
            OffloadStateTypeEnum.hp_params: self._masters,
            OffloadStateTypeEnum.lp_grads: self._gradients,
            OffloadStateTypeEnum.optim_states: self._optimizer,
        }
        return finders[kind]()

    def _parameters(self) -> _Found:
        self._runtime.publisher.free_gathered()
        found = _Found()
        for unit in self._runtime.units:
            for group in unit.groups:
                homes = list(_on_device([group.shard, group.stepped]))
                visible = [] if group.visible is None else [group.visible]
                tensors = [*visible, *(home.memory for home in homes)]
                if not all(tensor.untyped_storage().resizable() for tensor in tensors):
                    continue  # its memory is shared by the ranks, and is host memory already
                found.tensors += tensors
                found.homes += homes
                if group.visible is not None:
                    found.faces += [p for p in group.parameters if p.numel()]
        return found

    def _masters(self) -> _Found:
        masters = [group.own_master for unit in self._runtime.units for group in unit.groups]
        homes = list(_on_device(master for master in masters if master is not None))
        return _Found([home.memory for home in homes], homes)

    def _gradients(self) -> _Found:
        reductions = self._runtime.gradients.reductions
        homes = list(_on_device(reductions.homes()))
        faces = [
            p.grad
            for unit in self._runtime.units
            for group in unit.trainable
            for p in group.parameters
            if p.grad is not None and type(p.grad) is torch.Tensor and p.grad.numel()
        ]
        return _Found([*reductions.tensors(), *(home.memory for home in homes)], homes, faces)

    def _optimizer(self) -> _Found:
        tensors = [tensor for tier, tensor in self._states.tensors() if tier == "device" and tensor.numel() > 1]
        homes = list(_on_device(self._states.homes()))
        return _Found([*tensors, *(home.memory for home in homes)], homes)


def _on_device(homes: Iterable[Home]) -> Iterator[DeviceHome]:
    return (home for home in homes if isinstance(home, DeviceHome))


def _kinds(include: Iterable[OffloadStateTypeEnum | str] | None, call: str) -> list[OffloadStateTypeEnum]:
    if include is None:
        return list(OffloadStateTypeEnum)
    known = [kind.value for kind in OffloadStateTypeEnum]
    given = [include] if isinstance(include, str) else list(include)
    for kind in given:
        if kind not in known:
            raise ZeroConfigError(
                f"{call}(include=...)", f"got {kind!r}, expected a set of {', '.join(known)}, or None for all"
            )
    return [kind for kind in OffloadStateTypeEnum if kind in given]


def _check_device(device: Any) -> None:
    name = getattr(device, "value", None) or str(device)
    if name != "cpu":
        raise ZeroConfigError(
            "offload_states(device=...)",
            f"got {device!r}, expected 'cpu'; state that is to live on disk needs offload_optimizer or offload_param"
            " with device nvme",
        )
