"""Limits of a file of `torch.save` or of a pickle: its reader takes no more memory than the file has bytes.

`unpickling.py` decides which objects a pickle may make. Three things happen before that, and they are looked at here:

* a zip file may hold records that are larger unpacked than the file, and a program of TorchScript, which torch would
  load as such (`records_of`);
* a pickle may speak of more bytes than follow, or of a memo of any size, and Python makes room for them first; or nest
  tuples so deep that their hash ends the process, or let them share parts so often that it never ends (`check_pickle`);
* lists and tables may share parts in the same way, and whoever goes through them would not end (`check_expansion`);
* a tensor may be larger than its storage, which torch would then extend (`check_view`).

Nothing is unpacked or unpickled here.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import IO, Any, Protocol

from ..errors import shown

__all__ = ["Bytes", "check_expansion", "check_pickle", "check_view", "records_of"]


class Bytes(Protocol):
    """A source that is read at any place: `bytes` or a memory map."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> bytes: ...

    def find(self, data: bytes, start: int, /) -> int: ...


def records_of(file: str | IO[bytes]) -> dict[str, int]:
    """Name in the archive, without its first folder, -> bytes, of each record of a zip file of `torch.save`.

    Raises:
        ValueError: it is none, or records are compressed (`torch.save` compresses nothing), or lie over each other.
    """
    with zipfile.ZipFile(file) as archive:
        infos, behind = archive.infolist(), archive.start_dir
    found: dict[str, int] = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"the record {info.filename!r} is compressed, expected one as torch.save writes it")
        name = info.filename.partition("/")[2]
        if name in found:
            raise ValueError(f"the record {info.filename!r} stands twice")
        found[name] = info.file_size
    places = sorted((info.header_offset, info.file_size) for info in infos)
    for (begin, size), (following, _) in pairwise([*places, (behind, 0)]):
        if begin + size > following:
            raise ValueError("records lie over each other")
    if "constants.pkl" in found:
        raise ValueError("it is a program of TorchScript, expected tensors of torch.save")
    if "data.pkl" not in found:
        raise ValueError("it has no record data.pkl")
    return found


def check_view(nbytes: int, itemsize: int, offset: Any, size: Iterable[Any], stride: Iterable[Any]) -> None:
    """Raise `ValueError` unless a tensor lies in its storage.

    Args:
        nbytes: of the storage.
        itemsize: bytes of an element.
        offset, size, stride: of the tensor, in elements.
    """
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if len(shape) != len(steps) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"a tensor of size {shown(shape)}, stride {shown(steps)} and offset {shown(offset)}")
    if math.prod(shape):
        end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, steps))
        if end * itemsize > nbytes or math.prod(shape) * itemsize > max(nbytes, _EXPANDED):
            raise ValueError(f"a tensor of size {shown(shape)} does not lie in its storage of {nbytes} bytes")


_EXPANDED = 1 << 20
"""Bytes that a tensor with strides of zero may stand for although its storage has fewer."""


# - Pickles

_LINE, _TWO_LINES = -1, -2
_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip


def _arguments() -> dict[int, tuple[int, bool]]:
    """Code of an instruction -> bytes of its argument, or of the count before it (`True`), or lines."""
    found: dict[int, tuple[int, bool]] = {}
    for known in pickletools.opcodes:
        argument = known.arg
        if argument is None:
            found[ord(known.code)] = (0, False)
        elif argument.n in _COUNTED:
            found[ord(known.code)] = (_COUNTED[argument.n], True)
        elif argument.n == pickletools.UP_TO_NEWLINE:
            found[ord(known.code)] = (_TWO_LINES if argument.name.endswith("_pair") else _LINE, False)
        else:
            found[ord(known.code)] = (argument.n, False)
    return found


_ARGUMENTS: Mapping[int, tuple[int, bool]] = _arguments()
_STOP, _FRAME, _LONG_PUT, _MARK, _DUP, _MEMOIZE = ord("."), 0x95, ord("r"), ord("("), ord("2"), 0x94
_PUT, _GET = ord("p"), ord("g")
_TUPLES, _PUTS, _GETS = frozenset(b"t\x85\x86\x87"), frozenset(b"pqr"), frozenset(b"ghj")
_MAKES = frozenset(b"tR\x81\x85\x86\x87\x92oiPQ")
"""Tuples, and what functions make of their arguments: it may have the hash of these, as a slice has, or be one."""
_KEEPS = frozenset(b"ab\x90esu\x94")
"""The opcodes that add to a value and leave it on the stack; they may also add nothing, to any value."""
_DEEPEST = 1000
"""Tuples in tuples."""
_MOST_ITEMS, _MOST_PER_BYTE = 1 << 24, 64
"""Parts of all tuples together, each as often as a hash goes through it: this many, and for each byte of the pickle."""
_MOST_VALUES, _MOST_PER_VALUE = 1 << 20, 64
"""The same for what a pickle has made: this many, and for each list and table."""


