"""The conversions of 16-bit floats that all native code shares (tools/native/dsx_native/half.h), for every instruction
set that this CPU runs: the bits of torch, for every 16-bit number and for floats around every border.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import dsx_ops
import pytest
import torch

HEADERS = Path(__file__).resolve().parents[3] / "tools" / "native"
FLAGS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}
SOURCE = """
#include "dsx_native/half.h"
using namespace dsx_native;
extern "C" {
void widen_bf16(const uint16_t* from, float* to, int64_t n) { widen_row<BFLOAT16>(from, to, n); }
void widen_f16(const uint16_t* from, float* to, int64_t n) { widen_row<FLOAT16>(from, to, n); }
void narrow_bf16(const float* from, uint16_t* to, int64_t n) { narrow_row<BFLOAT16>(from, to, n); }
void narrow_f16(const float* from, uint16_t* to, int64_t n) { narrow_row<FLOAT16>(from, to, n); }
}
"""


@pytest.fixture(scope="module", params=list(FLAGS))
def library(request, tmp_path_factory):
    isa = request.param
    if not HEADERS.is_dir() or not shutil.which("g++"):
        pytest.skip("needs the repository and g++")
    if isa not in (dsx_ops.native_status()["isas"] or ["base"]):
        pytest.skip(f"this CPU does not run {isa}")
    folder = tmp_path_factory.mktemp(isa)
    (folder / "half.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-ffp-contract=off", f"-I{HEADERS}", *FLAGS[isa]]
    command = ["g++", *flags, f"-DDSX_ISA_{isa.upper()}=1", "half.cpp", "-o", "half.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "half.so"))


def call(function, source, target):
    addresses = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())
    function(*addresses, ctypes.c_int64(source.numel()))
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_widened_as_torch_does(library, dtype):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    function = library.widen_bf16 if dtype is torch.bfloat16 else library.widen_f16
    got = call(function, halves, torch.empty(65536))
    wanted = halves.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.view(torch.int32)[~wanted.isnan()], wanted.view(torch.int32)[~wanted.isnan()])
    odd = call(function, halves[3:24], torch.zeros(21))  # rows that no register fits
    assert torch.equal(odd, wanted[3:24])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_floats_around_every_number_are_narrowed_as_torch_does(library, dtype):
    """Every number, the middle to its neighbour, and one bit beside both, which decide how ties and borders round."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = halves[~halves.isnan()].view(torch.int32).long()
    step = 16 if dtype is torch.bfloat16 else 13
    around = torch.cat([bits + d for d in (0, 1, -1, 1 << (step - 1), (1 << (step - 1)) + 1, (1 << (step - 1)) - 1)])
    floats = around.to(torch.int32).view(torch.float32)
    # Subnormal halves have their middles elsewhere.
    small = torch.linspace(-7e-5, 7e-5, 200_001)
    floats = torch.cat(
        [floats, small, torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 3.4e38])]
    )
    function = library.narrow_bf16 if dtype is torch.bfloat16 else library.narrow_f16
    got = call(function, floats, torch.empty(floats.numel(), dtype=torch.int16)).view(dtype)
    wanted = floats.to(dtype)
    assert torch.equal(got.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(got.view(torch.int16)[number], wanted.view(torch.int16)[number])
    if dtype is torch.bfloat16:
        assert set((got.view(torch.int16)[~number].int() & 0xFFFF).tolist()) == {0x7FC0}
