"""The forms in which a user gives a model: a module, a function that makes one, a file, a Hugging Face folder."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import PlanError

__all__ = ["Batch", "Deep", "cut", "deep", "default_batch", "depth_of", "describe", "model_maker", "resized"]

Batch = Any
"""A tensor, a sequence of positional arguments, or a dictionary of keyword arguments: one micro-batch."""

_SEQUENCE = 2048
HUB = "hf://"


def model_maker(model: Any) -> Callable[[], nn.Module]:
    """A function that makes a fresh model without values, each time it is called.

    Args:
        model: a `torch.nn.Module` (left as it is), a function without arguments, `file.py:name` or
            `package.module:name` of such a function, or a folder with a `config.json` of Hugging Face's format.

    Raises:
        PlanError: it is none of these, or cannot be read.
    """
    if isinstance(model, nn.Module):
        return lambda: _without_values(model)
    if isinstance(model, (str, os.PathLike)):
        hub, path = str(model).startswith(HUB), Path(str(model).removeprefix(HUB))
        if hub and not path.exists():
            return _hugging_face(_from_hub(str(path)))
        if path.is_dir() or path.suffix == ".json":
            return _hugging_face(path)
        return _checked_maker(_named(str(model)), str(model))
    if callable(model):
        return _checked_maker(model, getattr(model, "__name__", type(model).__name__))
    raise PlanError(
        f"model: got {type(model).__name__}, expected a torch.nn.Module, a function that makes one, file.py:function,"
        " or a folder with a config.json of Hugging Face's format"
    )


Deep = Any
"""A function of the number of blocks that makes a model, `file.py:name` of one, or a Hugging Face folder."""

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def depth_of(model: Any) -> int:
    """The number of blocks of a model in a folder.

    Raises:
        PlanError: it is no folder with a config.json, or says no number.
    """
    folder = _folder_of(model)
    if folder is None:
        raise PlanError(
            f"alike: got the model {describe(model)}, expected a folder with a config.json of Hugging Face's format,"
            " which says how many blocks the model has"
        )
    text = _hugging_face_text(folder)
    return int(text[_depth_in(text, folder)])


def _folder_of(model: Any) -> Path | None:
    """The folder or the config.json that an argument names, if it names one."""
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = Path(str(model).removeprefix(HUB))
    if path.is_dir() or path.suffix == ".json":
        return path
    return _from_hub(str(path)) if str(model).startswith(HUB) else None


def _depth_in(text: dict[str, Any], folder: Path) -> str:
    """The key that says how many blocks a model has."""
    names = [name for name in _DEPTHS if name in text]
    if not names:
        raise PlanError(
            f"model: {folder} does not say how many layers it has ({', '.join(_DEPTHS)}); give a function of the"
            " number of blocks that makes the model"
        )
    return names[0]


def deep(model: Deep) -> Callable[[int], Callable[[], nn.Module]]:
    """For a number of blocks, a function that makes the model with so many.

    Raises:
        PlanError: the model has no number of blocks that can be changed, or cannot be read.
    """
    folder = _folder_of(model)
    if folder is not None:
        text = _hugging_face_text(folder)
        name_of_depth = _depth_in(text, folder)
        return lambda blocks: _hugging_face(folder, _with_depth(text, name_of_depth, blocks))
    make = _named(str(model)) if isinstance(model, (str, os.PathLike)) else model
    name = describe(model)
    if isinstance(model, nn.Module) or not callable(make) or not _takes_one(make):
        raise PlanError(
            f"model: got {name}, expected a function of the number of blocks that makes the model, as"
            " def make(blocks): ..., or a folder with a config.json of Hugging Face's format"
        )
    return lambda blocks: _checked_maker(lambda: make(blocks), f"{name}({blocks})")  # type: ignore[call-arg]


def _takes_one(make: Callable[..., Any]) -> bool:
    try:
        inspect.signature(make).bind(1)
    except (TypeError, ValueError):
        return False
    return True


def _with_depth(text: dict[str, Any], name: str, blocks: int) -> dict[str, Any]:
    """A configuration of Hugging Face's format with other layers. Lists with one entry for each layer go on as they
    began: a model that alternates two kinds of layers goes on alternating.
    """
    before = text[name]
    found = {
        key: [value[i % before] for i in range(blocks)] if isinstance(value, list) and len(value) == before else value
        for key, value in text.items()
    }
    return {**found, name: blocks}


def describe(model: Any) -> str:
    """A short name for output."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    if isinstance(model, (str, os.PathLike)):
        return str(model)
    return getattr(model, "__name__", type(model).__name__)


