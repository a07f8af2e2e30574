"""Writes past the page cache give the same bytes as plain ones, wait for a slow disk, and fail as plain ones do."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from dsx_checkpoint import CheckpointError, open_checkpoint, save
from dsx_checkpoint import direct as module
from dsx_checkpoint.command import main as checkpoint_command
from dsx_checkpoint.ranks import Solo
from dsx_testkit import run_ranks
from torch import nn

dsx_nvme = pytest.importorskip("dsx_nvme", reason="writes past the page cache go through dsx-nvme")

SHAPE = (1901, 1723)  # 12.5 MiB of fp32, no multiple of a page


@pytest.fixture(autouse=True)
def direct_disk(tmp_path):
    """These tests need a folder with direct I/O; where there is none, dsx writes through the page cache."""
    if not dsx_nvme.access(tmp_path).direct:
        pytest.skip(f"no direct I/O here: {dsx_nvme.explain(tmp_path)}")


@dataclass
class Part:
    name: str
    param: torch.Tensor
    shape: tuple
    start: int
    stop: int
    aliases: tuple = ()
    trainable: bool = True
    master: None = None
    states: dict = field(default_factory=dict)
    ranges: tuple = ()


def parts_of(rank, world):
    """Two tensors behind each other, cut into ranges that end in the middle of pages."""
    found = []
    for number, name in enumerate("ab"):
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).reshape(-1)
        cuts = [0, *(whole.numel() * (n + 1) // world - 77 * (n + 1) for n in range(world - 1)), whole.numel()]
        begin, end = cuts[rank], cuts[rank + 1]
        states = {"exp_avg": whole[begin:end] * 2}
        found.append(Part(name, whole[begin:end].clone(), SHAPE, begin, end, states=states))
    return found


def save_parts(rank, world, folder, plain):
    if plain:
        module._DirectFile.open = staticmethod(lambda path: None)
    counted, write = [], module._DirectFile.write

    def counting(self, data, offset):
        counted.append((len(data), offset))
        write(self, data, offset)

    module._DirectFile.write = counting
    save(folder, "a", module=nn.Module(), slices=parts_of(rank, world), state={"n": 1})
    return counted


@pytest.mark.parametrize("world", [1, 2])
def test_the_files_are_the_same_byte_for_byte(tmp_path, world):
    for written in run_ranks(save_parts, world, str(tmp_path / "direct"), False):
        assert sum(size for size, _ in written) > 20 << 20  # most of it
        assert all(size % 4096 == 0 and offset % 4096 == 0 for size, offset in written)
    assert run_ranks(save_parts, world, str(tmp_path / "plain"), True) == [[]] * world
    for path in (tmp_path / "plain" / "a").iterdir():
        assert (tmp_path / "direct" / "a" / path.name).read_bytes() == path.read_bytes(), path.name
    assert checkpoint_command(["verify", str(tmp_path / "direct")]) == 0
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(open_checkpoint(tmp_path / "direct").whole("b"), whole)


def test_pieces_of_any_size_at_any_place(tmp_path):
    chosen = random.Random(0)
    size = 40 << 20
    expected, path = bytearray(size), tmp_path / "file"
    path.write_bytes(bytes(size))
    with module.writing(path) as file:
        at, kept = 0, []
        while at < size:
            count = min(size - at, chosen.choice([1, 5000, 1 << 20, (1 << 20) + 4095, 9_000_001]))
            data = bytearray(chosen.randbytes(count))
            kept.append(data)
            file.write(memoryview(data), at)
            expected[at : at + count] = data
            at += count + chosen.choice([0, 0, 3])
    assert path.read_bytes() == expected


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    flying, most = [], []

    class Ticket:
        def wait(self):
            flying.remove(self)

        exception = wait

    class Engine:
        def open(self, path, write):
            return path

        def write(self, tensor, file, offset):
            flying.append(ticket := Ticket())
            most.append(len(flying))
            return ticket

        def close_file(self, file):
            """Nothing is open."""

        def close(self):
            assert not flying

    monkeypatch.setattr(dsx_nvme, "Engine", Engine)
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    with module.writing(path) as file:
        for number in range(20):
            file.write(memoryview(bytearray(2 << 20)), number * (2 << 20))
    assert max(most) == module.IN_FLIGHT and len(most) == 20


@pytest.mark.parametrize("when", ["submit", "wait"])
def test_a_failing_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path, monkeypatch, when):
    save(tmp_path, "old", module=nn.Module(), slices=parts_of(0, 1), state={}, ranks=Solo())
    write = dsx_nvme.Engine.write

    def failing(self, tensor, file, offset=None, *, after=None):
        error = OSError(28, "No space left on device", str(file.path))
        if when == "submit":
            raise error
        ticket = write(self, tensor, file, offset, after=after)
        ticket.wait()

        def refuse():
            raise error

        monkeypatch.setattr(ticket, "wait", refuse, raising=False)
        return ticket

    monkeypatch.setattr(dsx_nvme.Engine, "write", failing)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, "new", module=nn.Module(), slices=parts_of(0, 1), state={}, ranks=Solo())
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["latest", "old"]
    assert len(os.listdir("/proc/self/fd")) <= before  # files and rings are given back
    assert checkpoint_command(["verify", str(tmp_path)]) == 0
