"""Data loading that resumes exactly, curricula, random-LTD, layer dropping and token-budget batches for PyTorch.

    from dsx_data import LoaderOptions, TrainingLoader

    loader = TrainingLoader(dataset, LoaderOptions(micro_batch_size=8, rank=rank, world_size=world_size))
    for batch in loader:
        ...
    state = loader.state_dict()        # resumes to the sample, with any number of ranks

Folders: `index` (files of rows of numbers), `analysis` (metrics of a dataset), `curriculum` (difficulty by step,
samples by difficulty), `batching` (token budgets, packing), `loader` (all of this as batches), `routing` (random-LTD
and layer dropping). `dsx_data.config` has the sections of a configuration file; `dsx-data` is the command line.
"""

from ._version import __version__
from .analysis import DataAnalyzer, DistributedDataAnalyzer, SequenceLength
from .batching import PackingCollator, TokenBudget, lr_factor
from .curriculum import CurriculumSampler, CurriculumScheduler, truncate_batch
from .errors import DataError
from .index import MMapIndexedDataset, open_index
from .loader import LoaderOptions, RepeatingLoader, SharedStream, TrainingLoader
from .routing import (
    ProgressiveLayerDrop,
    RandomLTDScheduler,
    convert_to_layer_drop,
    convert_to_random_ltd,
    save_without_random_ltd,
)

__all__ = [
    "CurriculumSampler",
    "CurriculumScheduler",
    "DataAnalyzer",
    "DataError",
    "DistributedDataAnalyzer",
    "LoaderOptions",
    "MMapIndexedDataset",
    "PackingCollator",
    "ProgressiveLayerDrop",
    "RandomLTDScheduler",
    "RepeatingLoader",
    "SequenceLength",
    "SharedStream",
    "TokenBudget",
    "TrainingLoader",
    "__version__",
    "convert_to_layer_drop",
    "convert_to_random_ltd",
    "lr_factor",
    "open_index",
    "save_without_random_ltd",
    "truncate_batch",
]
