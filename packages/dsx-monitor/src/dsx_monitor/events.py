"""What an event is, and the small rules all writers share about labels, values and folders.

An event is `(label, value, samples)`: a path-like label such as `Train/Samples/lr`, a number, and how many samples all
ranks together have seen. Values may be anything that `float()` takes, a tensor with one element included; reading a
device tensor waits for the device, so hand over numbers you already have where that matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from .errors import MonitorConfigError

__all__ = ["Event", "folder_of", "label_to_file_name", "last_byte", "normalised"]

Event: TypeAlias = tuple[str, float, int]


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
            result.append((str(label), float(value), int(samples)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise MonitorConfigError(
                f"write_events: got {event!r}, expected (label, number, samples); {error}"
            ) from error
    return result


def label_to_file_name(label: str) -> str:
    """File name of a label: `/` and blanks become `_`; so do characters that some file system refuses."""
    return "".join("_" if character in '/ \\:*?"<>|\0\n\r\t' else character for character in label)


def folder_of(section: Any) -> Path:
    """The folder `output_path/job_name` of a section; not created here."""
    return Path(os.path.expanduser(section.output_path or "")) / section.job_name


def last_byte(path: Path) -> bytes:
    """The last byte of a file, which tells whether a crash cut its last line; empty for an empty or a missing one."""
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read(1)
