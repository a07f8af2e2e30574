"""Full weights from a checkpoint folder of dsx or DeepSpeed, under the names of DeepSpeed's script.

    python -m dsx_compat.checkpoint.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB]
    python -m dsx_compat.checkpoint.zero_to_torch CHECKPOINT_DIR OUTPUT_DIR --dtype bf16

No code in a file is executed, and tensors are read one by one. With `lazy_mode` the result reads each tensor when it is
asked for.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dsx_checkpoint.errors import CheckpointArgumentError, CheckpointError
from dsx_checkpoint.exporting import export
from dsx_checkpoint.folder import check_folder
from dsx_checkpoint.foreign.recognising import source_of
from dsx_checkpoint.foreign.source import Source
from dsx_checkpoint.format import INDEX_NAME
from dsx_checkpoint.reading import open_checkpoint
from torch import nn

__all__ = [
    "LazyWeights",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]

Folder = str | os.PathLike[str]

DTYPE_NAMES = {
    "float32": "fp32", "fp32": "fp32", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"
}  # fmt: skip
"""The name of a dtype in scripts -> its name in `export`."""


class LazyWeights(Mapping[str, torch.Tensor]):
    """fp32 weights by name, each read when it is asked for and not kept."""

    def __init__(self, source: Source, exclude_frozen: bool = False) -> None:
        self._tensors = {n: t for n, t in source.weights(masters=True) if not (exclude_frozen and n in source.frozen)}

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._tensors[name].fetch()
        return value.float() if value.is_floating_point() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> Mapping[str, torch.Tensor]:
    """Full fp32 weights and buffers on the host, tied ones under each name.

    Args:
        tag: the tag; None: the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that are not trained.
        lazy_mode: return a mapping that reads each tensor when it is asked for, instead of a dictionary.
    """
    weights = LazyWeights(source_of(checkpoint_dir, tag), exclude_frozen_parameters)
    return weights if lazy_mode else dict(weights)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write full weights into a folder: safetensors, or `pytorch_model.bin` of torch.

    Args:
        dtype: the dtype of floating-point weights and buffers, as torch's dtype or by name: float32, float16, bfloat16,
            or fp32, fp16, bf16. Other tensors keep theirs.
        max_shard_size: size at which safetensors are split; None: one file. A file of torch is never split.
        safe_serialization: write safetensors.

    Raises:
        CheckpointArgumentError: the dtype is not one of these. Then nothing is read or written.
    """
    name = DTYPE_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if name is None:
        raise CheckpointArgumentError(f"dtype: got {dtype!r}, expected one of {', '.join(sorted(DTYPE_NAMES))}")
    source, folder = source_of(checkpoint_dir, tag), Path(output_dir)
    options: dict[str, Any] = {"dtype": name, "exclude_frozen": exclude_frozen_parameters}
    if safe_serialization:
        export(source, folder, max_shard_size=max_shard_size or sys.maxsize, **options)
    else:
        export(source, folder / "pytorch_model.bin", to="torch", **options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """Load full weights into `model`, tensor by tensor, and return it.

    Raises:
        CheckpointError: names or shapes differ; then nothing is changed.
    """
    weights = LazyWeights(source_of(checkpoint_dir, tag))
    own = model.state_dict(keep_vars=True)
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [n for n in own if n in weights and tuple(own[n].shape) != weights._tensors[n].shape]
    if missing or unexpected or shapes:
        raise CheckpointError(
            f"{checkpoint_dir}: does not fit the model: missing in the checkpoint: {missing[:10]}; not in the model:"
            f" {unexpected[:10]}; of another shape: {shapes[:10]}"
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])
    return model


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """The files of optimizer states in a tag's folder of DeepSpeed, in the order of the ranks.

    Of a checkpoint of dsx, which has no such files: one temporary file that says the ZeRO stage and nothing else, for
    programs that read it there (Lightning's conversion to fp32). It is removed when the process ends.

    Raises:
        CheckpointError: there are none.
    """
    saved = _saved_by_dsx(checkpoint_dir)
    if saved is not None:
        return [_stand_in("zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {**saved.stage}})]
    return _files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """The file of rank 0's model states in a tag's folder of DeepSpeed.

    Of a checkpoint of dsx: a temporary file with the caller's state and the counters under DeepSpeed's names, without
    weights (`get_fp32_state_dict_from_zero_checkpoint` has these). It is removed when the process ends.

    Raises:
        CheckpointError: there is none.
    """
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    saved = _saved_by_dsx(checkpoint_dir)
    if saved is not None:
        return _stand_in(f"{prefix}mp_rank_00_model_states.pt", saved.head)
    return _files(checkpoint_dir, f"{prefix}mp_rank_00_model_states.pt")[0]


def _files(checkpoint_dir: Folder, pattern: str) -> list[str]:
    folder = check_folder(checkpoint_dir, "checkpoint_dir")
    found = sorted(map(str, folder.glob(pattern)), key=_with_numbers)
    if not found:
        raise CheckpointError(f"{folder}: has no file {pattern}; expected a tag's folder of DeepSpeed or of dsx")
    return found


class _Saved(NamedTuple):
    """The values of a dsx checkpoint beside its tensors, under DeepSpeed's names."""

    stage: dict[str, int]
    head: dict[str, Any]


def _saved_by_dsx(checkpoint_dir: Folder) -> _Saved | None:
    folder = check_folder(checkpoint_dir, "checkpoint_dir")
    if not (folder / INDEX_NAME).is_file():
        return None
    state = open_checkpoint(folder.absolute().parent, folder.absolute().name).state_of_caller()
    engine = state.get("engine") or {}
    counters, layout = engine.get("counters", {}), engine.get("layout", {})
    head = {
        **state.get("client", {}),
        "module": None, "optimizer": None, "lr_scheduler": engine.get("lr_scheduler") or None,
        "global_steps": counters.get("global_steps", 0), "global_samples": counters.get("global_samples", 0),
        "skipped_steps": counters.get("skipped_steps", 0), "dp_world_size": layout.get("ranks", 1), "mp_world_size": 1,
    }  # fmt: skip
    return _Saved({"zero_stage": layout.get("zero_stage", 0)}, head)


_stand_ins: list[tempfile.TemporaryDirectory[str]] = []  # each is removed when the process ends


def _stand_in(name: str, content: dict[str, Any]) -> str:
    folder = tempfile.TemporaryDirectory(prefix="dsx_stand_in_")
    _stand_ins.append(folder)
    path = os.path.join(folder.name, name)
    torch.save(content, path)
    return path


def _with_numbers(path: str) -> list[tuple[int, str]]:
    """The sort key that puts rank 2 before rank 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", Path(path).name)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `zero_to_fp32.py`. Returns the exit code."""
    return run_command("zero_to_fp32", argv, dtype="fp32")


def run_command(name: str, argv: Sequence[str] | None, dtype: str | None) -> int:
    """The command line of `zero_to_fp32.py`; with `dtype=None` that of `zero_to_torch.py`, which asks for a dtype."""
    parser = argparse.ArgumentParser(prog=name, description=f"whole {dtype or ''} weights of a checkpoint")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="a folder that is made")
    if dtype is None:
        parser.add_argument("--dtype", required=True, choices=sorted(DTYPE_NAMES), help="of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="size at which safetensors are split")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; without it the one that 'latest' names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    given = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_state_dict(
            given.checkpoint_dir, given.output_dir, dtype or given.dtype, given.max_shard_size,
            given.safe_serialization, given.tag, given.exclude_frozen_parameters,
        )  # fmt: skip
    except (CheckpointError, OSError) as error:
        if given.debug:
            raise
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    sys.stdout.write(f"{given.output_dir}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
