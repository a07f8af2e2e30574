"""The checkpoint format as data: what the index file `dsx.json` says.

The idea: a checkpoint is a set of named tensors with a global shape. Which rank wrote which row-major range of a
tensor is an index for hashing, nothing a reader has to know: every load is a re-shard. Tensors lie whole in
safetensors files, so that any safetensors reader opens them; nothing is pickled.

    <dir>/<tag>/dsx.json                          this index
    <dir>/<tag>/model*.safetensors                parameters and buffers, under the names of the module's state_dict
    <dir>/<tag>/model.safetensors.index.json      name -> file, the layout Hugging Face reads
    <dir>/<tag>/optimizer*.safetensors            `master/<parameter>` and `<state>/<parameter>`
    <dir>/<tag>/client.safetensors                tensors found in the client state, if any
    <dir>/latest                                  text: the tag

Left out: where the bytes go (`plan.py`), how they are moved (`files.py`), who moves them (`save.py`, `load.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointCorruptError, CheckpointError

FORMAT = "dsx-checkpoint"
VERSION = 1
INDEX_NAME = "dsx.json"
LATEST_NAME = "latest"
HASH = "crc32"

# safetensors' dtype names -> (torch attribute, bytes per element)
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_NAMES = {f"torch.{attribute}": name for name, (attribute, _) in DTYPES.items()}


def dtype_name(dtype: object) -> str:
    """safetensors' name of a torch dtype. Raises `CheckpointError` for a dtype the format does not have."""
    name = _NAMES.get(str(dtype))
    if name is None:
        raise CheckpointError(f"got a tensor of dtype {dtype}; a checkpoint stores one of {', '.join(sorted(_NAMES))}")
    return name


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor: its name on disk, dtype and logical shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Placed:
    """A tensor's place: file and byte offset of its first element in that file."""

    spec: TensorSpec
    file: str
    offset: int


@dataclass(frozen=True)
class Slice:
    """A row-major range `[start, stop)` of a tensor that one rank wrote, and the hash of its bytes."""

    start: int
    stop: int
    hash: int


@dataclass(frozen=True)
class Index:
    """The whole content of `dsx.json`."""

    tensors: dict[str, Placed]
    slices: dict[str, tuple[Slice, ...]]
    aliases: dict[str, tuple[str, ...]]  # parameter -> its other (tied) names
    excluded: tuple[str, ...]  # parameters left out on request
    scalars: dict[str, dict[str, Any]]  # optimizer state that is one number: state -> parameter -> value
    state: dict[str, Any]  # encoded: counters, scheduler, scaler, param groups, client state

    def to_json(self) -> str:
        """Deterministic text."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "hash": HASH,
            "tensors": {
                n: {"dtype": p.spec.dtype, "shape": list(p.spec.shape), "file": p.file, "offset": p.offset}
                for n, p in self.tensors.items()
            },
            "slices": {n: [[s.start, s.stop, s.hash] for s in parts] for n, parts in self.slices.items()},
            "aliases": {n: list(a) for n, a in self.aliases.items()},
            "excluded": list(self.excluded),
            "scalars": self.scalars,
            "state": self.state,
        }
        return json.dumps(data, indent=None, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, where: str) -> Index:
        """Parse and check. `where` names the file in errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointCorruptError(f"{where}: not JSON ({error}); the checkpoint is damaged") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where}: got no '{FORMAT}' index; expected one written by dsx")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{where}: got format version {data.get('version')}, this dsx reads version {VERSION}; upgrade dsx"
            )
        try:
            return Index._parse(data)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{where}: the index is damaged ({error!r})") from error

    @staticmethod
    def _parse(data: dict[str, Any]) -> Index:
        tensors = {}
        for name, entry in data["tensors"].items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"dtype {entry['dtype']!r} of {name!r}")
            if "/" in entry["file"] or entry["file"].startswith("."):
                raise ValueError(f"file name {entry['file']!r} leaves the checkpoint")
            spec = TensorSpec(name, entry["dtype"], tuple(map(int, entry["shape"])))
            tensors[name] = Placed(spec, entry["file"], int(entry["offset"]))
        slices = {n: tuple(Slice(*map(int, part)) for part in parts) for n, parts in data["slices"].items()}
        for name, placed in tensors.items():
            check_cover(name, placed.spec.numel, slices.get(name, ()))
        return Index(
            tensors=tensors,
            slices=slices,
            aliases={n: tuple(a) for n, a in data["aliases"].items()},
            excluded=tuple(data["excluded"]),
            scalars=data["scalars"],
            state=data["state"],
        )


def check_cover(name: str, numel: int, parts: tuple[Slice, ...]) -> None:
    """Raise `ValueError` unless the slices cover `[0, numel)` exactly once."""
    position = 0
    for part in sorted(parts, key=lambda s: s.start):
        if part.start != position or part.stop < part.start:
            raise ValueError(f"slices of {name!r} leave a hole or overlap at element {position}")
        position = part.stop
    if position != numel:
        raise ValueError(f"slices of {name!r} end at element {position} of {numel}")
