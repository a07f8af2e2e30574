"""Compressed weights on disk: one safetensors file with packed codes and scales.

A quantised weight `w` is stored as `w.codes`, `w.scale` and, if asymmetric, `w.zero`. All other tensors are stored
unchanged. The header's metadata has, under the key `dsx_compress`, JSON with the format version and, for each quantised
weight, the code (`packing.py`), shape, dtype, groups and the error of quantisation. The values are exactly those of the
cleaned model:

    value[r, c] = code[r, c] * scale[g] + zero[g],   g = (r * columns + c) // (rows * columns / groups)

of the weight viewed as a matrix (first dimension, all others). A pruned weight stays zero: it has the code of zero. If
a code has no zero, the next wider code is used (binary weights with zeros are stored as ternary). Weights that no code
can represent are stored dense, and the report says so.
"""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dsx_core import replacing
from torch import nn

from .apply import Placed, techniques_of
from .cleaning import bake, finish_schedule
from .config import load_config
from .errors import CompressionDataError, CompressionError, near
from .packing import BITS, pack, unpack
from .quantizers import encode
from .scheduler import value_before
from .shrinking import cut, set_attributes, shrink, shrink_plan
from .snip import SnipMask
from .techniques import Mask, WeightQuantizer

__all__ = ["Exported", "PackedTensor", "export_model", "load_exported", "pack_weight", "read_exported"]

