"""Slices experts along their inner size over a tensor-parallel group, and joins the slices again.

A weight is cut along one dimension. If it holds several parts along this dimension (gate and up in one weight), each
part is cut, so that every rank has a piece of all parts. The parameters get Megatron's attributes, which engines read.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch

from .errors import ExpertStateError, MoEConfigError


class ExpertSlices:
    """The split of the weights of experts over a group.

    Copies of a module share this object, because a process group cannot be copied.

    Args:
        group: process group of the ranks that have the pieces; None: nothing is cut.
        cuts: name of a weight -> (dimension, number of parts along it); other weights are whole on every rank.
    """

    def __init__(self, group: Any = None, cuts: dict[str, tuple[int, int]] | None = None) -> None:
        alone = group is None or dsx_comm.get_world_size(group) == 1
        self.group, self.cuts = (None, {}) if alone else (group, dict(cuts or {}))
        self.rank, self.size = (0, 1) if alone else (dsx_comm.get_rank(group), dsx_comm.get_world_size(group))

    def __deepcopy__(self, memo: Any) -> ExpertSlices:
        return self

    def check(self, shapes: dict[str, tuple[int, ...]], name: str) -> None:
        """Raise `MoEConfigError` if a weight cannot be cut evenly. `shapes` are those of the whole weights, by name."""
        for key, (dim, parts) in self.cuts.items():
            length = shapes[key][dim] // parts
            if length % self.size:
                raise MoEConfigError(
                    f"{name}.{key}: got an inner size of {length}, expected a multiple of {self.size} (tensor-parallel"
                    " ranks)"
                )

    def own(self, key: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole weight, as a copy. A weight that is not cut is returned as it is."""
        if key not in self.cuts:
            return whole
        dim, parts = self.cuts[key]
        pieces = [part.chunk(self.size, dim)[self.rank] for part in whole.chunk(parts, dim)]
        return torch.cat(pieces, dim).contiguous()

    def whole(self, key: str, own: torch.Tensor) -> torch.Tensor:
        """The whole weight, joined from the ranks' pieces (collective)."""
        if key not in self.cuts:
            return own
        dim, parts = self.cuts[key]
        rows = own.new_empty(self.size, *own.shape)
        dsx_comm.all_gather_into_tensor(rows.view(-1), own.contiguous().view(-1), group=self.group)
        cut = [piece.chunk(parts, dim) for piece in rows]
        return torch.cat([one[part] for part in range(parts) for one in cut], dim)

    def piece_of(self, name: str, key: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """This rank's piece of a value of a state dict. The value may be whole, or this rank's piece already.

        Args:
            name: full name of the value, for errors.
            key: name of the weight in `cuts`.
            value: the value.
            shape: shape of this rank's piece.

        Raises:
            ExpertStateError: the value has neither size.
        """
        if key not in self.cuts or value.shape == shape:
            return value
        dim, _ = self.cuts[key]
        if value.dim() != len(shape) or value.shape[dim] != shape[dim] * self.size:
            raise ExpertStateError(
                f"{name}: got the shape {tuple(value.shape)}, expected {shape[dim] * self.size} (whole) or {shape[dim]}"
                f" (a piece) in dimension {dim}"
            )
        return self.own(key, value)

    def mark(self, module: torch.nn.Module) -> None:
        """Set Megatron's attributes of slices on the cut weights of a module."""
        for key, (dim, parts) in self.cuts.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = dim  # type: ignore[attr-defined]
                parameter.partition_stride = parts  # type: ignore[attr-defined]