def _checked_maker(make: Callable[[], Any], name: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        found = make()
        if not isinstance(found, nn.Module):
            raise PlanError(f"model: {name} returned {type(found).__name__}, expected a torch.nn.Module")
        return found

    return made


def _named(text: str) -> Callable[[], Any]:
    """The function `file.py:name` or `package.module:name`."""
    where, colon, name = text.rpartition(":")
    if not colon or not name:
        raise PlanError(
            f"model: got {text!r}, expected an existing folder with a config.json, or file.py:function that makes the"
            " model"
        )
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("_dsx_planned_model", where)
            if spec is None or spec.loader is None or not Path(where).is_file():
                raise PlanError(f"model: there is no file {where}")
            module = importlib.util.module_from_spec(spec)
            with _importing_beside(Path(where)):
                spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ImportError as error:
        raise PlanError(f"model: {where} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise PlanError(f"model: {where} has no function {name!r}")
    return found


@contextmanager
def _importing_beside(file: Path) -> Iterator[None]:
    """Modules beside a file can be imported, as when `python FILE` runs it."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _from_hub(name: str) -> Path:
    """The config.json of a model of the Hugging Face Hub, in its cache."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise PlanError(f"model: {HUB}{name} needs the package huggingface_hub ({error})") from error
    try:
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # of its own and of its HTTP library, which differ between releases
        raise PlanError(
            f"model: {HUB}{name} is no folder here, and its config.json cannot be had from the Hub"
            f" ({type(error).__name__}: {error}); give the folder in which the model's config.json lies"
        ) from error


def _hugging_face_text(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"model: {file} cannot be read as a configuration of Hugging Face's format: {error}") from error


def _hugging_face(file: Path, text: dict[str, Any] | None = None) -> Callable[[], nn.Module]:
    """A function that makes the model of a folder or a config.json; with `text` that of another configuration. Where
    transformers is not here, or does not know the model, the model is made by its configuration alone.
    """
    text = _hugging_face_text(file) if text is None else text
    if not text.get("model_type"):
        raise PlanError(f"model: {file} has no model_type; expected a config.json of Hugging Face's format")
    try:
        transformers: Any = importlib.import_module("transformers")
        transformers.AutoConfig.for_model(**text)
    except (ImportError, KeyError, ValueError):
        from .decoders import decoder  # lazy import: only models without code need it
        from .families import shape_of

        shape_of(text, str(file))  # an error now, not when the model is made
        return lambda: decoder(text, str(file))
    names = text.get("architectures") or []

    def make() -> nn.Module:
        config = transformers.AutoConfig.for_model(**text)
        config.use_cache = False
        cls = getattr(transformers, names[0], None) if names else None
        if cls is None:
            return transformers.AutoModelForCausalLM.from_config(config)
        return cls(config)

    return make


def _without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and large buffers have memory that is never touched; the model itself is only read."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        found = nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)
        for name, value in vars(parameter).items():
            if not name.startswith("_"):
                setattr(found, name, value)  # marks of its owner: slices, experts
        memo[id(parameter)] = found
    for buffer in model.buffers():
        memo[id(buffer)] = (
            buffer.detach().cpu().clone() if buffer.numel() <= 1 << 16 and not buffer.is_meta else _like(buffer)
        )
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PlanError(
            f"model: {type(model).__name__} cannot be copied ({error}); give a function that makes the model instead"
        ) from error


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros: of small buffers without values (on the meta device) at least nothing arbitrary is computed."""
    return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)


def default_batch(model: nn.Module, micro: int, sequence: int | None) -> Batch:
    """A batch of tokens, for models of Hugging Face's format.

    Raises:
        PlanError: nothing says what the model takes.
    """
    config = getattr(model, "config", None)
    words = getattr(config, "vocab_size", None)
    if config is None or words is None:
        raise PlanError(
            f"batch: {type(model).__name__} does not say what it takes; give an example of one micro-batch (a tensor, a"
            " tuple of arguments, or a dictionary)"
        )
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _SEQUENCE
    length = min(int(most), _SEQUENCE) if sequence is None else sequence
    tokens = torch.zeros(micro, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def resized(batch: Batch, micro: int) -> Batch:
    """The batch with `micro` samples: the first dimension of every tensor that has as many rows as the batch has
    samples is cut or repeated.
    """
    sizes = [t.shape[0] for t in _leaves(batch) if t.dim() > 0]
    if not sizes:
        return batch
    samples = sizes[0]

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu() if not tensor.is_meta else torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.dim() == 0 or tensor.shape[0] != samples or samples == micro:
            return tensor
        if samples == 0:
            raise PlanError("batch: got a batch of no samples, expected at least one")
        times = -(-micro // samples)
        return tensor.repeat(times, *([1] * (tensor.dim() - 1)))[:micro].contiguous()

    return _mapped(batch, fit)


def cut(batch: Batch, size: int) -> tuple[Batch, int]:
    """One rank's part of a batch whose sequences are cut over `size` ranks, and the length of a sequence: dimension 1
    of the first tensor that has one. `labels` become `shift_labels` too, as the loader of cut sequences gives them.

    Raises:
        PlanError: there is no such tensor, or the length is no multiple of twice the ranks.
    """
    length = next((t.shape[1] for t in _leaves(batch) if t.dim() > 1), 0)
    if not length or length % (2 * size):
        raise PlanError(
            f"sequence: got {length} tokens for {size} ranks, expected a multiple of {2 * size}, so that all ranks have"
            " the same work; round it up"
        )

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        return tensor[:, : length // size].contiguous()

    found = _mapped(batch, part)
    if isinstance(found, dict) and found.get("labels") is not None:
        found.setdefault("shift_labels", found["labels"])
    return found, length


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _leaves(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _leaves(item)]
    return []


def _mapped(value: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, dict):
        return {key: _mapped(item, of) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, of) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, of) for item in value)
    return value


def tokens_of(batch: Batch) -> int:
    """Tokens in a batch: the elements of its first tensor of whole numbers of two dimensions, else its samples."""
    found = _leaves(batch)
    for tensor in found:
        if not tensor.is_floating_point() and tensor.dim() == 2:
            return tensor.numel()
    return next((t.shape[0] for t in found if t.dim() > 0), 1)
