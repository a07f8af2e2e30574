"""Estimates the communication time of one forward and backward pass, with and without each part of ZeRO++.

This file is plain arithmetic.

For a buffer of S bytes among N ranks, D on each node, with s = S / N, one rank sends

    gather or reduce-scatter over all    (nodes - 1) s between nodes, the rest of (N - 1) s inside; N - 1 messages
    gather in two levels                 the same bytes; nodes - 1 messages between, D - 1 inside
    gather near (hpZ, k ranks)           (k - 1) / k S, as of a set of k ranks
    differences (hpZ)                    a quantised gather over all, and a gather near
    quantised reduce-scatter             (D - 1) / D S inside, then (nodes - 1) s between, both in fewer bits

where the bytes between nodes are the fewest that must cross, divided evenly among the ranks of a node. The time is the
latency of the messages, plus bytes divided by rate, plus the arithmetic of quantisation. Overlap with computation is
not considered: if computation hides all messages, sending less saves no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dsx_comm.compressed.rates import LinkRates, PathRate

__all__ = ["Buffer", "Estimate", "Features", "Places", "estimate", "subsets"]


@dataclass(frozen=True)
class Buffer:
    """A flat buffer.

    Attributes:
        numel: elements.
        gathers: how often its values are gathered in a pass; 0: they stay whole.
        itemsize: bytes of a value when it is sent.
        gradient_itemsize: bytes of a gradient when it is sent.
        trained: the buffer has gradients.
    """

    numel: int
    gathers: int
    itemsize: int
    gradient_itemsize: int
    trained: bool


@dataclass(frozen=True)
class Places:
    """`devices` ranks on each of `nodes` nodes."""

    nodes: int
    devices: int

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    def near(self, ranks: int) -> Places:
        """The nodes of `ranks` neighbouring ranks."""
        return Places(1, ranks) if ranks <= self.devices else Places(ranks // self.devices, self.devices)


@dataclass(frozen=True)
class Features:
    """The parts of ZeRO++ that are used.

    Attributes:
        near: number of near ranks with secondary shards; 0: none.
        weight_bits, gradient_bits: bits of parameters and gradients; 0: not quantised.
        only_frozen: only parameters that are not trained are quantised.
        differences: for trained parameters, differences to secondary shards are sent.
        gradient_block: gradients that share a scale.
        two_levels: gathers run between nodes first, then inside them.
    """

    near: int = 0
    weight_bits: int = 0
    only_frozen: bool = False
    differences: bool = False
    gradient_bits: int = 0
    gradient_block: int = 2048
    two_levels: bool = False


@dataclass(frozen=True)
class Estimate:
    """Seconds of a pass, and bytes that one rank sends between nodes and inside them."""

    seconds: float = 0.0
    between: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.seconds + other.seconds, self.between + other.between, self.inside + other.inside)

    def __str__(self) -> str:
        where = f"{self.between / 1e6:.3g} MB between nodes, {self.inside / 1e6:.3g} inside"
        return f"{self.seconds * 1e3:.3g} ms ({where})"


def estimate(buffers: Sequence[Buffer], features: Features, places: Places, rates: LinkRates) -> Estimate:
    """Time and bytes of the communication of one forward and backward pass, per rank."""
    total = Estimate()
    for buffer in buffers:
        for number in range(buffer.gathers):
            total += _gather(buffer, features, places, rates, later=number > 0)
        if buffer.trained:
            total += _reduction(buffer, features, places, rates)
    return total


def subsets(asked: Features) -> Iterator[Features]:
    """`asked`, and each valid choice with parts of it switched off. (Few bits of weights need secondary shards.)"""
    near, weights, gradients, levels = (
        dict.fromkeys((value, type(value)())) for value in
        (asked.near, asked.weight_bits, asked.gradient_bits, asked.two_levels)
    )  # fmt: skip
    for n, w, g, t in product(near, weights, gradients, levels):
        differences = asked.differences and n > 0 and w > 0
        if differences == asked.differences or w in (0, 8):
            yield replace(asked, near=n, weight_bits=w, gradient_bits=g, two_levels=t, differences=differences)


def _gather(buffer: Buffer, features: Features, places: Places, rates: LinkRates, *, later: bool) -> Estimate:
    whole = buffer.numel * buffer.itemsize
    if later and features.near:
        return _collective(whole, places.near(features.near), rates)
    if features.weight_bits and not (features.only_frozen and buffer.trained):
        codec = rates.encode * buffer.numel / places.size + rates.decode * buffer.numel
        total = _collective(_quantised(buffer.numel, features.weight_bits), places, rates) + Estimate(codec)
        copied = features.differences and buffer.trained
        return total + _collective(whole, places.near(features.near), rates) if copied else total
    return _collective(whole, places, rates, two_levels=features.two_levels)


def _reduction(buffer: Buffer, features: Features, places: Places, rates: LinkRates) -> Estimate:
    if not features.gradient_bits:
        return _collective(buffer.numel * buffer.gradient_itemsize, places, rates)
    nbytes = _quantised(buffer.numel, features.gradient_bits, features.gradient_block)
    numel = float(buffer.numel)
    inside = nbytes * (places.devices - 1) / places.devices
    between = nbytes / places.size * (places.nodes - 1)
    seconds = 0.0
    for size in (places.devices, places.nodes):  # each hop encodes and sums the result of the previous hop
        if size > 1:
            seconds += (rates.encode + rates.decode) * numel
            numel /= size
    seconds += _time(rates.inside, places.devices - 1, inside) + _time(rates.between, places.nodes - 1, between)
    return Estimate(seconds, between, inside)


def _collective(nbytes: float, places: Places, rates: LinkRates, *, two_levels: bool = False) -> Estimate:
    """An all-gather or a reduce-scatter over all of these ranks."""
    part = nbytes / places.size
    between = (places.nodes - 1) * part
    inside = (places.size - 1) * part - between
    hops = places.nodes - 1 if two_levels or places.nodes == 1 else places.size - 1
    others = places.devices - 1 if two_levels or places.nodes == 1 else 0
    seconds = _time(rates.between, hops, between) + _time(rates.inside, others, inside)
    return Estimate(seconds, between, inside)


def _time(path: PathRate | None, messages: int, nbytes: float) -> float:
    return 0.0 if path is None else messages * path.latency + nbytes / path.rate


def _quantised(numel: int, bits: int, block: int = 2048) -> float:
    """Bytes of the codes of `numel` elements, and of a scale of 4 bytes for each block."""
    return numel * (bits / 8 + 4 / block)