def _effects() -> dict[int, tuple[int, bool, int]]:
    """Code of an instruction -> what it does to the stack: values that it takes, whether it takes those down to the
    last mark too, and values that it puts there.
    """
    found: dict[int, tuple[int, bool, int]] = {}
    for known in pickletools.opcodes:
        before, to_mark = known.stack_before, pickletools.markobject in known.stack_before
        pops = before.index(pickletools.markobject) if to_mark else len(before)
        found[ord(known.code)] = (pops, to_mark, len(known.stack_after))
    return found


_EFFECTS: Mapping[int, tuple[int, bool, int]] = _effects()


class _Nesting:
    """The depth of nested tuples, and the number of their parts, while a pickle is walked through: of the stack and
    the memo nothing else is kept. Lists and tables count as one part: they have no hash.

    Args:
        most: parts of all tuples that are made or taken from the memo.
    """

    def __init__(self, most: int) -> None:
        self._stack: list[tuple[int, int]] = []  # depth and parts of each value
        self._marks: list[int] = []
        self._memo: dict[int, tuple[int, int]] = {}
        self._left = most

    def follow(self, code: int, number: int) -> None:
        """One instruction, with its number. Raises `ValueError` where tuples are too deep, or have too many parts."""
        stack = self._stack
        if code == _MARK:
            self._marks.append(len(stack))
            return
        pops, to_mark, pushes = _EFFECTS[code]
        begin = self._marks.pop() if to_mark and self._marks else len(stack)
        begin = max(0, begin - pops)
        taken = stack[begin:]
        del stack[begin:]
        value = (0, 1)
        if code in _MAKES:
            deeper = code in _TUPLES
            value = (max((depth for depth, _ in taken), default=0) + deeper, 1 + sum(parts for _, parts in taken))
        elif code in _KEEPS and taken:
            value = taken[0]
        elif code in _GETS:
            value = self._memo.get(number, value)
        elif code == _DUP and taken:
            value = taken[-1]
        stack.extend([value] * pushes)
        if code in _PUTS or code == _MEMOIZE:
            self._memo[number if code in _PUTS else len(self._memo)] = stack[-1] if stack else value
        self._left -= value[1] - 1 if code in _MAKES or code in _GETS or code == _DUP else 0
        if value[0] > _DEEPEST:
            raise ValueError(f"the pickle has tuples in tuples, more than {_DEEPEST} deep")
        if self._left < 0:
            raise ValueError("the pickle has tuples that share their parts so often that they have no end")


def check_expansion(value: Any) -> None:
    """Raise `ValueError` if lists, tuples and tables share their parts so often that whoever goes through all of it
    would not end, or if one contains itself. Objects of other kinds count as one part.
    """
    parts: dict[int, int | None] = {}  # of each list and table; None while its items are counted
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        found, counted = waiting.pop()
        if not isinstance(found, (list, tuple, dict, set, frozenset)):
            continue
        items = [*found.keys(), *found.values()] if isinstance(found, dict) else list(found)
        if counted:
            parts[id(found)] = min(1 << 62, 1 + sum(parts.get(id(item)) or 1 for item in items))
        elif id(found) not in parts:
            parts[id(found)] = None
            waiting.append((found, True))
            waiting += ((item, False) for item in items)
        elif parts[id(found)] is None:
            raise ValueError("a list or table contains itself")
    total = parts.get(id(value)) or 1
    if total > _MOST_VALUES + _MOST_PER_VALUE * len(parts):
        raise ValueError("lists and tables share their parts so often that they have no end")


def check_pickle(data: Bytes, start: int = 0) -> int:
    """Walk over the instructions of one pickle without obeying them; the byte behind it.

    Raises:
        ValueError: an instruction speaks of more than there is.
    """
    at, size = start, len(data)
    nesting = _Nesting(_MOST_ITEMS + _MOST_PER_BYTE * size)
    while True:
        head = data[at : at + 9]
        known = _ARGUMENTS.get(head[0]) if head else None
        if known is None:
            raise ValueError(f"the pickle has no instruction at byte {at}")
        code, (length, counted) = head[0], known
        if length < 0:
            end = at
            for _ in range(-length):
                end = data.find(b"\n", end + 1)
                if end < 0:
                    raise ValueError(f"a line of the pickle that begins at byte {at} does not end")
            number = _small(data[at + 1 : end], size) if code in (_PUT, _GET) else 0
            if number is None:
                raise ValueError(f"the pickle asks for a memo of {data[at + 1 : at + 21]!r} places")
            nesting.follow(code, number)
            at = end + 1
            continue
        number = int.from_bytes(head[1 : 1 + length], "little")
        at += 1 + length
        if counted:
            at += number
        if at > size or (code == _FRAME and number > size - at):
            raise ValueError(f"the pickle asks for {number} bytes, and there are {size} in all")
        if code == _LONG_PUT and number > size:
            raise ValueError(f"the pickle asks for a memo of {number} places")
        nesting.follow(code, number)
        if code == _STOP:
            return at


def _small(text: bytes, most: int) -> int | None:
    """A number in digits, if it is at most `most`."""
    return int(text) if text.isdigit() and len(text) < 20 and int(text) <= most else None
