"""The training loader: which sample goes to which rank, in which order, and the position of the next one.

`order` is the arithmetic of shares, `stream` divides iterable datasets among ranks, `tracks` has epoch and position for
each kind of order, `training` is the loader itself.
"""

from .order import ShardedSampler, epoch_order, rank_share
from .stream import SharedStream
from .tracks import BatchSize
from .training import LoaderOptions, RepeatingLoader, TrainingLoader

__all__ = [
    "BatchSize",
    "LoaderOptions",
    "RepeatingLoader",
    "SharedStream",
    "ShardedSampler",
    "TrainingLoader",
    "epoch_order",
    "rank_share",
]
