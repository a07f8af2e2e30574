"""Index files: rows of numbers on disk, read through a memory map.

`file` has the format of this package and describes it, `indexed_dataset` has that of Megatron and DeepSpeed, `opening`
finds out which of the two a path is.
"""

from .file import IndexFile, IndexWriter
from .indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from .opening import RowIndex, open_index

__all__ = ["IndexFile", "IndexWriter", "MMapIndexedDataset", "MMapIndexedDatasetBuilder", "RowIndex", "open_index"]
