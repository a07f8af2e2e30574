"""Export to one file of torch: what `torch.save` would have written, with one tensor in memory at a time."""

import io
import weakref
import zipfile

import pytest
import torch
from dsx_checkpoint import CheckpointError
from dsx_checkpoint.exporting import export
from dsx_checkpoint.foreign.source import Source, Tensor
from dsx_checkpoint.torch_file import write_torch_file

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (0, 4), (3, 0), (5, 3), (2, 1, 3)]


def values():
    """Every dtype in an odd shape, every shape, and names that are no words."""
    torch.manual_seed(0)
    found = {f"dtype.{str(dtype)[6:]}": (torch.randn(5, 3) * 9).abs().to(dtype) for dtype in DTYPES}
    found |= {f"shape {shape}": torch.randn(shape) for shape in SHAPES}
    return found | {"": torch.ones(2), "ä/ß": torch.ones(3).bfloat16(), "large": torch.randn(1 << 20)}


@pytest.mark.parametrize("way", [{}, {"mmap": True}, {"weights_only": False}])
def test_torch_reads_what_it_would_have_written(tmp_path, way):
    state = values()
    write_torch_file(tmp_path / "w.pt", {name: Tensor.of(value) for name, value in state.items()})
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    expected = torch.load(buffer, weights_only=True)
    got = torch.load(tmp_path / "w.pt", **{"weights_only": True, **way})
    assert type(got) is dict and list(got) == list(expected)
    for name, value in expected.items():
        assert (got[name].dtype, got[name].shape, got[name].stride()) == (value.dtype, value.shape, value.stride())
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
        assert not got[name].requires_grad and got[name].data_ptr() % value.element_size() == 0


def test_it_is_a_sound_archive_and_tied_tensors_lie_there_once(tmp_path):
    shared = Tensor.of(torch.randn(1000))
    counted = []
    write_torch_file(tmp_path / "w.pt", {"a": shared, "b": Tensor.of(torch.ones(3)), "c": shared}, counted.append)
    assert counted == [4000, 12] and (tmp_path / "w.pt").stat().st_size < 6000
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["a"].data_ptr() == found["c"].data_ptr() != found["b"].data_ptr()


def test_memory_holds_one_tensor_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), []

    def fetch():
        value = torch.randn(1 << 16)
        alive.add(value)
        most.append(len(alive))
        return value

    tensors = {f"w{n}": Tensor((1 << 16,), torch.float32, lambda: fetch()) for n in range(12)}
    steps = []
    export(Source("made up", parameters=tensors), tmp_path / "w.pt", to="torch", dtype="as-saved",
           progress=lambda done, total: steps.append((done, total)))  # fmt: skip
    assert len(torch.load(tmp_path / "w.pt", weights_only=True)) == 12
    assert max(most) <= 2  # the one that goes while the next one comes
    assert steps == [((n + 1) << 18, 12 << 18) for n in range(12)]


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(4).double()])
def test_a_tensor_that_is_another_one_is_an_error_and_leaves_nothing(tmp_path, wrong):
    source = Source("made up", parameters={"w": Tensor((4,), torch.float32, lambda: wrong)})
    with pytest.raises(CheckpointError, match=r"'w': got .* expected shape"):
        export(source, tmp_path / "w.pt", to="torch", dtype="as-saved")
    assert not any(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    import os

    def full(fd):
        raise OSError(28, "No space left on device")

    source = Source("made up", parameters={"w": Tensor.of(torch.ones(4))})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        export(source, tmp_path / "w.pt", to="torch", dtype="as-saved")
    assert not any(tmp_path.iterdir())
