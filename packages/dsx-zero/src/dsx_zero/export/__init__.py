"""Weights for somebody else: `buckets` of whole tensors for a generator, `shards` and `changes` for transfers that do
not gather. `contents` says which tensors these are and where this rank's elements belong; `adapters` knows LoRA.
"""

from .buckets import weight_buckets
from .changes import WeightChange, WeightMark, apply_changes, pack_changes, unpack_changes
from .contents import Names, PartOfModel
from .shards import WeightRange, WeightShard, weight_ranges, weight_shards

__all__ = [
    "Names",
    "PartOfModel",
    "WeightChange",
    "WeightMark",
    "WeightRange",
    "WeightShard",
    "apply_changes",
    "pack_changes",
    "unpack_changes",
    "weight_buckets",
    "weight_ranges",
    "weight_shards",
]
