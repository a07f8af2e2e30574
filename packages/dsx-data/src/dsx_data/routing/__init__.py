"""Less work per layer: random token dropping (`token_drop`, random-LTD) and layer dropping (`layer_drop`).

`swap` gives a layer the new behaviour in place, `rules` finds the layers of a model, `calls` reads a layer's arguments.
"""

from .layer_drop import LayerDrop, ProgressiveLayerDrop, convert_to_layer_drop, find_layer_drop, remove_layer_drop
from .ltd_schedule import RandomLTDScheduler
from .rules import find_layers
from .token_drop import (
    TokenDrop,
    bind_token_drop,
    convert_to_random_ltd,
    remove_random_ltd,
    save_without_random_ltd,
)

__all__ = [
    "LayerDrop",
    "ProgressiveLayerDrop",
    "RandomLTDScheduler",
    "TokenDrop",
    "bind_token_drop",
    "convert_to_layer_drop",
    "convert_to_random_ltd",
    "find_layer_drop",
    "find_layers",
    "remove_layer_drop",
    "remove_random_ltd",
    "save_without_random_ltd",
]
