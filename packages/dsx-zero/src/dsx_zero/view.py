"""`View`: one parameter of a sharded model as this rank holds it: its master, its gradient and its optimizer states.

A parameter is named by the object that `model.named_parameters()` gives (`OWNERS` knows whose it is), or by its name
together with its optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dsx_comm
import torch

from .errors import ZeroStateError
from .homes.home import read, write
from .owners import Owners
from .params.restored import current_parameter
from .plan.units import first_name

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer
    from .params.flat import FlatGroup
    from .step.masters import Master

__all__ = ["OWNERS", "Parameter", "View", "is_frozen"]

Parameter = torch.Tensor | str


OWNERS: Owners[ZeroOptimizer] = Owners()
"""Of all models of the process."""


class View:
    """One trainable parameter as this rank holds it. `gradient`: only its gradient is asked for, which may be read
    while masters and states are stepped.
    """

    def __init__(self, parameter: Parameter, optimizer: ZeroOptimizer | None, *, gradient: bool = False) -> None:
        self.optimizer, self.name = _resolve(parameter, optimizer)
        self.optimizer.moved.check()
        if not gradient:
            self.optimizer.update.check_ended()
        self.runtime = self.optimizer.runtime
        self.group: FlatGroup = self.optimizer.layout.group_of(self.name)
        if not self.group.trainable:
            raise ZeroStateError(
                f"{self.name}: is frozen and has no master, gradient or optimizer state; change the parameter itself"
                " (at stage 3 inside dsx_zero.GatheredParameters)"
            )
        self.masters: tuple[Master, ...] = self.optimizer.layout.masters_of(self.name)
        self.index = self.group.layout.index(self.name)
        self.shape = self.group.layout.shapes[self.index]
        self.tensor = self.group.global_of(self.name)
        self.part, _ = self.optimizer.layout.part_of(self.name, whole=self.runtime.stage == 0)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.group.key.device)

    def master_slice(self) -> torch.Tensor:
        if not self.masters or self.group.master is None:
            return self.empty(self.group.master_dtype)
        return read(self.group.master, self.part.offset, self.part.offset + self.part.numel).detach()

    def set_master_slice(self, values: torch.Tensor) -> None:
        if self.masters and self.group.master is not None:
            write(self.group.master, values, self.part.offset)

    def show(self, whole: torch.Tensor) -> None:
        """Make the parameter show its master's new value, of which `whole` is the whole."""
        self.runtime.publisher.write(self.group, self.index, whole)

    def complete_gradients(self) -> None:
        """Reduce what the last backward should have reduced (collective)."""
        self.runtime.gradients.complete(due=True)

    def grad_slice(self) -> torch.Tensor | None:
        """This rank's reduced gradient, to be read; None when there is none."""
        return self.runtime.gradients.reductions.read(self.group, self.index, self.part)

    def unreduced(self) -> torch.Tensor | None:
        """This rank's own gradient that no reduction has taken, in the parameter's shape."""
        return self.runtime.gradients.reductions.unreduced(self.group, self.index)

    def state(self, key: str) -> Any:
        """This rank's part of a state, 1-D, to be read; a single value as it is; None where there is none."""
        found = [value for m in self.masters if (value := self.optimizer.states.of(m).get(key)) is not None]
        if not found or not isinstance(found[0], torch.Tensor) or found[0].shape != self.masters[0].shape:
            return found[0] if found else None
        flat = [value.reshape(-1) for value in found]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def set_state(self, key: str, values: torch.Tensor) -> None:
        """Write this rank's part of an existing state."""
        for master in self.masters:
            if not isinstance(self.optimizer.states.of(master).get(key), torch.Tensor):
                known = self.optimizer.states.names(master)
                raise ZeroStateError(
                    f"{self.name}: has no optimizer state {key!r} (it has {known}); states appear with the first step"
                )
            start = master.slice.start - self.part.start
            with self.optimizer.states.opened(master, key) as state:
                state.copy_(values.reshape(-1)[start : start + master.numel])

    def whole(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """The whole tensor from every rank's piece, the global one of a DTensor; None when no rank has one."""
        return self.of_global(self.joined(piece))

    def of_global(self, joined: torch.Tensor | None) -> torch.Tensor | None:
        """The global tensor of this rank's part of it, where the parameter was a DTensor (collective)."""
        return joined if joined is None or self.tensor is None else self.tensor.whole(joined)

    def joined(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """The parameter's values, or others like them, from every rank's piece; None when no rank has one."""
        ranks, layout = self.group.ranks, self.group.layout
        if self.runtime.stage == 0 or ranks.size == 1:
            return None if piece is None else piece.detach().reshape(self.shape).clone()
        slices = [layout.local_slice(self.name, rank) for rank in range(ranks.size)]
        longest = max((part.numel for part in slices if part is not None), default=0)
        found: list[Any] = [None] * ranks.size
        mine = None if piece is None else str(piece.dtype)
        dsx_comm.all_gather_object(found, mine, group=ranks.group)
        kind = next((text for text in found if text is not None), None)
        if kind is None or not longest:
            return None if kind is None else torch.empty(self.shape, device=self.group.key.device)
        dtype = getattr(torch, kind.removeprefix("torch."))
        sent = torch.zeros(longest, dtype=dtype, device=self.group.key.device)
        if piece is not None:
            sent[: piece.numel()] = piece.detach().reshape(-1)
        gathered = sent.new_empty(longest * ranks.size)
        dsx_comm.all_gather_into_tensor(gathered, sent, group=ranks.group)
        flat = torch.empty(layout.sizes[self.index], dtype=dtype, device=sent.device)
        for rank, part in enumerate(slices):
            if part is not None:
                flat[part.start : part.stop] = gathered[rank * longest : rank * longest + part.numel]
        return flat.view(self.shape)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        expected = self.group.global_shape(self.name)
        if tuple(value.shape) != expected:
            raise ZeroStateError(f"{self.name}: got a value of shape {tuple(value.shape)}, expected {expected}")
        return self.own(value).detach().reshape(-1)[self.part.start : self.part.stop]

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this rank's parameter has: all of it, or the part that tensor parallelism
        gave it.
        """
        return value if self.tensor is None else self.tensor.part_of(value)

    def check_local(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() != self.part.numel:
            raise ZeroStateError(f"{self.name}: got {value.numel()} elements, expected this rank's {self.part.numel}")
        return value.detach().reshape(-1)


def _resolve(parameter: Parameter, optimizer: ZeroOptimizer | None) -> tuple[ZeroOptimizer, str]:
    if isinstance(parameter, str):
        if optimizer is None:
            raise ZeroStateError(
                f"{parameter!r}: a name alone does not say which model; pass optimizer= or the parameter object"
            )
        return optimizer, first_name(optimizer.runtime.infos, parameter)
    found = OWNERS.find(current_parameter(parameter))
    if found is None:
        raise ZeroStateError(
            "the tensor is not a parameter of a model sharded by dsx_zero.shard (take it from model.named_parameters())"
        )
    return found


def is_frozen(parameter: Parameter, optimizer: ZeroOptimizer | None) -> bool:
    """Whether the parameter has neither gradient nor states, on any rank. Scripts ask for those of every parameter."""
    owner, name = _resolve(parameter, optimizer)
    return not owner.layout.group_of(name).trainable
