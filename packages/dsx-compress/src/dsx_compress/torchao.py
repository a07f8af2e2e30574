"""Compressed weights as tensors of torchao, in memory and in the safetensors layout that torchao and transformers read.

    export_model(model, "model.safetensors", config)
    export_torchao("model.safetensors", "for-torchao.safetensors")
    model = load_torchao(build(), "for-torchao.safetensors")        # an ordinary model with torchao weights

torchao's `IntxUnpackedToInt8Tensor` holds codes of up to 8 bits on any device. It has a byte for each code, and a scale
and a zero point for each block; a value is (code - zero point) x scale. Symmetric weights keep their values to the last
bit, asymmetric ones up to rounding. Binary and ternary weights also take a byte per code, so our own file is smaller.
These weights stay dense: codes of 16 bits, fp64, weights that are not matrices, and weights with a group that is not a
rectangle (a part of a row and of the next one).

torchao is not a dependency; every function here needs it installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from dsx_core import replacing
from torch import nn

from .errors import CompressionDataError, CompressionError, near
from .export import Exported, PackedTensor, fit, read_exported
from .packing import unpack

__all__ = ["export_torchao", "load_torchao", "to_torchao"]

_TARGETS = {"binary": "int2", "ternary": "int2", "int4": "int4", "int8": "int8"}
"""torchao's name of the range of a code. Binary codes need int2, because torchao's int1 has only 0 and -1."""


def to_torchao(source: str | os.PathLike[str] | Exported) -> dict[str, torch.Tensor]:
    """The state dict of a compressed model with tensors of torchao. Weights that torchao cannot hold are dense.

    Args:
        source: a file that `export_model` wrote, or what `read_exported` returned.

    Raises:
        CompressionError: torchao is not installed.
        CompressionDataError: the file is damaged.
    """
    quantization, _ = _torchao()
    found = source if isinstance(source, Exported) else read_exported(source)
    packed = {name: _converted(tensor, quantization.IntxUnpackedToInt8Tensor) for name, tensor in found.packed.items()}
    return {**found.dense, **packed}


def export_torchao(source: str | os.PathLike[str] | Exported, path: str | os.PathLike[str]) -> None:
    """Write a compressed model in torchao's safetensors layout. A file at `path` is always complete.

    Args:
        source: as for `to_torchao`. The layout has no attributes of modules that shrank: load the file into a model
            with the small shapes, such as a cleaned one.
        path: the file to write.

    Raises:
        CompressionError: torchao is not installed.
        CompressionDataError: the file is damaged.
    """
    from safetensors.torch import save_file

    _, layout = _torchao()
    state = {name: tensor.contiguous() for name, tensor in to_torchao(source).items()}
    places = [t.data_ptr() for t in state.values() if type(t) is torch.Tensor and t.numel()]
    shared = {place for place in places if places.count(place) > 1}  # copied, because the layout has no aliases
    state = {
        name: tensor.clone()
        if type(tensor) is torch.Tensor and tensor.numel() and tensor.data_ptr() in shared
        else tensor
        for name, tensor in state.items()
    }
    tensors, metadata = layout.flatten_tensor_state_dict(state)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, durable=False) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_torchao(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a file in torchao's layout into an ordinary model, in place; returns the model.

    Quantised weights become tensors of torchao, and no parameter requires a gradient afterwards.

    Raises:
        CompressionError: torchao is not installed, or the names in the file differ from the model's.
        CompressionDataError: the file cannot be read, or is of another layout.
    """
    from safetensors import SafetensorError, safe_open

    _, layout = _torchao()
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no iterator)
    except (OSError, SafetensorError) as error:
        raise CompressionDataError(f"{path}: cannot be read as a safetensors file: {error}") from None
    if "tensor_names" not in metadata:
        raise CompressionDataError(
            f"{path}: got no tensor_names in its metadata, expected torchao's layout; write it with export_torchao"
        )
    state, left = layout.unflatten_tensor_state_dict(tensors, metadata)
    missing, extra = sorted(set(model.state_dict()) - set(state)), sorted({*state, *left} - set(model.state_dict()))
    if missing or extra:
        raise CompressionError(
            f"load_torchao: {path} lacks {missing[:5]} and has {extra[:5]} beside the model's names"
            f"{near(extra[0], missing) if extra and missing else ''}; build the model that was exported"
        )
    fit(model, state, {})
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def _torchao() -> tuple[Any, Any]:
    try:
        import torchao.quantization as quantization  # pyright: ignore[reportMissingImports]
        from torchao.prototype.safetensors import safetensors_support  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CompressionError(
            f"torchao's formats need the package torchao: pip install torchao (it could not be imported: {error})"
        ) from None
    return quantization, safetensors_support


def _converted(packed: PackedTensor, kind: Any) -> torch.Tensor:
    block = _block(packed)
    if packed.code not in _TARGETS or block is None or packed.dtype == torch.float64:
        return packed.dense()
    codes = unpack(packed.codes, packed.code, packed.columns, signed=packed.zero is None).view(packed.shape)
    zero = torch.zeros_like(packed.scale)
    if packed.zero is not None:
        if bool((packed.scale == 0).any()):
            return packed.dense()  # torchao multiplies the zero point by the scale; with scale 0 it would be lost
        half = 2 ** (int(_TARGETS[packed.code].removeprefix("int")) - 1)
        codes, zero = codes - half, -half - packed.zero / packed.scale
    shape = [size // part for size, part in zip(packed.shape, block)]
    # Positional arguments: torchao before 0.14 has another name for the last one (how activations are quantised).
    return kind(
        codes.to(torch.int8), packed.scale.reshape(shape), zero.reshape(shape).round(),
        getattr(torch, _TARGETS[packed.code]), tuple(block), packed.dtype, None,
    )  # fmt: skip


def _block(packed: PackedTensor) -> list[int] | None:
    """Rows and columns of the part of a matrix that shares a scale; None if that part is not a rectangle."""
    groups, rows, columns = packed.scale.numel(), packed.rows, packed.columns
    if len(packed.shape) != 2:
        return None
    if groups % rows == 0 and columns % (groups // rows) == 0:
        return [1, columns // (groups // rows)]
    return [rows // groups, columns] if rows % groups == 0 else None
