"""Descriptions of quantisations: format, group size, rounding, places of the groups. Data and arithmetic on sizes.

| format | code | scale of a group | zero |
|---|---|---|---|
| int8, int4 | round(x / scale) | max abs(x) / 127 (7) | none |
| int8_asym, int4_asym | round((x - zero) / scale) | (max x - min x) / 255 (15) | min x |
| e4m3, e5m2 | the nearest fp8 number to x / scale | max abs(x) / 448 (57344) | none |

int4 keeps two codes per byte, the even element in the low half. Rounding to nearest (ties to even), or stochastic,
keyed by seed and the element's index in x: the same on every machine, and for every way of cutting x at groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import TensorError


@dataclass(frozen=True)
class Format:
    """One format; `number` as in native/include/dsx_ops/kernels.h."""

    number: int
    bits: int
    levels: float  # what the largest magnitude (asymmetric: the width of the range) is divided by
    symmetric: bool
    dtype: torch.dtype  # of the codes


FORMATS = {
    "int8": Format(0, 8, 127.0, True, torch.uint8),
    "int4": Format(1, 4, 7.0, True, torch.uint8),
    "int8_asym": Format(2, 8, 255.0, False, torch.uint8),
    "int4_asym": Format(3, 4, 15.0, False, torch.uint8),
    "e4m3": Format(4, 8, 448.0, True, torch.float8_e4m3fn),
    "e5m2": Format(5, 8, 57344.0, True, torch.float8_e5m2),
}


@dataclass(frozen=True)
class Swizzle:
    """x is [nodes, devices, chunk]; its groups are laid out as [pipeline, devices, nodes, chunk / pipeline]."""

    nodes: int = 1
    devices: int = 1
    pipeline: int = 1

    def slice(self, groups: int) -> int:
        """Groups that stay together; 0 when nothing moves."""
        return 0 if self == Swizzle() else groups // (self.nodes * self.devices * self.pipeline)

    def source(self, groups: int) -> torch.Tensor:
        """int64 [groups]: which group of x lies at each place."""
        index = torch.arange(groups)
        if self == Swizzle():
            return index
        whole = index.view(self.nodes, self.devices, self.pipeline, self.slice(groups))
        return whole.permute(2, 1, 0, 3).reshape(-1)


@dataclass(frozen=True)
class Scheme:
    """Everything that turns a tensor into codes. Raises `TensorError` when made from numbers that do not fit."""

    format: str = "int8"
    group: int = 256
    stochastic: bool = False
    seed: int = 0
    offset: int = 0
    swizzle: Swizzle = Swizzle()

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise TensorError(f"format: got {self.format!r}, expected one of {', '.join(FORMATS)}")
        if self.group <= 0 or (self.kind.bits == 4 and self.group % 2):
            kind = "a positive even number" if self.kind.bits == 4 else "a positive number"
            raise TensorError(f"group_size: got {self.group}, expected {kind}")
        if self.offset < 0:
            raise TensorError(f"offset: got {self.offset}, expected an element index >= 0")
        if min(self.swizzle.nodes, self.swizzle.devices, self.swizzle.pipeline) < 1:
            raise TensorError(f"swizzle: got {self.swizzle}, expected numbers >= 1")

    @property
    def kind(self) -> Format:
        """The format's facts."""
        return FORMATS[self.format]

    def sizes(self, numel: int) -> tuple[int, int, int]:
        """Elements of codes, scale and zero for a tensor of `numel` elements. Raises `TensorError` when a swizzle does
        not fit.
        """
        s, groups = self.swizzle, -(-numel // self.group)
        parts = s.nodes * s.devices * s.pipeline
        if s != Swizzle() and numel % (parts * self.group):
            raise TensorError(
                f"swizzle: got {numel} elements, expected a multiple of {parts * self.group} "
                f"({s.nodes} nodes * {s.devices} devices * {s.pipeline} slices * groups of {self.group})"
            )
        return (numel + 1) // 2 if self.kind.bits == 4 else numel, groups, 0 if self.kind.symmetric else groups

    def numbers(self, dtype_code: int, numel: int) -> list[int]:
        """In the order of the native `quant_of`."""
        s = self.swizzle
        slice_ = s.slice(-(-numel // self.group))
        return [self.kind.number, dtype_code, self.group, self.offset, s.nodes, s.devices, s.pipeline, slice_]
