"""Index files: rows of numbers on disk, read through a memory map.

`file` is the format of this package (`docs` in its module text), `indexed_dataset` the one of Megatron and DeepSpeed,
`opening` finds out which of the two a path is.
"""

from .file import IndexFile, IndexWriter
from .indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from .opening import RowIndex, open_index

__all__ = ["IndexFile", "IndexWriter", "MMapIndexedDataset", "MMapIndexedDatasetBuilder", "RowIndex", "open_index"]
