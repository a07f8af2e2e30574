"""The dtypes and operators that the compiled module reduces, as its codes.

Complex numbers are added as pairs of floats; booleans are bytes with logical operators. What is not in the tables
(8-bit floats, unsigned integers wider than a byte) is gathered and reduced by torch, in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CommArgumentError

_Kind: Any = dist.ReduceOp.RedOpType

# dtype -> (code, numbers per element)
DTYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.float32: (0, 1),
    torch.float64: (1, 1),
    torch.bfloat16: (2, 1),
    torch.float16: (3, 1),
    torch.int8: (4, 1),
    torch.uint8: (5, 1),
    torch.int16: (6, 1),
    torch.int32: (7, 1),
    torch.int64: (8, 1),
    torch.bool: (5, 1),
    torch.complex64: (0, 2),
    torch.complex128: (1, 2),
}
# What is only moved is named by a code, too, so that ranks can compare it; up to int64 the codes are those above.
_MOVED = {
    **{dtype: code for dtype, (code, count) in DTYPES.items() if count == 1 and dtype != torch.bool},
    torch.bool: 9,
    torch.complex64: 10,
    torch.complex128: 11,
}
_NAMELESS = 12
_SUM, _PRODUCT, _MIN, _MAX, _BAND, _BOR, _BXOR = range(7)
_OPS = {
    _Kind.SUM: _SUM,
    _Kind.AVG: _SUM,
    _Kind.PREMUL_SUM: _SUM,
    _Kind.PRODUCT: _PRODUCT,
    _Kind.MIN: _MIN,
    _Kind.MAX: _MAX,
    _Kind.BAND: _BAND,
    _Kind.BOR: _BOR,
    _Kind.BXOR: _BXOR,
}
_BOOLEAN = {_SUM: _BOR, _PRODUCT: _BAND, _MIN: _BAND, _MAX: _BOR, _BAND: _BAND, _BOR: _BOR, _BXOR: _BXOR}
_BITWISE = (_BAND, _BOR, _BXOR)


class Reduction(NamedTuple):
    """A reduction in the module's terms; `elements` numbers make one element of the tensor."""

    dtype: int
    op: int
    average: bool
    factor: float
    elements: int


def wire_code(dtype: torch.dtype) -> int:
    """The code of a dtype for calls that move data without looking into it; the rest have one by their size."""
    return _MOVED.get(dtype, _NAMELESS + dtype.itemsize)


def _reduction(kind: Any, dtype: torch.dtype, factor: float) -> Reduction | None:
    if kind not in _OPS:
        raise CommArgumentError(f"reduction operator {kind} is not available on the dsx backend")
    op, average = _OPS[kind], kind == _Kind.AVG
    real = dtype.is_floating_point or dtype.is_complex
    if (average or kind == _Kind.PREMUL_SUM) and not real:
        raise CommArgumentError(f"{kind.name} of {dtype} is not defined: reduce with SUM and scale as you need it")
    if op in _BITWISE and real:
        raise CommArgumentError(f"{kind.name} needs integers or booleans, got {dtype}")
    if dtype.is_complex and op != _SUM:
        raise CommArgumentError(f"{kind.name} is not available for {dtype}")
    if dtype not in DTYPES:
        return None
    code, elements = DTYPES[dtype]
    return Reduction(code, _BOOLEAN[op] if dtype == torch.bool else op, average, factor, elements)


# A table filled on use. Both keys are finite sets; the operator by its number, since torch compares slowly.
_PLAIN: dict[tuple[int, torch.dtype], Reduction | None] = {}


def reduction(op: Any, dtype: torch.dtype) -> Reduction | None:
    """The reduction `op` (a ReduceOp) of `dtype`; None where torch has to compute it.

    Raises CommArgumentError where the operator has no meaning for the dtype.
    """
    kind = getattr(op, "op", op)
    key = (kind.value, dtype)
    if key in _PLAIN:
        return _PLAIN[key]
    if kind == _Kind.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                raise CommArgumentError(f"PREMUL_SUM: got a factor of {factor.numel()} elements, expected one number")
            factor = factor.item()
        return _reduction(kind, dtype, float(factor))
    _PLAIN[key] = _reduction(kind, dtype, 1.0)
    return _PLAIN[key]
