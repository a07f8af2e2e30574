"""A unit of stage 3 with weights that are sent in a form of their own (`gather_hooks`).

Each such weight has a flat buffer of its own, of which every rank has the same number of rows. A gather runs the
weight's pre-hook on this rank's rows, sends what it makes, and its post-hook makes of everything the weight that
modules hold while the unit is in use. The plain parameter, which gets the gradient, never has memory: its values can be
read from the shards only. What is gathered lies in storages that are freed and filled again, as those of plain
parameters are (`GatheredStorage`), so that what autograd saved finds its data again.

Left out: when a unit is gathered (`gather.lifetime`), and how (`transports.hooked`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from dsx_core.device import Device
from torch import nn

from ..errors import ZeroModelError, ZeroStateError
from ..plan.units import ParameterInfo, UnitPlan
from ..torch_names import preserve_version_counters
from .flat import FlatGroup
from .gather_hooks import GatherHooks, gather_hooks_of, shown_for
from .partitioned_unit import GatheredStorage, PartitionedUnit, UnitParameter, UnitState
from .tensors import tensors_in

__all__ = ["HookedStorage", "HookedUnit"]


class HookedStorage(GatheredStorage):
    """The tensors that a weight's hooks gather: those that were sent, and those that its post-hook made besides."""

    hooks: GatherHooks
    stale = False
    """Whether the shard has another value since."""

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(numel, dtype=dtype, device=device)
        self.sent: list[GatheredStorage] = []
        self._views: list[torch.Tensor] = []
        self._weight: Any = None
        self._made: list[tuple[torch.UntypedStorage, int]] = []
        self._inner: tuple[torch.Tensor, ...] = ()
        self._kept: list[torch.Tensor] = []

    @property
    def allocated(self) -> bool:
        """See `GatheredStorage.allocated`: of what was sent."""
        return bool(self.sent) and all(store.allocated for store in self.sent)

    def allocate(self) -> None:
        """See `GatheredStorage.allocate`."""
        for store in self.sent:
            store.allocate()
        for storage, nbytes in self._made:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """See `GatheredStorage.free`."""
        super().free()
        for store in self.sent:
            store.free()
        for storage, _ in self._made:
            storage.resize_(0)

    def poison(self) -> None:
        """See `GatheredStorage.poison`: a byte of ones is no number in 8 bits, and too large a number in others."""
        for store in self.sent:
            if store.allocated:
                store.fill.fill_(255)

    def tensors(self) -> list[torch.Tensor]:
        """See `GatheredStorage.tensors`."""
        own = {storage.data_ptr() for storage, _ in self._made}
        made = [t for t in self._inner if t.untyped_storage().data_ptr() in own]
        return [*(store.fill for store in self.sent), *made] if self.allocated else []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever gathered: a hook has failed."""
        return self._weight is None

    def shown(self, plain: torch.Tensor) -> torch.Tensor:
        """The gathered weight, with the gradient going to `plain`. The current stream of its device is to use it."""
        if (stream := Device.of(plain.device).stream()) is not None:
            for tensor in self._kept:  # made on the lane's stream, and dropped with the next gather
                tensor.record_stream(stream)
        return shown_for(plain, lambda: self._weight.detach())

    def row(self, group: FlatGroup) -> int:
        """Elements of a row of the weight."""
        return group.layout.sizes[0] // self.hooks.size[0]

    def buffers(self, inputs: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Memory for what all ranks send, the same storages every time."""
        sizes = [size * tensor.nbytes for tensor in inputs]
        if not self.sent:
            first = self.hooks.size[0]
            for tensor, nbytes in zip(inputs, sizes):
                store = GatheredStorage(nbytes, dtype=torch.uint8, device=tensor.device)
                view = store.base.view(tensor.dtype).view(size * tensor.shape[0], *tensor.shape[1:])
                self._views.append(view if first > view.shape[0] else view[:first])
                self.sent.append(store)
        if [store.numel for store in self.sent] != sizes:
            raise ZeroStateError(
                f"{self.hooks.kind}: fsdp_pre_all_gather made tensors of {sizes} bytes, and of"
                f" {[store.numel for store in self.sent]} before; expected the same in every gather"
            )
        return [store.fill for store in self.sent]

    def receive(self, rows: Any, kept: Any) -> None:
        """Let the post-hook make the weight: anew for the first time, else in the memory that it has."""
        with torch.inference_mode(False), torch.no_grad():
            if self._weight is not None:
                with preserve_version_counters((self._weight, *self._inner)):
                    rows.fsdp_post_all_gather(tuple(self._views), kept, self.hooks.dtype, out=self._weight)
            else:
                made, inner = rows.fsdp_post_all_gather(tuple(self._views), kept, self.hooks.dtype)
                self._weight, self._inner = made, tuple(inner)
                known = {store.base.untyped_storage().data_ptr() for store in self.sent}
                own = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._inner}
                self._made = [(storage, storage.nbytes()) for at, storage in own.items() if at not in known]
        if tuple(self._weight.shape) != tuple(self.hooks.size):
            raise ZeroModelError(
                f"{self.hooks.kind}: fsdp_post_all_gather made a tensor of shape {tuple(self._weight.shape)}, expected"
                f" {tuple(self.hooks.size)}"
            )
        self._kept = [tensor for tensor in tensors_in(kept) if tensor.device == self.device]
        self.stale = False


