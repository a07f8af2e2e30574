"""`aio.use_gds` in offload: the direct way between disk and device where cuFile is there (here a stand-in that moves
host memory, which counts as a device's), else one warning that says why.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from dsx_nvme import cufile, gds, staging
from torch import nn

GDS_TESTS = Path(__file__).parents[2] / "dsx-nvme" / "tests" / "test_nvme_gds.py"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def trained(folder, use_gds):
    import dsx

    place = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
            "offload_param": {**place, "max_in_cpu": 0},
        },
        "aio": {"use_gds": use_gds},
    }
    engine, *_ = dsx.initialize(model=Net(), config=config)
    losses = []
    for step in range(4):
        loss = engine(torch.randn(2, 64, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """cuFile's functions over host memory, which counts as a device's (see dsx-nvme's own tests of it)."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler for the stand-in")
    spec = importlib.util.spec_from_file_location("source_of_the_stand_in", GDS_TESTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "fake.cpp").write_text(module.SOURCE)
    library = tmp_path / "libcufile.so"
    subprocess.check_call([compiler, "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "fake.cpp"])
    begin = gds.gds_handle.__init__

    def through_the_page_cache(self, *arguments):  # host memory is not aligned as a device's
        begin(self, *arguments)
        object.__setattr__(self.engine.options, "direct", False)

    def use():
        monkeypatch.setenv(cufile.LIBRARY_VARIABLE, str(library))
        monkeypatch.setattr(staging, "on_device", lambda tensor: True)
        monkeypatch.setattr(gds.gds_handle, "__init__", through_the_page_cache)

    loaded = ctypes.CDLL(str(library))
    loaded.fake_set(ctypes.c_long(1 << 30), ctypes.c_long(0), ctypes.c_long(0))
    return loaded, use


def test_state_goes_directly_between_disk_and_device(stand_in, tmp_path, caplog):
    library, use = stand_in
    plain = trained(tmp_path / "swap", False)
    assert library.fake_moves() == 0
    use()
    with caplog.at_level("WARNING"):
        assert trained(tmp_path / "swap", True) == plain
    assert not [r for r in caplog.records if "use_gds" in r.getMessage()]
    assert library.fake_moves() > 4 * 2 * 3  # each step reads the shards of three units twice, and more
    assert library.fake_files() == 0  # each file that was registered is given back


def test_without_cufile_one_warning_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(cufile.LIBRARY_VARIABLE, str(tmp_path / "nothing.so"))
    with caplog.at_level("WARNING"):
        found = trained(tmp_path / "swap", True)
    (record,) = [r for r in caplog.records if "use_gds" in r.getMessage()]
    assert "goes through host memory" in record.getMessage()
    assert "nothing.so" in record.getMessage()
    assert found == trained(tmp_path / "swap", False)
