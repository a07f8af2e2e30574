"""A linear layer as a grid of small ones, so that stage 3 has only one tile's weights gathered at a time.

Tile (o, i) maps input slice i to output slice o; the outputs of one row are summed. Every tile is a separate unit.
Sizes that do not divide are split as evenly as possible, the first parts one larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .errors import ZeroModelError

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


def _parts(total: int, count: int) -> list[int]:
    small, larger = divmod(total, count)
    return [small + (index < larger) for index in range(count)]


class TiledLinear(nn.Module):
    """``nn.Linear(in_features, out_features, bias)`` in ``in_splits`` x ``out_splits`` tiles.

    Args:
        input_is_already_split: forward is given the list of ``in_splits`` input slices.
        combine_out_splits: return one tensor; False: the list of output slices.
        linear_cls: class of the tiles, constructed as ``linear_cls(in, out, bias=..., **kwargs)``.
        init_linear: a whole layer whose values are copied into the tiles.

    Raises:
        ZeroModelError: for splits below 1 or above the number of features.
    """

    children_are_units = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for what, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ZeroModelError(
                    f"TiledLinear: {what}_splits must be in [1, {what}_features={features}], got {splits}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _parts(in_features, in_splits), _parts(out_features, out_splits)
        # A bias belongs to the last tile of a row: it is added once.
        self.tiles = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(self.in_parts)
            )
            for height in self.out_parts
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @property
    def linears(self) -> nn.ModuleList:
        """The tiles under DeepSpeed's name: `linears[row][column]`. Names of parameters begin with `tiles`."""
        return self.tiles

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Input (..., in_features), or its slices; output (..., out_features), or its slices."""
        columns = self._columns(x)
        rows = [self._row(row, columns) for row in self.tiles]  # type: ignore[arg-type]
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    def _columns(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.input_is_already_split:
            if len(x) != len(self.in_parts):
                raise ZeroModelError(f"TiledLinear: expected {len(self.in_parts)} input slices, got {len(x)}")
            return x  # type: ignore[return-value]
        if not isinstance(x, torch.Tensor):
            raise ZeroModelError(
                "TiledLinear: expected a tensor; construct with input_is_already_split=True for slices"
            )
        return x.split(self.in_parts, dim=-1)

    def _row(self, row: nn.ModuleList, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        total = row[0](columns[0])
        for tile, column in zip(list(row)[1:], columns[1:]):
            total = total + tile(column)
        return total

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a whole linear layer of the same sizes (collective where either is partitioned).

        Raises:
            ZeroModelError: if the sizes or the presence of a bias differ.
        """
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape or (other.bias is not None) != self.use_bias:
            raise ZeroModelError(
                f"TiledLinear.copy_params_from: expected weight {shape} and bias={self.use_bias}, got "
                f"{tuple(other.weight.shape)} and bias={other.bias is not None}"
            )
        weight, bias = _whole(other.weight), None if other.bias is None else _whole(other.bias)
        for row, block in zip(self.tiles, weight.split(self.out_parts, dim=0)):
            for tile, piece in zip(row, block.split(self.in_parts, dim=1)):  # type: ignore[arg-type]
                tile.weight.copy_(piece)
        if bias is not None:
            for row, piece in zip(self.tiles, bias.split(self.out_parts)):
                row[-1].bias.copy_(piece)  # type: ignore[index]


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` for layers that return ``(output, bias)`` and leave adding the bias to the caller (Megatron
    style).
    """

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Like ``TiledLinear.forward``, but ``(output, bias)``; the bias is None without one."""
        columns = self._columns(x)
        outputs, biases = [], []
        for row in self.tiles:
            total, bias = None, None
            for tile, column in zip(row, columns):  # type: ignore[arg-type]
                part, tile_bias = tile(column)
                total = part if total is None else total + part
                bias = tile_bias if bias is None else bias
            outputs.append(total)
            biases.append(bias)
        bias = biases if self.use_bias else None
        if self.combine_out_splits:
            return torch.cat(outputs, dim=-1), None if bias is None else torch.cat(biases, dim=-1)
        return outputs, bias


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return parameter.detach() if full is None else full()
