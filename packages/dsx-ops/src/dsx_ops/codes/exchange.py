"""Quantisation for ZeRO++'s gradient exchange: swizzled, reducing, and with error feedback.

Gradients of N nodes with D devices each go to their owners in two hops: between the devices of a node, then between
nodes. Chunk (n, d) of the flat gradient belongs to device d of node n, so a device's first message to its neighbour d
holds the chunks (0, d), (1, d), ... :

    q = swizzle_quantize(gradient, nodes=N, devices=D)       # codes lie as [D, N, chunk]
    ... all-to-all in the node ...                           # rows from D devices, each [N, chunk]
    q = reduce_quantize(rows, ranks=D, numel=N * chunk)      # added up in fp32, quantised again: [N, chunk]
    ... all-to-all between nodes ...
    mine = reduce_dequantize(rows, ranks=N, numel=chunk)     # fp32 [chunk], or `out`

`LocoQuantizer` keeps what rounding loses and adds it to the next gradient (Xie et al. 2024, "LoCo", algorithm 1).
Moving bytes is not done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import library, native
from ..checks import MASK32, check
from ..errors import HyperparameterError, TensorError
from ..tables import DTYPE_CODES, addresses
from . import reference
from .quantize import Quantized, check_codes, empty_codes, format_of, run, run_back
from .scheme import Scheme


def swizzle_quantize(
    x: Tensor,
    *,
    nodes: int,
    devices: int,
    pipeline: int = 1,
    bits: int = 4,
    group_size: int = 256,
    symmetric: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise x, seen as [nodes, devices, chunk], into codes laid out as [pipeline, devices, nodes, chunk / pipeline],
    in one pass.

    numel must be a multiple of nodes * devices * pipeline * group_size; otherwise as `quantize`. Stochastic rounding is
    keyed by the index in x.
    """
    where = (nodes, devices, pipeline)
    return run(x, format_of(bits, symmetric), group_size, stochastic, seed, offset, swizzle=where, out=out)


