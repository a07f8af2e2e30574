"""Batch sizes for a number of devices that changes: one global batch that many world sizes divide.

`api` has `compute_elastic_config` and its errors, by the names that DeepSpeed's scripts import; `command` is `dsx
elastic`. The arithmetic is `dsx.elastic_batch`'s, from which the configuration takes batch sizes too.

A run that is continued with another number of devices keeps the global batch; micro-batch and accumulation follow.
Left out: joining and leaving while training. A job ends, its checkpoint is read by any number of ranks.
"""

from .api import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
)

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
]
