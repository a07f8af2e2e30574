"""Events, and the rules for labels, values and folders that all writers share.

An event is `(label, value, samples)`: a path-like label such as `Train/Samples/lr`, a number, and how many samples all
ranks together have seen. A value may be anything that `float()` takes, also a tensor with one element. Reading a tensor
on a device waits for the device; if that matters, pass plain numbers.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from .errors import MonitorConfigError

__all__ = ["Event", "checked_job_name", "folder_of", "label_to_file_name", "last_byte", "normalised"]

Event: TypeAlias = tuple[str, float, int]

_MOST_SAMPLES = 1 << 63  # TensorBoard's files hold 64-bit numbers
_LONGEST_NAME = 120  # bytes; file systems take 143 to 255, and an ending follows


def normalised(events: Iterable[tuple[str, Any, Any]]) -> list[Event]:
    """Turn labels, values and steps into `str`, `float` and `int`.

    Raises:
        MonitorConfigError: an event is not such a triple; names the event.
    """
    result: list[Event] = []
    for event in events:
        try:
            label, value, samples = event
            value = value.detach() if hasattr(value, "detach") else value
            label, samples = str(label), int(samples)
            if not label.isascii():
                label = label.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be written
            if not -_MOST_SAMPLES <= samples < _MOST_SAMPLES:
                raise ValueError("the number of samples does not fit 64 bits")
            result.append((label, float(value), samples))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise MonitorConfigError(
                f"write_events: got {event!r}, expected (label, number, samples); {error}"
            ) from error
    return result


def label_to_file_name(label: str) -> str:
    """File name of a label: `/`, blanks and characters that some file system refuses become `_`.

    A name that is too long for file systems is cut and ends with a checksum of the label.
    """
    name = "".join("_" if character in '/ \\:*?"<>|\0\n\r\t' else character for character in label)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    return f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}.{zlib.crc32(label.encode()):08x}"


def folder_of(section: Any) -> Path:
    """The folder `output_path/job_name` of a section; not created here.

    Raises:
        MonitorConfigError: the job name leads out of `output_path`.
    """
    return Path(os.path.expanduser(section.output_path or "")) / checked_job_name(section.job_name)


def checked_job_name(name: str) -> str:
    """Returns `name` if it is empty, a name, or a relative path without `..`: the files of a job stay in its folder.

    Raises:
        MonitorConfigError: the name is anything else.
    """
    parts = re.split(r"[/\\]", name)
    if ".." in parts or os.path.isabs(name) or os.path.splitdrive(name)[0] or name[:1] in ("/", "\\") or "\0" in name:
        raise MonitorConfigError(
            f"job_name: got {name!r:.80}, expected a folder name below output_path; set output_path to write elsewhere"
        )
    return name


def last_byte(path: Path) -> bytes:
    """The last byte of a file, to see whether a crash cut its last line; empty if the file is empty or missing."""
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read(1)