def unswizzle_dequantize(
    q: Quantized,
    shape: int | Sequence[int],
    *,
    nodes: int,
    devices: int,
    pipeline: int = 1,
    bits: int = 4,
    group_size: int = 256,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The tensor that `swizzle_quantize` was given, in its order."""
    where = (nodes, devices, pipeline)
    return run_back(q, shape, format_of(bits, symmetric), group_size, dtype, swizzle=where)


def reduce_dequantize(
    q: Quantized,
    *,
    ranks: int,
    numel: int,
    bits: int = 4,
    group_size: int = 256,
    symmetric: bool = True,
    mean: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """fp32 [numel]: the sum (`mean`: the mean) of what `ranks` messages of `numel` elements stand for, added in fp32 in
    their order.

    `q`: the messages one after another, each tensor with `ranks` equal parts. Raises `TensorError`.
    """
    if out is None:
        out = torch.empty(numel, dtype=torch.float32, device=q.codes.device)
    torch.ops.dsx_ops.reduce_codes(*q, ranks, format_of(bits, symmetric), group_size, _factor(ranks, mean), out)
    return out


def reduce_quantize(
    q: Quantized,
    *,
    ranks: int,
    numel: int,
    bits: int = 4,
    group_size: int = 256,
    symmetric: bool = True,
    mean: bool = False,
    out_bits: int | None = None,
    out_group_size: int | None = None,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> Quantized:
    """As `reduce_dequantize`, quantised again a group at a time: the fp32 sums never leave the cache.

    `out_bits`, `out_group_size`: as the input's when left out; `stochastic`, `seed`, `offset` are the output's. Raises
    `TensorError`.
    """
    given, made = format_of(bits, symmetric), format_of(bits if out_bits is None else out_bits, symmetric)
    how = (made, out_group_size or group_size, stochastic, seed & MASK32, offset)
    found = torch.ops.dsx_ops.requantize(*q, ranks, numel, given, group_size, _factor(ranks, mean), *how)
    return Quantized(*found)


def _factor(ranks: int, mean: bool) -> float:
    if ranks < 1:
        raise TensorError(f"ranks: got {ranks}, expected at least 1")
    return 1.0 / ranks if mean else 1.0


class LocoQuantizer:
    """Quantiser of one flat gradient with error feedback kept in 8 bits per element (LoCo).

    g = x + e;  q = quantise(g);  e <- beta e + (1 - beta) (g - dequantise(q));  every `reset` calls e <- 0 (`reset` 0:
    never).
    """

    def __init__(self, numel: int, *, beta: float = 0.8, reset: int = 1024, group_size: int = 256) -> None:
        if not 0.0 <= beta < 1.0:
            raise HyperparameterError(f"beta: got {beta}, expected 0 <= beta < 1")
        if reset < 0:
            raise HyperparameterError(f"reset: got {reset}, expected a number of calls, or 0 for never")
        self.beta, self.reset, self.group_size = beta, reset, group_size
        self.numel, self.calls = numel, 0
        scheme = Scheme("int8", group_size)
        self.error = Quantized(*(t.zero_() for t in empty_codes(torch.empty(0), numel, scheme)))

    def quantize(self, x: Tensor, *, nodes: int = 1, devices: int = 1, bits: int = 4) -> Quantized:
        """The codes of x plus the error so far, swizzled as by `swizzle_quantize`; updates the error. Raises
        `TensorError`.
        """
        check(x, "LoCo's input")
        if x.numel() != self.numel:
            raise TensorError(f"LoCo's input: got {x.numel()} elements, expected {self.numel}")
        if self.error.codes.device != x.device:
            self.error = Quantized(*(t.to(x.device) for t in self.error))
        format, where = format_of(bits, True), (nodes, devices, 1)
        kept = run_back(self.error, x.numel(), "int8", self.group_size, torch.float32)
        wanted = x.detach().reshape(-1).float() + kept
        q = run(wanted, format, self.group_size, swizzle=where)
        self.calls += 1
        if self.reset and self.calls % self.reset == 0:
            for t in self.error:
                t.zero_()
            return q
        lost = wanted.sub_(run_back(q, x.numel(), format, self.group_size, torch.float32, swizzle=where))
        run(kept.mul_(self.beta).add_(lost, alpha=1.0 - self.beta), "int8", self.group_size, out=self.error)
        return q


# ---- operators -------------------------------------------------------------------------------------------------------


def _check_messages(q: Sequence[Tensor], ranks: int, numel: int, scheme: Scheme) -> None:
    for tensor in q:
        if tensor.numel() % ranks:
            raise TensorError(f"got {tensor.numel()} codes, scales or zeros, expected a multiple of {ranks} ranks")
        if not tensor.is_contiguous():
            raise TensorError(
                f"codes, scales or zeros: got strides {tuple(tensor.stride())}, expected contiguous; pass .contiguous()"
            )
    check_codes([t.view(-1).narrow(0, 0, t.numel() // ranks) for t in q], numel, scheme)


def _rows(q: Sequence[Tensor], ranks: int) -> tuple[Tensor, ...]:
    return tuple(t.reshape(ranks, t.numel() // ranks) for t in q)


def _fake_reduce(
    codes: Tensor, scale: Tensor, zero: Tensor, ranks: int, format: str, group: int, factor: float, out: Tensor
) -> None:
    check(out, "out", dtypes=(torch.float32,), like=codes)
    _check_messages((codes, scale, zero), ranks, out.numel(), Scheme(format, group))


def _run_reduce(
    codes: Tensor, scale: Tensor, zero: Tensor, ranks: int, format: str, group: int, factor: float, out: Tensor
) -> None:
    _fake_reduce(codes, scale, zero, ranks, format, group, factor, out)
    scheme, q, numel = Scheme(format, group), (codes, scale, zero), out.numel()
    module = native.module_for(codes, "quantised reduction", ranks * numel)
    if module is None:
        out.view(-1).copy_(reference.reduce(_rows(q, ranks), numel, scheme, factor))
        return
    _native(module, q, scheme, ranks, factor, [out.data_ptr(), 0, 0], None, numel)


def _made(format: str, group: int, stochastic: bool, seed: int, offset: int) -> Scheme:
    return Scheme(format, group, stochastic, seed, offset)


def _fake_requantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    ranks: int,
    numel: int,
    format: str,
    group: int,
    factor: float,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_messages((codes, scale, zero), ranks, numel, Scheme(format, group))
    return empty_codes(codes, numel, _made(*how))


def _run_requantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    ranks: int,
    numel: int,
    format: str,
    group: int,
    factor: float,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    out = _fake_requantize(codes, scale, zero, ranks, numel, format, group, factor, *how)
    scheme, made, q = Scheme(format, group), _made(*how), (codes, scale, zero)
    module = native.module_for(codes, "quantised reduction", ranks * numel)
    if module is None:
        return reference.quantize(reference.reduce(_rows(q, ranks), numel, scheme, factor), made)
    _native(module, q, scheme, ranks, factor, addresses(*out), made, numel)
    return out


def _native(
    module: Any,
    q: Sequence[Tensor],
    scheme: Scheme,
    ranks: int,
    factor: float,
    to: list[int],
    made: Scheme | None,
    numel: int,
) -> None:
    f32 = DTYPE_CODES[torch.float32]
    strides = [q[0].numel() // ranks, q[1].numel() // ranks]
    again = [] if made is None else made.numbers(f32, numel)
    stochastic, seed = (False, 0) if made is None else (made.stochastic, made.seed & MASK32)
    numbers = scheme.numbers(f32, numel)
    threads = native.threads()
    module.reduce_codes(addresses(*q), numbers, ranks, strides, factor, to, again, numel, stochastic, seed, threads)


library.operator(
    "reduce_codes(Tensor codes, Tensor scale, Tensor zero, int ranks, str format, int group_size, float factor, "
    "Tensor(a!) out) -> ()",
    _run_reduce,
    _fake_reduce,
)
library.operator(
    "requantize(Tensor codes, Tensor scale, Tensor zero, int ranks, int numel, str format, int group_size, float"
    " factor, str out_format, int out_group_size, bool stochastic, int seed, int offset) -> (Tensor, Tensor, Tensor)",
    _run_requantize,
    _fake_requantize,
)
