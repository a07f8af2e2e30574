"""The checkpoint format as data: the contents of the index file `dsx.json`. `docs/checkpoint-format.md` describes it.

A checkpoint is a set of named tensors with their global shapes. Tensors are stored unsharded in safetensors files, so
that any safetensors reader can open them; nothing is pickled. The checkpoint does not say which rank wrote which part:
every load shards the tensors again.

    <dir>/<tag>/dsx.json                          this index
    <dir>/<tag>/model*.safetensors                parameters and buffers, under the names of the module's state_dict
    <dir>/<tag>/model.safetensors.index.json      name -> file, the layout Hugging Face reads
    <dir>/<tag>/optimizer*.safetensors            `master/<parameter>` and `<state>/<parameter>`
    <dir>/<tag>/client.safetensors                tensors found in the state, the caller's and that of each rank
    <dir>/latest                                  text: the tag

Each tensor is hashed in chunks of a fixed number of bytes; headers and the index itself have hashes too. Other files in
the folder (config.json, tokenizers) do not belong to dsx: they are listed and left unchanged.

This module needs no torch, so that tools can read an index quickly. Left out: the places of the bytes (`plan.py`),
moving them (`files.py`, `writing.py`, `reading.py`), and the checks of the text when it is read (`parsing.py`,
`version1.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from .crc import Chunks
from .errors import CheckpointError

FORMAT = "dsx-checkpoint"
VERSION = 3
INDEX_NAME = "dsx.json"
LATEST_NAME = "latest"
NODE_NAME = "node.json"  # if each node has its own disk: the bytes that are on it (`node_part.py`)
WEIGHT_MAP_NAME = "model.safetensors.index.json"
HASH = "crc32"
CHUNK_BYTES = 4 << 20  # of a tensor: small enough to locate damage
MOST_CHUNKS = 1 << 17  # of parameters and states: in a checkpoint of more than 550 GB the chunks are larger
MODEL, OPTIMIZER, CLIENT = "model", "optimizer", "client"
FAMILIES = (MODEL, OPTIMIZER, CLIENT)
MASTER = "master"  # used like the name of a state: the parameter in full precision
FLOAT_MARKER = "__float__"  # {"__float__": "inf"}: a number that JSON cannot express
CHECKSUM_MARK = ',"checksum":"'

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor: its name on disk, dtype and logical shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes on disk. A plan of many tensors asks for it millions of times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * DTYPES[self.dtype][1])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][1]

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSpec, (self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place: file and byte offset of its first element in that file."""

    spec: TensorSpec
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the index: its place and the hashes of its chunks."""

    placed: Placed
    chunks: Chunks

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return self.placed.spec


@dataclass(frozen=True)
class FileEntry:
    """The expected size of a file, and the hash of its first `header_bytes` bytes, which belong to no tensor."""

    nbytes: int
    header_bytes: int
    header_crc: int


@dataclass(frozen=True)
class Index:
    """The whole content of `dsx.json`.

    Attributes:
        files: the files that dsx wrote in addition to the index.
        tensors: family -> name in the family's files -> tensor. Families are "model", "optimizer" and "client"; the
            optimizer's names are `<state>/<parameter>`, with "master" in the place of a state for the parameter in full
            precision.
        aliases: parameter -> its other (tied) names. It has every parameter, so that buffers can be told from them.
        excluded: parameters left out on request.
        scalars: optimizer states that are one number: state -> parameter -> value.
        state: encoded (see `encode.py`): training state and client state.
        latest: whether it was saved with `save_latest=True`. If the file `latest` is missing, a load uses such a one.
        ranks: encoded, in rank order: the state of each rank alone, such as its random states; may be empty.
        writer: the version of dsx that wrote it.
        version: the version of the format that it was read from.
    """

    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, Entry]]
    aliases: dict[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    scalars: dict[str, dict[str, Any]]
    state: dict[str, Any]
    ranks: tuple[Any, ...] = ()
    latest: bool = False
    writer: str = ""
    chunk_bytes: int = CHUNK_BYTES
    version: int = VERSION

    def to_json(self) -> str:
        """The text of the index file; the same for the same content."""
        return seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "writer": self.writer,
                "latest": self.latest,
                "hash": HASH,
                "chunk_bytes": self.chunk_bytes,
                "files": {name: _file_to_json(file) for name, file in self.files.items()},
                **{family: {n: _entry_to_json(e) for n, e in self.tensors[family].items()} for family in FAMILIES},
                "aliases": {name: list(others) for name, others in self.aliases.items()},
                "excluded": list(self.excluded),
                "scalars": {k: {n: plain_number(v) for n, v in values.items()} for k, values in self.scalars.items()},
                "state": self.state,
                "ranks": list(self.ranks),
            }
        )


def _file_to_json(file: FileEntry) -> dict[str, Any]:
    return {"bytes": file.nbytes, "header_bytes": file.header_bytes, "header_hash": f"{file.header_crc:08x}"}


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    placed = entry.placed
    return {
        "dtype": placed.spec.dtype,
        "shape": list(placed.spec.shape),
        "file": placed.file,
        "offset": placed.offset,
        "hashes": "".join(f"{crc:08x}" for crc in entry.chunks.crcs),
    }


def plain_number(value: Any) -> Any:
    """A number as JSON has it, which knows no infinity and no NaN."""
    return {FLOAT_MARKER: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def seal(data: dict[str, Any]) -> str:
    """The text of an index with a checksum of itself as its last field."""
    text = json.dumps(data, indent=None, separators=(",", ":"), allow_nan=False)[:-1]
    return f'{text}{CHECKSUM_MARK}{digest_of(text)}"}}'


def digest_of(text: str) -> str:
    """The checksum of the text of an index."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
