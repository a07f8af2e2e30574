"""Files are replaced whole or not at all, and folders belong to one process at a time."""

from __future__ import annotations

import glob
import os
import stat
from pathlib import Path

import pytest
from dsx_core import replace_text, replacing
from dsx_core.locks import lock_alone, unlock


def test_a_text_replaces_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "first")
    replace_text(path, "second \N{SNOWMAN}", durable=False)
    assert path.read_text(encoding="utf-8") == "second \N{SNOWMAN}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o600)
    replace_text(tmp_path / "new", "y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_permissions_can_be_given_and_hold_while_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    replace_text(path, "open to all")
    path.chmod(0o644)
    with replacing(path, mode=0o600) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("of this user alone")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("when", ["before anything is written", "in the middle"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, when: str) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old")
    with pytest.raises(OSError, match="disk is full"):
        with replacing(path) as temporary:
            if when == "in the middle":
                temporary.write_text("half of the new conte")
            raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_the_old_content_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert glob.glob(f"{tmp_path}/*") == [str(path)]  # a pattern for finished files does not find the new one
    assert path.read_text() == "new"


def test_a_leftover_of_a_killed_process_with_the_same_id_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".state.json.{os.getpid()}").write_text("leftover, longer than the new text")
    replace_text(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        replace_text(tmp_path / "nowhere" / "state.json", "x")


def test_a_file_is_locked_for_one_descriptor_alone_until_it_is_unlocked(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert lock_alone(first) and not lock_alone(second)
    unlock(first)
    assert lock_alone(second)
    os.close(first)
    os.close(second)
