"""The section `elasticity`, and the three batch sizes that it gives: they are chosen for the number of ranks so that
the global batch stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ..elastic_batch import ElasticSettings, Refusal, for_world_size
from ..errors import Problem
from .base import Count, Size, Toggle
from .batch import ACCUMULATION, MICRO, TRAIN, BatchSizes

__all__ = ["Elasticity", "elastic_batch", "missing_keys", "settings_from"]


class Elasticity(Toggle):
    """A batch size that suits many world sizes."""

    max_train_batch_size: Count = Field(2000, description="largest global batch; needed where enabled is true")
    micro_batch_sizes: list[Count] = Field(
        [2, 4, 6], description="micro-batch sizes to consider; needed where enabled is true"
    )
    min_gpus: Count = Field(1, description="smallest world size")
    max_gpus: Count = Field(10000, description="largest world size")
    min_time: Size = Field(0, description="minutes between two changes of the number of ranks")
    prefer_large_batch: bool = Field(True, description="prefer the larger batch; prefer_larger_batch is another name")
    version: float = Field(0.2, description="version of the algorithm: 0.1 or 0.2")
    ignore_non_elastic_batch_info: bool = Field(
        False, description="ignore batch sizes outside of this section, instead of raising"
    )
    num_gpus_per_node: Count = Field(1, description="devices per node (version 0.2)")
    model_parallel_size: Count = Field(1, description="model-parallel size (version 0.2)")
    replace_stragglers: Size = Field(
        0,
        description=(
            "when this many comparisons in a row (section straggler) name the same rank, the agent of its"
            " node ends; 0: never"
        ),
    )


def missing_keys(section: Any) -> list[str]:
    """The keys that an enabled section must set and does not: the batch that it chooses depends on them."""
    return [key for key in ("max_train_batch_size", "micro_batch_sizes") if key not in section.model_fields_set]


def settings_from(section: Any) -> ElasticSettings:
    """The settings in the validated section."""
    return ElasticSettings(
        max_batch=section.max_train_batch_size,
        micro_batches=tuple(section.micro_batch_sizes),
        min_devices=section.min_gpus,
        max_devices=section.max_gpus,
        prefer_larger=section.prefer_large_batch,
        version=section.version,
        devices_per_node=section.num_gpus_per_node,
        model_parallel=section.model_parallel_size,
    )


def elastic_batch(
    section: Any, given: Mapping[str, int | None], world_size: int, auto: frozenset[str] = frozenset()
) -> BatchSizes | Problem:
    """Choose the batch sizes.

    Args:
        section: the validated section, which is switched on.
        given: the sizes that the configuration sets; "auto" values are absent.
        world_size: number of data-parallel ranks.
        auto: the sizes that the configuration sets to "auto".
    """
    missing = missing_keys(section)
    if missing:
        return Problem(
            "conflict", f"elasticity.{missing[0]}", "elasticity needs it", got="nothing", expected="a value",
            fix=f"add {', '.join(missing)} to elasticity",
        )  # fmt: skip
    set_by_hand = [key for key in (TRAIN, MICRO, ACCUMULATION) if given.get(key) is not None and key not in auto]
    if set_by_hand and not section.ignore_non_elastic_batch_info:
        return Problem(
            "conflict", set_by_hand[0], "the section elasticity chooses the batch sizes",
            got=", ".join(f"{key} {given[key]}" for key in set_by_hand), expected="none of the three",
            fix='remove them, or set "ignore_non_elastic_batch_info": true in elasticity',
        )  # fmt: skip
    settings = settings_from(section)
    shared = settings.model_parallel if settings.version >= 0.2 else 1
    found = for_world_size(settings, world_size * shared)
    if isinstance(found, Refusal):
        return Problem(
            "conflict", "elasticity", "no batch suits it", got=found.got, expected=found.expected, fix=found.fix
        )
    micro = found.micro or 1
    derived = (TRAIN, MICRO, ACCUMULATION)
    return BatchSizes(found.batch, micro, found.batch // (micro * world_size), world_size, derived)
