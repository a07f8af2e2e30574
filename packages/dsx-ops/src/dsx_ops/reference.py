"""The updates in plain PyTorch: oracle of the kernels, and what runs where there are none.

Every elementwise rule uses the same fp32 operations in the same order as `native/cpu/optimizers.cpp`, each rounding
once, so the results are equal to the bit on CPU. Long tensors are worked on in pieces, so that the temporaries stay
small. Runs on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .layouts import flat
from .spec import BLOCKS, Algorithm, Batch, Lowered, Slot

BLOCK8 = BLOCKS[Algorithm.ADAM8]
PIECE = 1 << 22  # elements at a time; a multiple of every block

# What a code's bits, shifted left by 20 and read as fp32, are multiplied by; and the scale from which on that is done
# in two steps.
FIRST_UNIT, SECOND_UNIT = 2.0**112, 2.0**96
FIRST_LIMIT, SECOND_LIMIT = 2.0**13, 2.0**29
LARGEST_CODE = 1.875
_MASK32 = 0xFFFFFFFF


def run(batch: Batch) -> None:
    """Apply the batch's update. Not for LAMB, which has two phases."""
    numbers = batch.hyper.lowered(batch.algorithm, on_device=True)
    update = {
        Algorithm.ADAM: adam,
        Algorithm.ADAGRAD: _adagrad,
        Algorithm.LION: _lion,
        Algorithm.SGD: _sgd,
    }.get(batch.algorithm)
    for slot in batch.slots:
        for piece in pieces(slot):
            if update is None:
                _adam8(piece, numbers)
                continue
            p = load_param(piece)
            states = tuple(s if s.dtype == torch.float32 else s.float() for s in piece.states)
            update(p, gradient(piece.grad, numbers), states, numbers)
            for kept, new in zip(piece.states, states):
                if kept is not new:
                    kept.copy_(new)
            store_param(piece, p)


