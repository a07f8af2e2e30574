"""`compute_elastic_config` and its errors, by the names and results that DeepSpeed's scripts know.

Left out: nothing. The arithmetic is `dsx.elastic_batch`'s; here are the section, the environment and the errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..elastic_batch import ElasticBatch, ElasticSettings, Refusal, choose_batch, for_world_size
from ..errors import DsxError

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "resolve",
    "settings_of",
]

_ENVIRONMENT = "DEEPSPEED_ELASTICITY_CONFIG"
_OLDEST = (0, 3, 8)


class ElasticityError(DsxError, ValueError):
    """An elastic batch cannot be computed."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` contradicts itself, or the one that the job was scheduled with."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of devices does not suit the section `elasticity`."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration has the section `elasticity` and it is on."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "0.19.6",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch, the numbers of devices that suit it, and the micro-batch.

    Args:
        ds_config: a configuration with the section `elasticity`.
        target_deepspeed_version: of the program that will run; elasticity exists since 0.3.8.
        world_size: number of devices. 0: version 0.1 needs none, version 0.2 takes the variable WORLD_SIZE.
        return_microbatch: give the micro-batch too; it is given in any case with `world_size`.

    Returns:
        (batch, valid numbers of devices), or (batch, valid numbers of devices, micro-batch).

    Raises:
        ElasticityConfigError: the section is missing, off, contradicts itself or the variable
            DEEPSPEED_ELASTICITY_CONFIG, or a world size is needed and there is none.
        ElasticityIncompatibleWorldSize: `world_size` does not suit it, also where no number of devices does.
    """
    _check_version(target_deepspeed_version)
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError(
            'elasticity: got a configuration without it; expected {"elasticity": {"enabled": true, ...}}; add it'
        )
    settings = settings_of(ds_config["elasticity"])
    _check_scheduled(settings)
    wants_micro = world_size > 0 or return_microbatch
    if not world_size and (return_microbatch or settings.version >= 0.2):
        world_size = _world_size()
    found = resolve(settings, world_size)
    if found.micro is not None and wants_micro:
        return found.batch, list(found.world_sizes), found.micro
    return found.batch, list(found.world_sizes)


def settings_of(section: Mapping[str, Any]) -> ElasticSettings:
    """The settings in a section of a configuration. Raises `ElasticityConfigError` for a value of the wrong kind, and
    where `max_train_batch_size` or `micro_batch_sizes` is not there.
    """
    from ..config.elastic import (  # lazy import: pydantic is not needed to import this package
        Elasticity,
        missing_keys,
        settings_from,
    )

    known = dict(section)
    if "prefer_larger_batch" in known:  # DeepSpeed's code reads this name; its documents have the other one
        known.setdefault("prefer_large_batch", known.pop("prefer_larger_batch"))
    try:
        validated = Elasticity.model_validate(known)
    except ValueError as error:
        raise ElasticityConfigError(f"elasticity: {error}") from error
    missing = missing_keys(validated)
    if missing:
        raise ElasticityConfigError(f"elasticity: got no {' and no '.join(missing)}; expected a value; add it")
    return settings_from(validated)


def resolve(settings: ElasticSettings, world_size: int) -> ElasticBatch:
    """The batch for `world_size` devices, or for all of them (0). Raises the errors of `compute_elastic_config`."""
    found = for_world_size(settings, world_size) if world_size else choose_batch(settings)
    if isinstance(found, Refusal):
        kind = ElasticityIncompatibleWorldSize if found.world_size else ElasticityConfigError
        raise kind(f"elasticity: {found}")
    return found


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdigit() or int(text) < 1:
        raise ElasticityConfigError(
            f"elasticity: got WORLD_SIZE {text!r}; expected the number of devices, which version 0.2 and the "
            "micro-batch need; pass world_size, or start the job with a launcher"
        )
    return int(text)


def _check_version(version: str) -> None:
    parts = version.split("+")[0].split(".")[:3]
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < _OLDEST:
        raise ElasticityError(
            f"elasticity: got target version {version!r}; expected 0.3.8 or newer, which elasticity needs; update it"
        )


def _check_scheduled(settings: ElasticSettings) -> None:
    """A scheduler that knows of elasticity has told the job which section it planned with."""
    text = os.environ.get(_ENVIRONMENT)
    if text is None:
        return
    try:
        scheduled = settings_of(json.loads(text))
    except (ValueError, AttributeError, TypeError) as error:
        raise ElasticityConfigError(f"the variable {_ENVIRONMENT} cannot be read: {error}") from error
    for name, key in (
        ("max_batch", "max_train_batch_size"),
        ("micro_batches", "micro_batch_sizes"),
        ("version", "version"),
    ):
        planned, got = getattr(scheduled, name), getattr(settings, name)
        if planned != got:
            raise ElasticityConfigError(
                f"elasticity.{key}: got {got}; expected {planned}, which the scheduler planned with ({_ENVIRONMENT}); "
                "use the same section for both"
            )