class HookedParameter(UnitParameter):
    """The `ParameterSource` of a weight that is sent in a form of its own: its exact values are in the shards only."""

    unit: HookedUnit
    _exact: torch.Tensor | None = None

    @property
    def store(self) -> HookedStorage:
        """The part of it that is gathered."""
        return self.unit.hooked[self.group]

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        if self._exact is not None:
            edit(self._exact)
            return
        whole = self.full_tensor()
        edit(whole)
        self._replace(whole)
        self.unit.forget(self.store)

    def open(self) -> torch.Tensor:
        """See `UnitParameter.open`. Collective: the exact values are gathered beside the weight."""
        self._exact, self._opened = self.full_tensor(), True
        self.unit.swap_out()
        return self._exact

    def close(self, *, source_rank: int | None) -> None:
        exact, self._exact, self._opened = self._exact, None, False
        if source_rank is not None and exact is not None:
            self._replace(exact, source_rank=source_rank)
            self.unit.forget(self.store)

    def borrow(self) -> torch.Tensor | None:
        exact = self._exact
        if exact is not None:
            return shown_for(self.plain, exact.detach)
        gather_on_use = self.unit.gather_on_use
        if gather_on_use is None or not gather_on_use.gather_for_use(self.unit):
            return None
        self.unit.check_current()
        return self.store.shown(self.plain)


class HookedUnit(PartitionedUnit):
    """A unit in which some groups have one weight with hooks each."""

    def __init__(self, plan: UnitPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self.hooked: dict[FlatGroup, HookedStorage] = {
            group: store for group, store in zip(self.groups, self.storages) if isinstance(store, HookedStorage)
        }
        self._in_modules: dict[int, torch.Tensor] = {}

    @staticmethod
    def _storage(key: Any, numel: int) -> GatheredStorage:
        kind = HookedStorage if key.hooked else GatheredStorage
        return kind(numel, dtype=key.dtype, device=key.device)

    def _source(self, name: str, group: FlatGroup) -> UnitParameter:
        return (HookedParameter if group in self.hooked else UnitParameter)(name, self, group)

    def adopt(self, model: nn.Module, infos: Mapping[str, ParameterInfo]) -> dict[int, nn.Parameter]:
        """See `PartitionedUnit.adopt`."""
        for group, store in self.hooked.items():
            found = gather_hooks_of(model.get_parameter(group.layout.names[0]))
            if found is None:
                raise AssertionError(f"{group.layout.names[0]}: planned with gather hooks, and it has none")
            found.dtype = group.key.dtype  # the model may have been cast since
            store.hooks = found
        return super().adopt(model, infos)

    @property
    def stale(self) -> bool:  # type: ignore[override]
        """See `PartitionedUnit.stale`."""
        return any(store.stale for store in self.hooked.values())

    def check_current(self) -> None:
        """Raise ZeroStateError where a weight was edited since it was gathered."""
        if self.stale:
            raise ZeroStateError(
                f"{self.name}: a weight that is sent in a form of its own was edited while it was gathered; leave the"
                " forward or GatheredParameters in which it was edited before it is used again"
            )

    def forget(self, store: HookedStorage) -> None:
        """A weight has another value: what is gathered of it is not used any more."""
        if self.state is not UnitState.PARTITIONED:
            store.stale = True
            if self.gather_on_use is not None:
                self.gather_on_use.discard(self)

    def swap_in(self) -> None:
        """See `PartitionedUnit.swap_in`: the modules get the weights that the hooks made."""
        self.check_current()
        super().swap_in()
        for place in self._places:
            source = place.partitioned.source
            if not isinstance(source, HookedParameter) or place.module._parameters.get(place.attribute) is not (
                place.plain
            ):
                continue
            if source._exact is not None or source.store.is_empty:
                place.module._parameters[place.attribute] = place.partitioned  # type: ignore[assignment]
                continue
            key = id(place.plain)
            if key not in self._in_modules:  # a tied weight is one tensor
                self._in_modules[key] = source.store.shown(place.plain)
            place.module._parameters[place.attribute] = self._in_modules[key]  # type: ignore[assignment]

    def swap_out(self) -> None:
        """See `PartitionedUnit.swap_out`."""
        super().swap_out()
        for place in self._places:
            shown = self._in_modules.get(id(place.plain))
            if shown is not None and place.module._parameters.get(place.attribute) is shown:
                place.module._parameters[place.attribute] = place.partitioned  # type: ignore[assignment]
        self._in_modules.clear()

    def refresh(self, plain: torch.Tensor, whole: torch.Tensor) -> None:
        """See `PartitionedUnit.refresh`."""
        for group, store in self.hooked.items():
            if plain is group.parameters[0]:
                self.forget(store)
                return
        super().refresh(plain, whole)
