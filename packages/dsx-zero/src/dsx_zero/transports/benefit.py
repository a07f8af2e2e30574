"""The benefit gate of ZeRO++: does the configured communication save time on these links with these units?

A line in the log says so when the model is sharded. With `zeropp_gate.mode: "auto"` settings that save no time are
switched off.

Rates come from the configuration, or are measured once, in a fraction of a second. `gate` has the arithmetic. All ranks
decide with the same numbers. Experts, which only some ranks share, are not considered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import dsx_comm
import torch
from dsx_comm.compressed.rates import LinkRates, PathRate, measure_rates
from dsx_core import with_code

from ..groups import AuxiliaryGroups
from ..plan.units import UnitPlan
from ..precision import Precision
from .gate import Buffer, Estimate, Features, Places, estimate, subsets
from .nodes import hierarchy_of

if TYPE_CHECKING:
    from ..config import ZeroConfig
    from .chosen import Transports

__all__ = ["features_of", "settings_that_pay"]

_log = logging.getLogger(__name__)

_GATHERS = 2
"""Gathers of a unit in one forward and backward pass: one for each."""


def features_of(settings: ZeroConfig) -> Features:
    """The parts of ZeRO++ that a configuration asks for."""
    weights = settings.zero_quantized_weights or settings.zero_quantized_nontrainable_weights
    return Features(
        near=settings.near_ranks,
        weight_bits=settings.zero_quantized_weights_bits if weights else 0,
        only_frozen=not settings.zero_quantized_weights,
        differences=settings.sends_differences,
        gradient_bits=settings.zero_quantized_gradients_bits if settings.zero_quantized_gradients else 0,
        gradient_block=settings.zero_quantized_gradients_block_size,
        two_levels=settings.mics_hierarchical_params_gather,
    )


def settings_that_pay(
    settings: ZeroConfig,
    plans: Sequence[UnitPlan],
    data: dsx_comm.RankSet,
    groups: AuxiliaryGroups,
    precision: Precision,
    *,
    own: Transports | None = None,
) -> ZeroConfig:
    """The configuration; in the mode "auto" without the settings that save no time. Rank 0 logs the estimate.

    Collective over `data`.

    Args:
        plans: the units of the model.
        data: the data-parallel ranks.
        groups: makes the groups over which links are measured.
        precision: says in which dtype gradients are sent.
        own: the caller's own transports; nothing is known of their time, so nothing is changed.
    """
    asked, gate = features_of(settings), settings.zeropp_gate
    nothing = replace(Features(), only_frozen=asked.only_frozen, gradient_block=asked.gradient_block)
    ranks = _largest_set(plans)
    if own is not None or gate.mode == "off" or asked == nothing or ranks is None or ranks.size == 1:
        return settings
    buffers = tuple(_buffers(plans, ranks, settings.stage, precision))
    hierarchy = hierarchy_of(ranks, groups, "measuring links")
    places = Places(hierarchy.nodes, hierarchy.devices)
    device = next(group.key.device for plan in plans for group in plan.groups if group.key.ranks == ranks)
    rates = _rates(settings, hierarchy, asked, device, data)
    found = {features: estimate(buffers, features, places, rates) for features in subsets(asked)}
    best = min(found, key=lambda features: found[features].seconds)
    if data.rank == 0:
        _say(gate.mode, found[nothing], found[asked], _names(asked, best), places, rates)
    return settings if gate.mode == "report" or best == asked else _without(settings, asked, best)


def _largest_set(plans: Sequence[UnitPlan]) -> dsx_comm.RankSet | None:
    sizes: dict[dsx_comm.RankSet, int] = {}
    for plan in plans:
        for group in plan.groups:
            if group.key.ranks.kind == "experts":
                continue
            sizes[group.key.ranks] = sizes.get(group.key.ranks, 0) + group.layout.numel
    return max(sizes, key=lambda ranks: sizes[ranks], default=None)


def _buffers(plans: Sequence[UnitPlan], ranks: dsx_comm.RankSet, stage: int, precision: Precision) -> list[Buffer]:
    return [
        Buffer(
            group.layout.numel,
            gathers=_GATHERS if stage == 3 and not plan.resident else 0,
            itemsize=group.key.dtype.itemsize,
            gradient_itemsize=precision.wire_dtype(group.key.dtype).itemsize,
            trained=group.key.trainable,
        )
        for plan in plans
        for group in plan.groups
        if group.key.ranks == ranks and group.layout.numel
    ]


def _rates(
    settings: ZeroConfig,
    hierarchy: dsx_comm.Hierarchy,
    asked: Features,
    device: torch.device,
    data: dsx_comm.RankSet,
) -> LinkRates:
    """The measured rates, with those of the configuration in place of measured ones."""
    rates = measure_rates(hierarchy, asked.gradient_bits or asked.weight_bits or 8, device, data.group)
    gate = settings.zeropp_gate
    return replace(
        rates,
        inside=_given(rates.inside, gate.inside_nodes_gb_per_s),
        between=_given(rates.between, gate.between_nodes_gb_per_s),
    )


def _given(measured: PathRate | None, rate: float | None) -> PathRate | None:
    return measured if measured is None or rate is None else replace(measured, rate=rate * 1e9)


def _names(asked: Features, best: Features) -> tuple[str, ...]:
    """The names of the settings that the best choice switches off."""
    left_out = {
        "zero_hpz_partition_size": asked.near != best.near,
        "zero_quantized_weights": asked.weight_bits != best.weight_bits and not asked.only_frozen,
        "zero_quantized_nontrainable_weights": asked.weight_bits != best.weight_bits and asked.only_frozen,
        "zero_quantized_gradients": asked.gradient_bits != best.gradient_bits,
        "mics_hierarchical_params_gather": asked.two_levels != best.two_levels,
    }
    return tuple(name for name, is_left_out in left_out.items() if is_left_out)


def _say(
    mode: str, exact: Estimate, asked: Estimate, left_out: Sequence[str], places: Places, rates: LinkRates
) -> None:
    paths = {"inside nodes": rates.inside, "between nodes": rates.between}
    links = ", ".join(f"{path.rate / 1e9:.3g} GB/s {name}" for name, path in paths.items() if path is not None)
    level = logging.INFO
    text = (
        "ZeRO++ on %d nodes of %d ranks (%s per rank): communication of a forward and backward pass, estimated without"
        " what computation hides: exact %s, as configured %s; %s"
    )
    if not left_out:
        verdict = "it pays"
    elif mode == "auto":
        verdict = f"does not pay and is left out (zeropp_gate.mode auto): {', '.join(left_out)}"
    else:
        verdict = (
            f'does not pay, and is done as configured (zeropp_gate.mode "auto" leaves it out): {", ".join(left_out)}'
        )
        level, text = logging.WARNING, with_code(text, "DSX358")
    _log.log(level, text, places.nodes, places.devices, links, exact, asked, verdict)


def _without(settings: ZeroConfig, asked: Features, best: Features) -> ZeroConfig:
    changed: dict[str, object] = {}
    if asked.near != best.near:
        changed["zero_hpz_partition_size"] = 1
    if asked.weight_bits != best.weight_bits:
        changed |= {"zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False}
    if asked.gradient_bits != best.gradient_bits:
        changed |= {"zero_quantized_gradients": False, "zeropp_loco_param": None}
    if asked.two_levels != best.two_levels:
        changed["mics_hierarchical_params_gather"] = False
    return settings.model_copy(update=changed)