FORMAT = 1
_KEY = "dsx_compress"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class PackedTensor:
    """A quantised weight as it is stored.

    Attributes:
        code: name of the code, a key of `packing.BITS`.
        codes: packed codes, (rows, bytes of a row).
        scale: (groups,), fp32 (fp64 for fp64 weights).
        zero: zero points, (groups,), dtype of `scale`; None if symmetric.
        shape, dtype: shape and dtype of the weight.
    """

    code: str
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """First dimension of the weight."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape) // max(1, self.rows)

    def dense(self) -> torch.Tensor:
        """The values, in the weight's shape and dtype."""
        codes = unpack(self.codes, self.code, self.columns, signed=self.zero is None)
        values = codes.reshape(len(self.scale), -1).to(self.scale.dtype) * self.scale[:, None]
        if self.zero is not None:
            values = values + self.zero[:, None]
        return values.view(self.shape).to(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        parts = (self.codes, self.scale) if self.zero is None else (self.codes, self.scale, self.zero)
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True)
class Exported:
    """The contents of a file that `export_model` writes.

    Attributes:
        packed: quantised weights by name.
        dense: all other tensors by name.
        attributes: new values of the integer attributes (such as `out_features`) of modules that shrank, by module
            name.
        facts: for each quantised weight, the relative error of quantisation ("error") and the fraction of values that
            are not zero ("density").
        left_dense: for each quantised weight that no code can hold, the reason.
    """

    packed: dict[str, PackedTensor]
    dense: dict[str, torch.Tensor]
    attributes: dict[str, dict[str, int]]
    facts: dict[str, dict[str, float]]
    left_dense: dict[str, str]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the cleaned model."""
        return {**self.dense, **{name: tensor.dense() for name, tensor in self.packed.items()}}


# - From a model to packed tensors


def export_model(model: nn.Module, path: str | os.PathLike[str], deepspeed_config: Any = None) -> Exported:
    """Write a compressed model's weights to a file. The model itself does not change.

    Args:
        model: prepared by `init_compression` and trained, before `redundancy_clean` (which discards the scales).
        path: the file to write, such as `model.safetensors`. An existing file is replaced.
        deepspeed_config: the configuration of `init_compression`, by which pruned rows, heads and channels are removed.
            None: they are stored as zeros.

    Returns:
        The contents of the file.

    Raises:
        CompressionError: the model has no techniques.
        CompressionDataError: a weight has NaN or infinity.
    """
    if next(techniques_of(model), None) is None:
        raise CompressionError(
            "export_model: the model has no techniques; export before redundancy_clean, or compress with "
            "quantize_post_training"
        )
    work = copy.deepcopy(model)
    finish_schedule(work)
    found = _pack_model(work, None if deepspeed_config is None else shrink_plan(work, load_config(deepspeed_config)))
    write_exported(found, path)
    return found


def _pack_model(work: nn.Module, plan: Any) -> Exported:
    packed: dict[str, PackedTensor] = {}
    facts: dict[str, dict[str, float]] = {}
    left: dict[str, str] = {}
    for place in list(techniques_of(work)):
        if isinstance(place.technique, WeightQuantizer):
            name = f"{place.name}.{place.tensor}" if place.name else place.tensor
            dims = {} if plan is None else plan.keep.get(name, {})
            result = _pack_placed(place, dims)
            if isinstance(result, str):
                left[name] = result
            else:
                packed[name], facts[name] = result
    bake(work, keep_activation_quantizers=False)
    if plan is not None:
        shrink(work, plan)
    state = {name: tensor.detach() for name, tensor in work.state_dict().items()}
    for name in list(packed):
        # The file must have the values of the cleaned model, to the last bit.
        if not torch.equal(packed[name].dense(), state[name]):
            left[name] = "its values differ from what the layer uses: another parametrisation follows the quantiser"
            del packed[name], facts[name]
    dense = {name: tensor for name, tensor in state.items() if name not in packed}
    return Exported(packed, dense, {} if plan is None else plan.attributes, facts, left)


def _pack_placed(place: Placed, dims: Any) -> tuple[PackedTensor, dict[str, float]] | str:
    """The weight of a layer as codes, with all masks applied; or, as text, why there is no code for it."""
    quantizer: Any = place.technique
    weight = value_before(place)
    with torch.no_grad():
        encoded = quantizer.encode(weight)
        keep = torch.ones_like(weight, dtype=torch.bool)
        for technique in place.chain:
            if isinstance(technique, SnipMask):
                keep &= technique.kept()
            elif isinstance(technique, Mask):
                keep &= technique.spread(technique.kept(), weight)
        shape = weight.shape
        spread = [
            cut(part.expand(encoded.codes.shape).reshape(shape), dims)
            for part in (encoded.codes, encoded.scale, *(() if encoded.zero is None else (encoded.zero,)))
        ]
        kept, original = cut(keep, dims), cut(weight, dims)
        return pack_weight(spread[0], spread[1], spread[2] if len(spread) > 2 else None, kept, original,
                           bits=quantizer.schedule.bits)  # fmt: skip


def pack_weight(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, kept: torch.Tensor, original: torch.Tensor, *,
    bits: int,
) -> tuple[PackedTensor, dict[str, float]] | str:  # fmt: skip
    """Pack the codes of a weight.

    Args:
        codes, scale, zero: codes, scales and zero points, each in the shape of the weight.
        kept: boolean, in the shape of the weight: False for pruned values.
        original: the weight before quantisation; gives the dtype, and the error is relative to it.
        bits: bits of the quantiser.

    Returns:
        The packed weight and its facts; the reason as text if no code can hold the values.
    """
    rows = codes.shape[0] if codes.dim() else 1
    flat = [None if part is None else part.reshape(rows, -1) for part in (codes, scale, zero)]
    groups = _fewest_groups(flat[1], flat[2])  # pyright: ignore[reportArgumentType]
    if groups is None:
        return "scales do not repeat in groups of equal size after pruning"
    numbers, pruned = flat[0], ~kept.reshape(rows, -1)
    if numbers is None or flat[1] is None:
        return "no codes"
    if bool(pruned.any()):
        if flat[2] is None:
            numbers = numbers.masked_fill(pruned, 0)
        else:
            zero_code = torch.where(flat[1] == 0, -1.0, -flat[2] / torch.where(flat[1] == 0, 1.0, flat[1])).round()
            fits = (zero_code >= 0) & (zero_code < 2**bits)
            if not bool(fits[pruned].all()):
                return "pruned to zero, which the asymmetric range of a group does not contain"
            numbers = torch.where(pruned, zero_code, numbers)
    code = _code_for(bits, numbers)
    packed = PackedTensor(
        code,
        pack(numbers, code, signed=flat[2] is None),
        flat[1].reshape(groups, -1)[:, 0].clone(),
        None if flat[2] is None else flat[2].reshape(groups, -1)[:, 0].clone(),
        tuple(codes.shape),
        original.dtype,
    )
    return packed, error_facts(original, packed.dense())


def _code_for(bits: int, codes: torch.Tensor) -> str:
    if bits == 1 and bool((codes == 0).any()):
        bits = 2
    return next(name for name, size in BITS.items() if size >= bits)


def _fewest_groups(scale: torch.Tensor, zero: torch.Tensor | None) -> int | None:
    """The smallest number of equal groups, in memory order, in which scale and zero point are constant."""
    changes = scale.reshape(-1)[1:] != scale.reshape(-1)[:-1]
    if zero is not None:
        changes |= zero.reshape(-1)[1:] != zero.reshape(-1)[:-1]
    ends = (changes.nonzero().view(-1) + 1).tolist()
    size = math.gcd(scale.numel(), *ends)
    groups = scale.numel() // max(1, size)
    return groups if groups == 1 or size >= 8 or size == scale.shape[1] else None


def error_facts(original: torch.Tensor, value: torch.Tensor) -> dict[str, float]:
    """The relative error |w - Q(w)| / |w|, and the fraction of values that are not zero."""
    wide = original.double()
    norm = float(wide.norm())
    error = float((wide - value.double()).norm()) / norm if norm else 0.0
    return {"error": error, "density": float((value != 0).double().mean()) if value.numel() else 1.0}


# - The file


def write_exported(found: Exported, path: str | os.PathLike[str]) -> None:
    """Write the file under a temporary name and rename it, so that a file at `path` is always complete."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Any] = {}
    for name, tensor in found.packed.items():
        tensors[f"{name}.codes"] = tensor.codes.contiguous()
        tensors[f"{name}.scale"] = tensor.scale.contiguous()
        if tensor.zero is not None:
            tensors[f"{name}.zero"] = tensor.zero.contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"code": tensor.code, "shape": list(tensor.shape), "dtype": dtype, **found.facts[name]}
    seen: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in found.dense.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]  # tied weights are stored once
        else:
            seen[place] = name
            tensors[name] = tensor.contiguous()
    header = {"format": FORMAT, "tensors": entries, "attributes": found.attributes, "left_dense": found.left_dense,
              "aliases": aliases}  # fmt: skip
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, durable=False) as temporary:
        save_file(tensors, temporary, metadata={_KEY: json.dumps(header, separators=(",", ":"))})


