"""Tensor parallelism: the weights of a layer are sliced over ranks, by hand or by rules.

    slice_model(model, group=group)                                   # a Hugging Face model, in place
    up, down = ColumnParallelLinear(512, 2048), RowParallelLinear(2048, 512)

`slices.py` has the arithmetic, `regions.py` the communication at the edges of sliced regions, `linear.py` and
`vocabulary.py` the layers, `rules.py` the slicing of whole models, and `sequence.py` sequence parallelism in them.
"""

from .linear import ColumnParallelLinear, RowParallelLinear
from .regions import (
    copy_to_slices,
    gather_from_sequence,
    gather_from_slices,
    gather_sequence,
    reduce_from_slices,
    reduce_scatter_sequence,
    scatter_sequence,
    scatter_to_slices,
    sum_gradients_over_slices,
)
from .rules import PRESETS, LayerRule, slice_model, tp_model_init
from .slices import gather_parameter, is_sliced, slice_of, whole_of, whole_state
from .vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "PRESETS",
    "ColumnParallelLinear",
    "LayerRule",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_slices",
    "gather_from_sequence",
    "gather_from_slices",
    "gather_parameter",
    "gather_sequence",
    "is_sliced",
    "reduce_from_slices",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "scatter_to_slices",
    "slice_model",
    "slice_of",
    "sum_gradients_over_slices",
    "tp_model_init",
    "vocab_parallel_cross_entropy",
    "whole_of",
    "whole_state",
]
