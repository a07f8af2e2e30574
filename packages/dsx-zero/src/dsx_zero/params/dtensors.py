"""Parameters that were DTensors: what their placements say of the part that this rank holds.

Tensor parallelism by torch (`parallelize_module`, a `tp_plan`) leaves DTensors in a model, each with this rank's part
and the placement of the part. dsx-zero shards the parts, as it shards Megatron's slices, and keeps the placement on
each parameter as a `GlobalTensor`: with it a forward gets a DTensor again, and accessors and checkpoints the global
tensor.

Left out: placements that no even cut of one dimension describes; `from_dtensors` refuses them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["GLOBAL", "GlobalTensor", "global_of", "is_dtensor"]

GLOBAL = "dsx_global_tensor"
"""The attribute of a parameter that has its `GlobalTensor`."""


def is_dtensor(value: Any) -> bool:
    """Whether it is a DTensor. Nothing is imported for the question: a program that has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def global_of(parameter: Any) -> GlobalTensor | None:
    """The tensor that this parameter is a part of; None for one that was no DTensor."""
    found = getattr(parameter, "__dict__", {}).get(GLOBAL)
    return found if isinstance(found, GlobalTensor) else None


@dataclass(frozen=True, eq=False)
class GlobalTensor:
    """A tensor whose parts lie on the ranks of a mesh.

    Attributes:
        mesh: of one dimension.
        placement: `Shard(dim)` in equal parts, or `Replicate()`.
        shape: of the whole tensor.
    """

    mesh: DeviceMesh
    placement: Any
    shape: tuple[int, ...]

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None where every rank has the whole tensor."""
        return self.placement.dim if self.placement.is_shard() else None

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        dim, parts = self.dim, self.mesh.size()
        return tuple(n // parts if place == dim else n for place, n in enumerate(self.shape))

    @property
    def offset(self) -> tuple[int, ...]:
        """The first index of this rank's part in each dimension."""
        mine = self.mesh.get_local_rank()
        return tuple(n * mine if place == self.dim else 0 for place, n in enumerate(self.size))

    def shown(self, part: torch.Tensor) -> DTensor:
        """This rank's part as the DTensor. Differentiable: gradients arrive as this rank's part of the gradient, and
        torch adds up what the ranks of the mesh have of it (`Partial`).
        """
        from torch.distributed.tensor import DTensor

        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, (self.placement,), run_check=False, shape=torch.Size(self.shape), stride=strides
        )

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, new, on every rank (collective over the mesh), from each rank's part."""
        if self.dim is None:
            return part.detach().clone()
        with torch.no_grad():
            return self.shown(part.detach().contiguous()).full_tensor()

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, a view."""
        for dim, (start, size) in enumerate(zip(self.offset, self.size)):
            whole = whole.narrow(dim, start, size)
        return whole

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a value in any form: a DTensor, a whole tensor, or this part itself. Collective for a
        DTensor that is placed in another way.
        """
        if is_dtensor(value):
            found: Any = value
            if found.device_mesh == self.mesh and tuple(found.placements) == (self.placement,):
                return found.to_local()
            value = found.full_tensor()
        if tuple(value.shape) == self.shape and self.shape != self.size:
            return self.cut(value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        return self
