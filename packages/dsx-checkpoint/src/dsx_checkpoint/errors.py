"""The errors of checkpoints."""

from __future__ import annotations

import os
import reprlib

from dsx_core import CodedError

_MAX_CHARACTERS = 200


class CheckpointError(CodedError, RuntimeError):
    """A checkpoint cannot be written or read. Raised with the same text on every rank."""


class CheckpointCorruptError(CheckpointError):
    """The bytes on disk are not the bytes that were written."""

    code = "DSX501"


class CheckpointArgumentError(CheckpointError, ValueError):
    """A folder, a tag or a state that no checkpoint can have."""


def nothing_committed(text: str) -> CheckpointError:
    """The error for a folder without the checkpoint that is asked for."""
    return CheckpointError(text, code="DSX502")


class _Short(reprlib.Repr):
    """`repr` of a few plain kinds of values, and of a few items of them; of others the kind alone. The values come from
    files: lists that share their parts may have more items than any memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20
        self.maxlevel, self.maxstring = 3, _MAX_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write more than 4300 digits."""
        return repr(x) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        """The beginning."""
        return repr(x[:_MAX_CHARACTERS])

    def repr_instance(self, x: object, level: int) -> str:
        """The `repr` of a value if that takes no time; else its kind."""
        plain = isinstance(x, (float, complex, bool, os.PathLike, type(None))) or type(x).__module__ == "torch"
        return repr(x) if plain and not hasattr(x, "untyped_storage") else f"<{type(x).__name__}>"


_SHORT = _Short()


def shown(value: object) -> str:
    """`repr` of a value from a file or a caller, cut to a length that fits into an error message."""
    text = repr(value[: _MAX_CHARACTERS + 1]) if isinstance(value, (str, bytes)) else _SHORT.repr(value)
    return (
        text
        if len(text) <= _MAX_CHARACTERS
        else f"{text[:_MAX_CHARACTERS]}... ({len(value) if isinstance(value, str) else 'long'})"
    )


def words_of(error: BaseException) -> str:
    """The words of an error that reading a file has ended in. A value in them, such as the key that a KeyError has, is
    shown as `shown` does.
    """
    plain = all(isinstance(given, (str, int)) for given in error.args)
    text = str(error) if plain and not isinstance(error, KeyError) else ", ".join(map(shown, error.args))
    return f"{type(error).__name__}: {text[: 2 * _MAX_CHARACTERS]}"
