"""The training loader: which sample goes to which rank, in which order, and where the next one is.

`order` is the arithmetic of shares, `stream` shares out iterable datasets, `tracks` know epoch and position of each
kind of order, `training` is the loader itself.
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
