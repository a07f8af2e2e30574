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

The last field of the index is a checksum of all that stands before it. Other files in the folder (config.json, tokenizers) are
nothing of ours: they are listed and left alone.

Left out: where the bytes go (`plan.py`), how they are moved (`files.py`), who moves them (`writing.py`, `reading.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointCorruptError, CheckpointError, shown

FORMAT = "dsx-checkpoint"
VERSION = 1
INDEX_NAME = "dsx.json"
LATEST_NAME = "latest"
HASH = "crc32"
WEIGHT_MAP_NAME = "model.safetensors.index.json"
MODEL, OPTIMIZER, CLIENT = "model", "optimizer", "client"
FAMILIES = (MODEL, OPTIMIZER, CLIENT)
_CHECKSUM = ',"checksum":"'

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
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "C64": ("complex64", 8),
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
        return seal(data)

    @staticmethod
    def from_json(text: str, where: str) -> Index:
        """Parse and check. `where` names the file in errors.

        Raises:
            CheckpointCorruptError: the text is not what was written.
            CheckpointError: it is no index, or one of a version that this dsx does not read.
        """
        try:
            data = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(f"{where}: not JSON ({error}); the checkpoint is damaged") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where}: got no '{FORMAT}' index; expected one written by dsx")
        if type(data.get("version")) is not int or data["version"] != VERSION:
            raise CheckpointError(
                f"{where}: got format version {shown(data.get('version'))}, this dsx reads version {VERSION}; upgrade dsx"
            )
        if "checksum" in data:  # the first checkpoints of this version had none
            _check_digest(text, data.pop("checksum"), where)
        try:
            return Index._parse(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointCorruptError(f"{where}: the index is damaged ({error!r})") from error

    @staticmethod
    def _parse(data: dict[str, Any]) -> Index:
        expect_keys("the index", data, _KEYS)
        if data["hash"] != HASH:
            raise ValueError(f"hash {shown(data['hash'])}, expected {HASH!r}")
        tensors = {name: _parse_tensor(name, entry) for name, entry in data["tensors"].items()}
        expect_keys("slices", data["slices"], tuple(tensors))
        slices = {n: tuple(Slice(*map(expect_int, part)) for part in parts) for n, parts in data["slices"].items()}
        for name, placed in tensors.items():
            check_cover(name, placed.spec.numel, slices[name])
        index = Index(
            tensors=tensors,
            slices=slices,
            aliases={n: tuple(map(expect_str, a)) for n, a in data["aliases"].items()},
            excluded=tuple(map(expect_str, data["excluded"])),
            scalars={key: _parse_scalars(values) for key, values in data["scalars"].items()},
            state=expect(data["state"], dict),
        )
        _check_owners(index)
        return index


_KEYS = ("format", "version", "hash", "tensors", "slices", "aliases", "excluded", "scalars", "state")


def _parse_tensor(name: str, entry: dict[str, Any]) -> Placed:
    expect_keys(shown(name), entry, ("dtype", "shape", "file", "offset"))
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {shown(entry['dtype'])} of {shown(name)}")
    file = expect_str(entry["file"])
    if "/" in file or "\\" in file or file.startswith("."):
        raise ValueError(f"file name {shown(file)} leaves the checkpoint")
    if not file.startswith(FAMILIES) or not file.endswith(".safetensors"):
        raise ValueError(f"file {shown(file)} of {shown(name)} is none that dsx writes")
    spec = TensorSpec(name, entry["dtype"], tuple(map(expect_int, entry["shape"])))
    return Placed(spec, file, expect_int(entry["offset"]))


def _check_owners(index: Index) -> None:
    """Everything that belongs to a parameter belongs to one that is there."""
    model = {name for name, placed in index.tensors.items() if placed.file.startswith(MODEL)}
    states = (n.partition("/")[2] for n, placed in index.tensors.items() if placed.file.startswith(OPTIMIZER))
    owners = {*index.aliases, *states, *(name for values in index.scalars.values() for name in values)}
    if not owners <= model:
        raise ValueError(f"parameters that are not there: {shown(sorted(owners - model)[:10])}")


def _parse_scalars(values: dict[str, Any]) -> dict[str, Any]:
    if any(not isinstance(value, (bool, int, float)) for value in values.values()):
        raise TypeError("an optimizer state that is no number")
    return dict(values)


def seal(data: dict[str, Any]) -> str:
    """The text of an index with a checksum of itself as its last field."""
    text = json.dumps(data, indent=None, separators=(",", ":"))[:-1]
    return f'{text}{_CHECKSUM}{_digest(text)}"}}'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _check_digest(text: str, digest: object, where: str) -> None:
    head, mark, tail = text.rpartition(_CHECKSUM)
    if not mark or tail != f'{digest}"}}' or _digest(head) != digest:
        raise CheckpointCorruptError(
            f"{where}: the text is not what was saved (its checksum differs); restore the file or load another tag"
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def expect(value: Any, kind: type) -> Any:
    """`value`, if it is of this kind. Raises `TypeError`."""
    if not isinstance(value, kind):
        raise TypeError(f"got {shown(value)}, expected {kind.__name__}")
    return value


def expect_int(value: Any) -> int:
    """A count: an integer of 0 or more, and no boolean. Raises `TypeError`."""
    if type(value) is not int or value < 0:
        raise TypeError(f"got {shown(value)}, expected an integer of 0 or more")
    return value


def expect_str(value: Any) -> str:
    """Text. Raises `TypeError`."""
    return expect(value, str)


def expect_keys(what: str, data: Any, keys: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `data` is a dictionary with these keys and no others."""
    if not isinstance(data, dict):
        raise TypeError(f"{what}: got {shown(data)}, expected an object")
    missing, unknown = [k for k in keys if k not in data], [k for k in data if k not in set(keys)]
    if missing or unknown:
        raise ValueError(f"{what}: keys missing: {shown(missing[:10])}, unknown: {shown(unknown[:10])}")


def check_cover(name: str, numel: int, parts: tuple[Slice, ...]) -> None:
    """Raise `ValueError` unless the slices cover `[0, numel)` exactly once, each of them a part of it."""
    position = 0
    for part in sorted(parts, key=lambda s: s.start):
        if part.start != position or (part.stop <= part.start and numel):
            raise ValueError(f"slices of {shown(name)} leave a hole, overlap or are empty at element {position}")
        position = part.stop
    if position != numel or (not numel and len(parts) > 1):
        raise ValueError(f"slices of {shown(name)} end at element {position} of {numel}")
