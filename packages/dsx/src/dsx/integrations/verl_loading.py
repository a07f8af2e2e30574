"""Values for verl's model at stage 3: each rank reads its part of the files, and none holds the model.

verl builds a model on the meta device on ranks that its device mesh tells not to load. Here no rank loads:
`dsx_zero.Init` divides the parameters, and `dsx_zero.load_weights` reads each rank's ranges of the safetensors files.

Left out: tied embeddings, for which verl itself asks for values on every rank; files whose names are not the model's;
other formats of files. Then each rank loads the whole model into host memory, as verl does for FSDP 1.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import dsx_zero
import torch

__all__ = ["LoadingRanks", "divided_module"]


class LoadingRanks:
    """In the place of FSDP's device mesh, which verl asks whether this rank loads values (coordinate 0).

    Attributes:
        load: whether the ranks do.
    """

    load = True

    def get_coordinate(self) -> tuple[int, ...]:
        """0 if this rank loads."""
        return (0 if self.load else 1,)


def divided_module(engine: Any) -> torch.nn.Module | None:
    """The model of a `DSXEngine` with the files' values, divided over the ranks (collective); None: it has to be loaded
    whole.

    It warns where that is so because of the files. `engine` is a `DSXEngine` that has its `device_mesh`.
    """
    config, ranks = engine.model_config, engine.device_mesh
    tied = getattr(getattr(config, "hf_config", None), "tie_word_embeddings", True)
    if tied or not any(Path(config.local_path).glob("*.safetensors")):
        return None
    ranks.load = False
    try:
        module = engine._build_module()
    finally:
        ranks.load = True
    buffers_too = any(buffer.is_meta for buffer in module.buffers())
    if buffers_too or not all(parameter.is_meta for parameter in module.parameters()):
        return None
    dsx_zero.Init(module=module)
    try:
        dsx_zero.load_weights(module, config.local_path)
    except dsx_zero.ZeroLoadError as error:
        warnings.warn(f"dsx: each rank loads the whole model into host memory: {error}", stacklevel=2)
        return None
    return module
