"""The names of DeepSpeed that public repositories import: each exists, or the error says what to use instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import dsx_compat
import pytest

dsx_compat.activate()
import deepspeed  # noqa: E402

LINES = (Path(__file__).parent / "client_names.txt").read_text().splitlines()
TABLE = [tuple([*line.split(), ""][:3]) for line in LINES if not line.startswith("#")]


def reached(path: str):
    """The value of a path, read as a program does that imports the longest part of it which is a module."""
    value = deepspeed
    parts = path.split(".")[1:]
    for count, part in enumerate(parts, 1):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            if isinstance(error, dsx_compat.CompatError):
                raise  # a member of a class
            value = importlib.import_module(".".join(["deepspeed", *parts[:count]]))
    return value


@pytest.mark.parametrize(("repository", "path", "refused"), TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_a_name_that_a_repository_uses_exists_or_says_what_to_use(repository, path, refused):
    if not refused:
        assert reached(path) is not None
        return
    with pytest.raises(dsx_compat.CompatError) as caught:
        reached(path)
    named, _, advice = str(caught.value).partition(": dsx does not have it; ")
    assert advice and (path.startswith(named) or path.endswith(named.replace("engine.", ".")))


def test_every_repository_is_there():
    assert {row[0] for row in TABLE} >= {
        *("OpenRLHF", "ms-swift", "LLaMA-Factory", "TRL", "Accelerate"),
        *("open-instruct", "axolotl", "ArcticTraining", "diffusion-pipe"),
    }
