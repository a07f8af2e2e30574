"""The folder of a search: one tuner at a time, and a journal of what was tried, so that a killed search goes on.

The journal is a file of JSON lines. The first says what is tuned (script, arguments, configuration, ranks); a line
"begun" precedes every experiment and a line "ended" follows it. A folder whose journal speaks of something else is
refused, so that no result is taken for another one's. With `overwrite` the old journal is kept under another name.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import AutotuningError
from .files import write_whole

__all__ = ["Journal", "only_tuner"]

FILE, LOCK = "journal.jsonl", ".lock"
ATTEMPTS = 2
"""The number of times that an experiment may end the tuner itself before it is not tried again."""


@contextmanager
def only_tuner(folder: Path) -> Iterator[None]:
    """Hold a folder for this process.

    Raises:
        AutotuningError: another tuner holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LOCK).open("a+")
    except OSError as error:
        raise AutotuningError(
            f"autotuning.results_dir: {folder} cannot be used: {error.strerror}; choose another folder"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            raise AutotuningError(
                f"autotuning.results_dir: another tuner ({stream.read().strip() or 'unknown'}) works in {folder}; wait"
                " for its end, or choose another results_dir and exps_dir"
            ) from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()}")
        stream.flush()
        yield


class Journal:
    """The journal of one search. Made by `open`.

    Attributes:
        entries: what was there when it was opened and what was added, in order.
    """

    def __init__(self, path: Path, entries: list[dict[str, Any]]) -> None:
        self._path, self.entries = path, entries

    @classmethod
    def open(cls, folder: Path, about: Mapping[str, Any], *, overwrite: bool) -> Journal:
        """Go on with the journal of a folder, or begin one.

        Args:
            folder: the results folder, held by `only_tuner`.
            about: what is tuned, as plain values; compared with what the journal says.
            overwrite: begin again; an older journal is kept beside it.

        Raises:
            AutotuningError: the folder holds measurements of something else, or its journal cannot be read.
        """
        path = folder / FILE
        entries = _read(path)
        differing = _differing(entries, about)
        measured = any(one.get("metrics") for one in entries)
        if entries and (overwrite or (differing and not measured)):
            _put_aside(path)
            entries = []
        if not entries:
            journal = cls(path, [])
            write_whole(path, "")
            journal.add({"event": "search", "about": dict(about)})
            return journal
        if differing:
            before = entries[0].get("about", {})
            shown = "; ".join(
                f"{key} {_short(before.get(key))} there, {_short(about.get(key))} now" for key in differing[:3]
            )
            raise AutotuningError(
                f"autotuning.results_dir: {folder} holds results of another search ({shown}); choose another folder, or"
                " set autotuning.overwrite to true (the old journal is kept beside the new one)"
            )
        return cls(path, entries)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line; on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.entries.append(dict(entry))

    def ended(self, key: str) -> dict[str, Any] | None:
        """The outcome of an experiment; None if it has none yet."""
        found = [one for one in self.entries if one.get("event") == "ended" and one.get("key") == key]
        return found[-1] if found else None

    def unfinished(self, key: str) -> int:
        """The number of times that an experiment was begun and the tuner ended before it."""
        events = [one.get("event") for one in self.entries if one.get("key") == key]
        return events.count("begun") - events.count("ended") - events.count("stopped")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    entries = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            if number == len(lines):  # the tuner was killed while it wrote
                _cut(path, lines[:-1])
                return entries
            raise AutotuningError(
                f"{path}, line {number} is not JSON; remove the file to begin again, or choose another results_dir"
            ) from None
    return entries


def _differing(entries: list[dict[str, Any]], about: Mapping[str, Any]) -> list[str]:
    """The keys of which a journal says something else; none for an empty journal."""
    before = entries[0].get("about", {}) if entries else about
    return [key for key in {**before, **about} if before.get(key) != about.get(key)]


def _cut(path: Path, lines: list[str]) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _put_aside(path: Path) -> None:
    number = 1
    while (target := path.with_name(f"journal.{number}.jsonl")).exists():
        number += 1
    path.rename(target)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:100] + " ..."
