"""`engine.weights`: the whole model's weights for other programs, wherever its parts are.

Below it lies `dsx_zero`: buckets of whole tensors, boxes of this rank, changes since a mark. An engine knows what that
package does not: which part of which tensor a rank holds beside ZeRO (experts, slices, stages of a pipeline).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import dsx_zero
import torch
from dsx_comm import RankSets

from .errors import EngineArgumentError

__all__ = ["ModelWeights"]


class ModelWeights:
    """The weights of an engine's model, under the names that they have on one rank. Use it as `engine.weights`.

    All of it works while `offload_states` has moved states to host memory.
    """

    def __init__(self, shards: dsx_zero.ZeroOptimizer, topology: RankSets, places: Mapping[str, Any]) -> None:
        self._shards, self._topology, self._places = shards, topology, places

    def buckets(self, **options: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Whole tensors by name, in buckets, on every rank (collective). Options: those of
        `dsx_zero.export.weight_buckets`.
        """
        return dsx_zero.export.weight_buckets(self._shards, part=self._part(), **options)

    def shards(self, *, names: dsx_zero.export.Names = None) -> Iterator[dsx_zero.export.WeightShard]:
        """This rank's boxes of every tensor: see `dsx_zero.export.weight_shards`. Collective with model parallelism."""
        return dsx_zero.export.weight_shards(self._shards, names=names, part=self._part())

    def ranges(self, *, names: dsx_zero.export.Names = None) -> Iterator[dsx_zero.export.WeightRange]:
        """Every tensor on every rank, with this rank's range of it: see `dsx_zero.export.weight_ranges`."""
        return dsx_zero.export.weight_ranges(self._shards, names=names, part=self._part())

    def mark(self, *, names: dsx_zero.export.Names = None) -> dsx_zero.export.WeightMark:
        """Remember the weights of now, to send later what has changed: see `dsx_zero.export.WeightMark`."""
        return dsx_zero.export.WeightMark(self._shards, names=names, part=self._part())

    def _part(self) -> dsx_zero.export.PartOfModel | None:
        """The parts of the model that other ranks hold; None where every data-parallel rank has the whole model."""
        if not self._places and self._topology.data.size == self._topology.world_size:
            return None
        for local, place in self._places.items():
            if place.name.startswith(f"{local}."):
                raise EngineArgumentError(
                    f"{local}: this rank has a part of it, and nothing says which; give its module a method"
                    " parameter_places() (see dsx.engine.places), or save with save_checkpoint"
                )
        return dsx_zero.export.PartOfModel(self._places, None, self._topology.tensor_slice[0] == 0)