def pieces(slot: Slot, block: int = BLOCK8) -> Iterator[Slot]:
    """The slot cut into flat slots of at most PIECE elements; `block`: elements per scale."""
    total = slot.param.numel()
    for at in range(0, total, PIECE):
        count = min(PIECE, total - at)

        def cut(t: Tensor, at: int = at, count: int = count) -> Tensor:
            return flat(t).narrow(0, at, count)

        first = at // block
        yield replace(
            slot,
            param=cut(slot.param),
            grad=cut(slot.grad),
            states=tuple(cut(s) for s in slot.states),
            low_bits=None if slot.low_bits is None else cut(slot.low_bits),
            copy=None if slot.copy is None else cut(slot.copy),
            scales=tuple(s[first : first - (-count // block)] for s in slot.scales),
            offset=slot.offset + at,
        )


def load_param(piece: Slot) -> Tensor:
    """The fp32 value of the piece's parameter: the tensor itself when that is fp32."""
    if piece.low_bits is not None:
        return join_master(piece.param, piece.low_bits)
    return piece.param if piece.param.dtype == torch.float32 else piece.param.float()


def store_param(piece: Slot, p: Tensor, random: Tensor | None = None) -> None:
    """Write the fp32 value back, and into the copy. `random`: 16 bits for each element; a bf16 parameter without a
    master is rounded stochastically by them, so that updates below its last bit add up.
    """
    if random is not None and piece.param.dtype == torch.bfloat16 and piece.low_bits is None:
        piece.param.copy_(rounded_to_bf16(p, random))
    elif piece.low_bits is not None:
        weight, low = split_master(p)
        piece.param.copy_(weight)
        piece.low_bits.copy_(low)
    elif piece.param is not p:
        piece.param.copy_(p)
    if piece.copy is not None:
        piece.copy.copy_(p)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16 weight, int16 low bits) without loss; NaN becomes the quiet NaN.

    The weight is the master rounded to nearest, ties away from zero (with ties to even 16 bits would not be enough).
    """
    bits = torch.where(master.isnan(), torch.full_like(master, float("nan")), master).contiguous().view(torch.int32)
    bits = torch.where(master.isnan(), torch.full_like(bits, 0x7FC00000), bits)
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight, bits.to(torch.int16)


def join_master(weight: Tensor, low_bits: Tensor) -> Tensor:
    """(bf16 weight, int16 low bits) -> the fp32 master they were split from."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + low_bits.to(torch.int32)).view(torch.float32)


def gradient(grad: Tensor, h: Lowered) -> Tensor:
    g = grad.float()
    if h.unscale:
        g = g * h.grad_mul
    return -g if h.maximize else g


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root; on CPU torch's fp32 one (vector library) is sometimes off by the last bit."""
    return x.sqrt() if x.device.type == "cuda" else x.double().sqrt_().float()


def _moments(m: Tensor, v: Tensor, g: Tensor, h: Lowered) -> None:
    m.mul_(h.beta1).add_(g * h.one_minus_beta1)
    v.mul_(h.beta2).add_((g * h.one_minus_beta2) * g)


def adam(p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Lowered) -> None:
    m, v = states
    if h.use_l2:
        g = g + p * h.l2
    _moments(m, v, g, h)
    if h.decoupled:
        p.mul_(h.decay)
    p.sub_((m / _root(v).mul_(h.inv_denom).add_(h.eps)).mul_(h.step_size))


def adam_rollback(slot: Slot, h: Lowered) -> None:
    """Undo the Adam update that was made with the numbers `h`, to rounding: parameter and moments as they were before
    it.

    The parameter comes first, since its step is a function of the moments after the update; with L2 decay the gradient
    needs the old parameter:  p = (p' + step m' / (sqrt(v') inv + eps)) / decay;  m = (m' - (1-b1) g) / b1;  v = max((v'
    - (1-b2) g^2) / b2, 0).
    """
    for piece in pieces(slot):
        p, (m, v) = load_param(piece), (s.float() for s in piece.states)
        p = p + (m / _root(v).mul_(h.inv_denom).add_(h.eps)).mul_(h.step_size)
        if h.decoupled:
            p = p / h.decay
        g = gradient(piece.grad, h)
        if h.use_l2:
            g = g + p * h.l2
        piece.states[0].copy_((m - g * h.one_minus_beta1) / h.beta1)
        piece.states[1].copy_(((v - (g * h.one_minus_beta2) * g) / h.beta2).clamp_(min=0.0))
        store_param(piece, p)


def _adagrad(p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Lowered) -> None:
    (total,) = states
    if h.use_l2:
        g = g + p * h.l2
    total.add_(g * g)
    p.sub_((g / _root(total).add_(h.eps)).mul_(h.step_size))


def _lion(p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Lowered) -> None:
    (m,) = states
    direction = (m * h.beta1).add_(g * h.one_minus_beta1).sign_()
    if h.decoupled:
        p.mul_(h.decay)
    p.sub_(direction.mul_(h.step_size))
    m.mul_(h.beta2).add_(g * h.one_minus_beta2)


def _sgd(p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Lowered) -> None:
    if h.use_l2:
        g = g + p * h.l2
    if h.momentum:
        (buffer,) = states
        buffer.mul_(h.beta1).add_(g * h.damp)
        g = g + buffer * h.beta2 if h.nesterov else buffer
    p.sub_(g * h.step_size)


# ---- Lamb ------------------------------------------------------------------------------------------------------------


def _lamb_direction(p: Tensor, m: Tensor, v: Tensor, h: Lowered) -> Tensor:
    u = m / (_root(v + h.eps) if h.eps_inside else _root(v).add_(h.eps))
    return u + p * h.l2 if h.use_l2 else u


def lamb_update(batch: Batch) -> Tensor:
    """Phase 1: the moments. Returns fp64 [slots, 2]: squared norms of parameter and direction, on the slots' device."""
    h = batch.hyper.lowered(Algorithm.LAMB)
    rows = []
    for slot in batch.slots:
        row = torch.zeros(2, dtype=torch.float64, device=slot.param.device)
        for piece in pieces(slot):
            p, g = load_param(piece), gradient(piece.grad, h)
            m, v = (s if s.dtype == torch.float32 else s.float() for s in piece.states)
            _moments(m, v, g, h)
            for kept, new in zip(piece.states, (m, v)):
                if kept is not new:
                    kept.copy_(new)
            row[0] += p.double().square_().sum()
            row[1] += _lamb_direction(p, m, v, h).double().square_().sum()
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)


def lamb_apply(batch: Batch, coefficients: Tensor) -> None:
    """Phase 2: parameters move by `coefficients[slot]` (fp32, step size times trust ratio) times the direction."""
    h = batch.hyper.lowered(Algorithm.LAMB)
    for slot, coefficient in zip(batch.slots, coefficients.unbind()):
        for piece in pieces(slot):
            p = load_param(piece)
            m, v = (s if s.dtype == torch.float32 else s.float() for s in piece.states)
            p.sub_(_lamb_direction(p, m, v, h) * coefficient)
            store_param(piece, p)


# ---- 8-bit states ----------------------------------------------------------------------------------------------------


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash in int64 arithmetic."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def noise(seed: int | Tensor, offset: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two 32-bit random numbers per element, keyed by seed (or an int64 tensor with it) and element index."""
    index = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    first = _mix((index & _MASK32) ^ ((seed + (index >> 32) * 0x9E3779B9) & _MASK32))
    return first, (first * 0x9E3779B1) & _MASK32


def pair_noise(seed: int, offset: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each pair of elements (int64, one number per element, the same for both of a pair); `offset`
    is even.
    """
    pair = torch.arange(offset, offset + count, dtype=torch.int64, device=device) >> 1
    block = pair // (BLOCK8 // 2)
    start = _mix((block & _MASK32) ^ ((seed + (block >> 32) * 0x9E3779B9) & _MASK32))
    state = (start + (pair % (BLOCK8 // 2)) * 0x9E3779B9) & _MASK32
    return ((state ^ (state >> 16)) * 0x7FEB352D) & _MASK32


def encode8(shifted: Tensor, random: Tensor) -> Tensor:
    """Stochastic code (int64) of numbers that are not negative, divided by their moment's unit already; `random` has 20
    bits.
    """
    return ((shifted.contiguous().view(torch.int32).to(torch.int64) & _MASK32) + random) >> 20


def decode8(code: Tensor, unit: float) -> Tensor:
    """The value of each code (of 7 or 8 bits): fp32 from 0 to 1.875."""
    return (code.to(torch.int32) << 20).view(torch.float32) * unit


def rounded_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """fp32 numbers rounded to bfloat16, up with the probability of what is cut off; `random` has 16 bits (int64). NaN
    stays NaN.
    """
    bits = ((x.contiguous().view(torch.int32).to(torch.int64) & _MASK32) + random) >> 16
    return torch.where(x.isnan(), torch.full_like(bits, 0x7FC0), bits).to(torch.int16).view(torch.bfloat16)


def _fp32(x: Any) -> Any:
    """Rounded to fp32, a tensor on its device. Of one operation on such numbers in fp64 this is what fp32 gives."""
    return x.float().double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32).item()


@dataclass
class _Numbers8:
    """The step's numbers, folded as in `native/cpu/adam8.cpp`.

    Second moments are counted in units of (1 - beta2) / (1 - beta1)^2: then a gradient adds to them the square of what
    it adds to the first.
    """

    beta1: float
    beta2: float
    decode1: float
    decode2: float
    from_units: float
    grad_mul: float
    l2: float
    eps: float
    decay: float
    step_size: float

    @staticmethod
    def of(h: Lowered) -> _Numbers8:
        share, beta1 = _fp32(h.one_minus_beta1), _fp32(h.beta1)
        units = _fp32(_fp32(share * share) / _fp32(h.one_minus_beta2))
        root = _fp32(_fp32(math.sqrt(units)) / _fp32(h.inv_denom))
        beta2 = _fp32(_fp32(h.beta2) * units)
        scale = _fp32(h.grad_mul) if h.unscale else 1.0
        return _Numbers8(
            beta1=beta1,
            beta2=beta2,
            decode1=_fp32(beta1 / LARGEST_CODE),
            decode2=_fp32(beta2 / LARGEST_CODE),
            from_units=_fp32(1.0 / units),
            grad_mul=_fp32(share * (-scale if h.maximize else scale)),
            l2=_fp32(share * _fp32(h.l2)),
            eps=_fp32(_fp32(h.eps) * root),
            decay=_fp32(h.decay),
            step_size=_fp32(_fp32(h.step_size) * root),
        )


def per_element(scale: Tensor, count: int, block: int = BLOCK8) -> Tensor:
    """The scale of each of `count` elements."""
    return scale.repeat_interleave(block)[:count]


def block_max(x: Tensor, block: int = BLOCK8) -> Tensor:
    """The largest of each block, of numbers that are not negative."""
    padded = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    return padded.amax(dim=1)


def _below_largest(x: Tensor, scale: Tensor, careful: Tensor, unit: float) -> Tensor:
    """x over its block's scale and over the unit, as `encode8` takes it: a little less than 1.875 at most; 0 where that
    is no number.
    """
    inverse = torch.where(
        (scale >= torch.finfo(torch.float32).tiny) & (scale <= torch.finfo(torch.float32).max),
        _fp32(LARGEST_CODE * _fp32(1 - 2.0**-20)) / scale,
        torch.zeros_like(scale),
    )
    before = torch.where(careful, 1 / unit, 1.0).to(torch.float32)
    after = torch.where(careful, inverse, inverse * (1 / unit))
    shifted = (x * per_element(before, x.numel())) * per_element(after, x.numel())
    return torch.where(shifted.isnan(), torch.zeros_like(shifted), shifted)


def _adam8(piece: Slot, lowered: Lowered) -> None:
    h, count, p = _Numbers8.of(lowered), piece.param.numel(), load_param(piece)
    g = piece.grad.float() * h.grad_mul
    if lowered.use_l2:
        g = g + p * h.l2
    first, second = (s.to(torch.int32) for s in piece.states)
    scale1, scale2 = piece.scales
    most = block_max(g.abs())
    by1, by2, new1, new2 = (
        scale1 * h.decode1,
        scale2 * h.decode2,
        scale1 * h.beta1 + most,
        scale2 * h.beta2 + most * most,
    )
    m = decode8(first & 0x7F, FIRST_UNIT) * per_element(by1, count)
    m = torch.where((first & 0x80) != 0, -m, m) + g
    v = decode8(second, SECOND_UNIT) * per_element(by2, count) + g * g
    careful = ~((by1 <= FIRST_LIMIT) & (new1 <= FIRST_LIMIT) & (by2 <= SECOND_LIMIT) & (new2 <= SECOND_LIMIT))
    finite = new1.isfinite() & new2.isfinite()
    scale1.copy_(torch.where(finite, new1, math.nan))
    scale2.copy_(torch.where(finite, new2 * h.from_units, math.nan))

    random = pair_noise(lowered.seed, piece.offset, count, p.device)
    odd = (torch.arange(count, device=p.device) & 1).bool()
    noise = torch.where(odd, random & 0xFFFFF, random >> 12)
    magnitude = encode8(_below_largest(m.abs(), new1, careful, FIRST_UNIT), noise)
    sign = (m.view(torch.int32) < 0).to(torch.int64) << 7
    piece.states[0].copy_(magnitude | torch.where(per_element(finite, count), sign, torch.zeros_like(sign)))
    # Never below the smallest normal code: the root of a second moment is divided by.
    piece.states[1].copy_(encode8(_below_largest(v, new2, careful, SECOND_UNIT), noise).clamp_(min=8))

    if lowered.decoupled:
        p.mul_(h.decay)
    p.sub_((m / _root(v).add_(h.eps)).mul_(h.step_size))
    store_param(piece, p, torch.where(odd, random >> 16, random & 0xFFFF))


# ---- norms -----------------------------------------------------------------------------------------------------------


def squares(tensors: list[Tensor]) -> Tensor:
    """fp64 sum of squares per tensor, on the first tensor's device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    totals = []
    for tensor in tensors:
        whole = flat(tensor)
        parts = [whole[at : at + PIECE].double().square_().sum() for at in range(0, whole.numel(), PIECE)]
        totals.append(torch.stack(parts).sum() if parts else whole.new_zeros((), dtype=torch.float64))
    return torch.stack([t.to(tensors[0].device) for t in totals])