def read_exported(path: str | os.PathLike[str]) -> Exported:
    """Read a file that `export_model` wrote.

    Raises:
        CompressionDataError: the file cannot be read, is damaged, or is another kind of file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no iterator)
    except (OSError, SafetensorError) as error:
        raise CompressionDataError(f"{path}: cannot be read as a safetensors file: {error}") from None
    if metadata is None:
        raise CompressionDataError(f"{path}: has no {_KEY} metadata; expected a file that export_model wrote")
    try:
        header = json.loads(metadata)
        if header["format"] != FORMAT:
            raise CompressionDataError(
                f"{path}: format {header['format']}, expected {FORMAT}; a newer version wrote it"
            )
        packed, facts = {}, {}
        for name, entry in header["tensors"].items():
            packed[name] = _checked(name, PackedTensor(
                entry["code"], tensors.pop(f"{name}.codes"), tensors.pop(f"{name}.scale"),
                tensors.pop(f"{name}.zero", None), tuple(entry["shape"]), _DTYPES[entry["dtype"]],
            ))  # fmt: skip
            facts[name] = {key: float(entry[key]) for key in ("error", "density")}
        tensors.update({name: tensors[source] for name, source in header["aliases"].items()})
        return Exported(packed, tensors, header["attributes"], facts, header["left_dense"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise CompressionDataError(f"{path}: its {_KEY} metadata is damaged: {error!r}") from None


def _checked(name: str, tensor: PackedTensor) -> PackedTensor:
    """Return `tensor`. Raises `CompressionDataError` if its codes and scales do not fit its shape."""
    if tensor.code not in BITS:
        raise CompressionDataError(f"{name}: code {tensor.code!r}, expected one of {', '.join(BITS)}")
    per_byte = max(1, 8 // BITS[tensor.code])
    expected = (tensor.rows, -(-tensor.columns // per_byte))
    groups = tensor.scale.numel()
    if tuple(tensor.codes.shape) != expected or not groups or math.prod(tensor.shape) % groups:
        raise CompressionDataError(
            f"{name}: codes of shape {tuple(tensor.codes.shape)} and {groups} scales do not make the shape"
            f" {tensor.shape}"
        )
    return tensor


def load_exported(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load the values of a file that `export_model` wrote into an ordinary model, in place; returns the model.

    Args:
        model: built as before compression. Its tensors get the shapes of the file.

    Raises:
        CompressionDataError: the file is damaged, or is another kind of file.
        CompressionError: its names differ from the model's. The model is unchanged then.
    """
    found = read_exported(path)
    state = found.state_dict()
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or extra:
        raise CompressionError(
            f"load_exported: {path} lacks {missing[:5]} and has {extra[:5]} beside the model's names"
            f"{near(extra[0], missing) if extra and missing else ''}; build the model that was exported"
        )
    fit(model, state, found.attributes)
    model.load_state_dict(state)
    return model


def fit(model: nn.Module, state: dict[str, torch.Tensor], attributes: dict[str, dict[str, int]]) -> None:
    """Give the parameters and buffers of a model the shapes of a state dict, and its modules their new attributes."""
    for name, tensor in list(model.named_parameters(remove_duplicate=False)):
        if tensor.shape != state[name].shape:
            owner, _, last = name.rpartition(".")
            empty = torch.empty(state[name].shape, dtype=tensor.dtype, device=tensor.device)
            setattr(model.get_submodule(owner), last, nn.Parameter(empty, requires_grad=tensor.requires_grad))
    for name, tensor in list(model.named_buffers(remove_duplicate=False)):
        if name in state and tensor.shape != state[name].shape:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, tensor.new_empty(state[name].shape))
    set_attributes(model, attributes)


def pack_dense(
    weight: torch.Tensor, bits: int, groups: int, kind: Any = "symmetric"
) -> tuple[PackedTensor, dict[str, float]]:
    """Quantise and pack a plain weight. Returns the packed weight and its facts; raises `CompressionError`."""
    encoded = encode(weight.detach(), bits, groups, kind)
    codes, scale, zero = (
        None if p is None else p.expand(encoded.codes.shape).reshape(weight.shape)
        for p in (encoded.codes, encoded.scale, encoded.zero)
    )
    if codes is None or scale is None:
        raise CompressionError(f"weight of shape {tuple(weight.shape)}: a quantiser gave no codes or no scale")
    everywhere = torch.ones_like(weight, dtype=torch.bool)
    result = pack_weight(codes, scale, zero, everywhere, weight.detach(), bits=bits)
    if isinstance(result, str):
        raise CompressionError(f"weight of shape {tuple(weight.shape)}: {result}")
    return result
