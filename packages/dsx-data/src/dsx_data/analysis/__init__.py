"""Analysis of a dataset: metrics of its samples (`metrics`), computed by many processes (`mapping`, `analyzer`,
`distributed`), turned into index files (`reduction`), and drawn (`picture`).
"""

from .analyzer import DataAnalyzer
from .distributed import DistributedDataAnalyzer
from .metrics import SequenceLength, VocabularyCounts, VocabularyRarity
from .picture import difficulty_picture

__all__ = [
    "DataAnalyzer",
    "DistributedDataAnalyzer",
    "SequenceLength",
    "VocabularyCounts",
    "VocabularyRarity",
    "difficulty_picture",
]
