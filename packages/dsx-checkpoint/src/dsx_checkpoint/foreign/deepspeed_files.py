"""The files of a DeepSpeed checkpoint: which belong together, and whether any is missing.

A missing file must not become a missing part of the model, so everything that file names say is compared: the ranks,
the slices of each layer, the experts of each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointArgumentError, CheckpointCorruptError, shown
from ..files import read_text
from ..folder import check_tag

__all__ = ["DeepSpeedFiles", "deepspeed_folder"]

T = TypeVar("T")

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_(-?\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def deepspeed_folder(folder: Path, tag: str | None = None) -> Path | None:
    """The folder of a tag, if `folder` is one or has the tag that is asked for, or that `latest` names."""
    if tag is None and _looks_so(folder):
        return folder
    for name in ("latest_universal", "latest"):
        if tag is None and (folder / name).is_file():
            tag = read_text(folder / name).strip()
    try:
        found = None if tag is None else folder / check_tag(tag)
    except CheckpointArgumentError:  # no folder of DeepSpeed has such a name
        return None
    return found if found is not None and _looks_so(found) else None


def _looks_so(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / "zero").is_dir() or any(
        _MODEL.fullmatch(p.name) or _LAYER.fullmatch(p.name) for p in folder.iterdir()
    )


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of a tag.

    Attributes:
        model, optim: of each model-parallel rank, in the order of the data-parallel ranks.
        layers: number of the layer, slice, file.
        experts: number of the layer -> its experts in order: model-parallel rank -> file.
        expert_optim: in the order of the ranks that hold other experts.
    """

    model: dict[int, list[Path]]
    optim: dict[int, list[Path]]
    layers: list[tuple[int, int, Path]]
    experts: dict[int, list[dict[int, Path]]]
    expert_optim: list[Path]

    @staticmethod
    def find(folder: Path) -> DeepSpeedFiles:
        """Raises `CheckpointCorruptError` if files are missing, or are of two saves."""
        model: dict[int, dict[int, list[Path]]] = {}
        optim: dict[int, dict[int, list[Path]]] = {}
        experts: dict[int, dict[int, dict[int, Path]]] = {}
        expert_optim: dict[int, list[Path]] = {}
        layers = []
        for path in sorted(folder.iterdir()):
            if found := _OPTIM.fullmatch(path.name):
                optim.setdefault(int(found[2]), {}).setdefault(int(found[1]), []).append(path)
            elif found := _EXPERT.fullmatch(path.name):
                experts.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})[int(found[3])] = path
            elif found := _EXPERT_OPTIM.fullmatch(path.name):
                expert_optim.setdefault(int(found[1]), []).append(path)
            elif found := _LAYER.fullmatch(path.name):
                layers.append((int(found[1]), int(found[2]), path))
            elif found := _MODEL.fullmatch(path.name):
                model.setdefault(int(found[2]), {}).setdefault(int(found[1] or 0), []).append(path)
        _check_row(folder, "model-parallel ranks", model)
        if optim and optim.keys() != model.keys():
            raise CheckpointCorruptError(
                f"{folder}: files are missing: there are optimizer states of the model-parallel ranks {sorted(optim)},"
                f" and model states of {sorted(model)}"
            )
        slices: dict[str, set[int]] = {}
        for number, part, _ in layers:
            slices.setdefault(f"layer {number}", set()).add(part)
        _check_slices(folder, slices)
        _check_slices(
            folder, {f"expert {e} of layer {n}": set(parts) for n, of in experts.items() for e, parts in of.items()}
        )
        return DeepSpeedFiles(
            {mp: _in_order(folder, "ranks", ranks) for mp, ranks in model.items()},
            {mp: _in_order(folder, "ranks", ranks) for mp, ranks in optim.items()},
            layers,
            {layer: _ordered(folder, f"experts of layer {layer}", of) for layer, of in sorted(experts.items())},
            _in_order(folder, "expert-parallel ranks", expert_optim),
        )


def _check_row(folder: Path, what: str, numbers: Iterable[int]) -> None:
    found = sorted(numbers)
    if found != list(range(len(found))):
        raise CheckpointCorruptError(f"{folder}: files of {what} are missing; there are those of {shown(found)}")


def _check_slices(folder: Path, slices: Mapping[str, set[int]]) -> None:
    every = set().union(*slices.values())
    for name, found in slices.items():
        if found != every:
            raise CheckpointCorruptError(
                f"{folder}: files are missing: {name} has those of the model-parallel ranks {sorted(found)}, others"
                f" have {sorted(every)}"
            )


def _ordered(folder: Path, what: str, files: Mapping[int, T]) -> list[T]:
    _check_row(folder, what, files)
    return [files[number] for number in sorted(files)]


def _in_order(folder: Path, what: str, files: dict[int, list[Path]]) -> list[Path]:
    """One file of each number. Raises `CheckpointCorruptError` if one is missing, or is there in two forms."""
    for paths in _ordered(folder, what, files):
        if len(paths) > 1:
            raise CheckpointCorruptError(
                f"{folder}: has files of two saves, such as {paths[0].name} and {paths[1].name}; remove those of the"
                " older one"
            )
    return [paths[0] for paths in _ordered(folder, what, files)]
