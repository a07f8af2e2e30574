"""The updates in plain PyTorch: oracle of the kernels, and what runs where there are none.

Every elementwise rule uses the same fp32 operations in the same order as `native/cpu/optimizers.cpp`, each rounding once, so the results
are equal to the bit on CPU. Long tensors are worked on in pieces, so that the temporaries stay small. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .spec import BLOCK8, Algorithm, Batch, Lowered, Slot

PIECE = 1 << 22  # elements at a time; a multiple of BLOCK8

FIRST_CODES, SECOND_CODES = 127, 255
_MASK32 = 0xFFFFFFFF


def run(batch: Batch) -> None:
    """Apply the batch's update. Not for LAMB, which has two phases."""
    numbers = batch.hyper.lowered(batch.algorithm)
    update = {
        Algorithm.ADAM: _adam,
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
            update(p, _gradient(piece.grad, numbers), states, numbers)
            for kept, new in zip(piece.states, states):
                if kept is not new:
                    kept.copy_(new)
            store_param(piece, p)


def pieces(slot: Slot) -> Iterator[Slot]:
    """The slot cut into flat slots of at most PIECE elements."""
    total = slot.param.numel()
    for at in range(0, total, PIECE):
        count = min(PIECE, total - at)

        def cut(t: Tensor, at: int = at, count: int = count) -> Tensor:
            return t.detach().view(-1).narrow(0, at, count)

        first = at // BLOCK8
        yield replace(
            slot,
            param=cut(slot.param),
            grad=cut(slot.grad),
            states=tuple(cut(s) for s in slot.states),
            low_bits=None if slot.low_bits is None else cut(slot.low_bits),
            copy=None if slot.copy is None else cut(slot.copy),
            scales=tuple(s[first : first - (-count // BLOCK8)] for s in slot.scales),
            offset=slot.offset + at,
        )


def load_param(piece: Slot) -> Tensor:
    """The fp32 value of the piece's parameter: the tensor itself when that is fp32."""
    if piece.low_bits is not None:
        return join_master(piece.param, piece.low_bits)
    return piece.param if piece.param.dtype == torch.float32 else piece.param.float()


def store_param(piece: Slot, p: Tensor) -> None:
    """Write the fp32 value back, and into the copy."""
    if piece.low_bits is not None:
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


def _gradient(grad: Tensor, h: Lowered) -> Tensor:
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


def _adam(p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Lowered) -> None:
    m, v = states
    if h.use_l2:
        g = g + p * h.l2
    _moments(m, v, g, h)
    if h.decoupled:
        p.mul_(h.decay)
    p.sub_((m / _root(v).mul_(h.inv_denom).add_(h.eps)).mul_(h.step_size))


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


# ---- Lamb -------------------------------------------------------------------------------------------------------------


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
            p, g = load_param(piece), _gradient(piece.grad, h)
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


# ---- 8-bit states -----------------------------------------------------------------------------------------------------


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash in int64 arithmetic."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def noise(seed: int, offset: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two 32-bit random numbers per element, keyed by seed and element index."""
    index = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    first = _mix((index & _MASK32) ^ ((seed + (index >> 32) * 0x9E3779B9) & _MASK32))
    return first, (first * 0x9E3779B1) & _MASK32


def encode8(magnitude: Tensor, random: Tensor, codes: int) -> Tensor:
    """Stochastic code (int64) of magnitudes in [0, 1]; `random` has 20 bits."""
    base = 0x3F8 - codes
    smallest = torch.tensor([(base + 1) << 20], dtype=torch.int32).view(torch.float32).item()
    bits = magnitude.contiguous().view(torch.int32).to(torch.int64) & _MASK32
    code = (((bits + random) >> 20) - base).clamp_(max=codes)
    # Below the smallest code: that code with the probability of the ratio to it, so that nothing is lost on average.
    below = (magnitude + random.to(torch.float32) * (smallest * 2.0**-20) > smallest).to(torch.int64)
    return torch.where(bits < (base + 1) << 20, below, code)


def decode8(code: Tensor, codes: int) -> Tensor:
    """The magnitude in [0, 1] (fp32) of each code."""
    bits = (code.to(torch.int32) + (0x3F8 - codes)) << 20
    return torch.where(code == 0, torch.zeros_like(bits), bits).view(torch.float32)


def _per_element(scale: Tensor, count: int) -> Tensor:
    return scale.repeat_interleave(BLOCK8)[:count]


def _block_max(x: Tensor) -> Tensor:
    count = x.numel()
    padded = torch.nn.functional.pad(x, (0, -count % BLOCK8)).view(-1, BLOCK8)
    return padded.amax(dim=1)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where fp32 cannot invert it."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scale < tiny, torch.zeros_like(scale), scale.reciprocal())


def decode_moments(piece: Slot) -> tuple[Tensor, Tensor]:
    """The fp32 moments of a flat slot with 8-bit states."""
    first, second = (s.to(torch.int32) for s in piece.states)
    count = piece.param.numel()
    m = decode8(first & 0x7F, FIRST_CODES) * _per_element(piece.scales[0], count)
    m = torch.where((first & 0x80) != 0, -m, m)
    v = decode8(second, SECOND_CODES) * _per_element(piece.scales[1], count)
    return m, v


def _adam8(piece: Slot, h: Lowered) -> None:
    count = piece.param.numel()
    m, v = decode_moments(piece)
    p = load_param(piece)
    _adam(p, _gradient(piece.grad, h), (m, v), h)
    first, second = noise(h.seed, piece.offset, count, p.device)
    for scale, top in zip(piece.scales, (_block_max(m.abs()), _block_max(v))):
        scale.copy_(top)
    m_part = (m.abs() * _per_element(inverse(piece.scales[0]), count)).clamp_(max=1.0)
    v_part = (v * _per_element(inverse(piece.scales[1]), count)).clamp_(max=1.0)
    sign = (m.view(torch.int32) < 0).to(torch.int64) << 7
    piece.states[0].copy_(encode8(m_part, first >> 12, FIRST_CODES) | sign)
    code = encode8(v_part, second >> 12, SECOND_CODES)
    piece.states[1].copy_(torch.where((code == 0) & (v_part > 0), torch.ones_like(code), code))
    if piece.param.dtype == torch.bfloat16 and piece.low_bits is None:
        bits = ((p.view(torch.int32).to(torch.int64) & _MASK32) + (first & 0xFFFF)) >> 16
        bits = torch.where(p.isnan(), torch.full_like(bits, 0x7FC0), bits)
        piece.param.copy_(bits.to(torch.int16).view(torch.bfloat16))
        if piece.copy is not None:
            piece.copy.copy_(p)
        return
    store_param(piece, p)


# ---- norms ------------------------------------------------------------------------------------------------------------


def squares(tensors: list[Tensor]) -> Tensor:
    """fp64 sum of squares per tensor, on the first tensor's device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    totals = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        parts = [flat[at : at + PIECE].double().square_().sum() for at in range(0, flat.numel(), PIECE)]
        totals.append(torch.stack(parts).sum() if parts else flat.new_zeros((), dtype=torch.float64))
    return torch.stack([t.to(tensors[0].device) for t in totals])
