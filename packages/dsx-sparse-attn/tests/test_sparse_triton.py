"""The Triton kernels: in Triton's interpreter on CPU (a process of its own, since the switch is read at import), and on
a GPU.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.backends import triton_gpu

has_triton = importlib.util.find_spec("triton") is not None
CASES = {
    "plain": {},
    "block 64, odd dimension, short": {"block": 64, "seq": 100, "dim": 20},
    "grouped, causal, short": {"heads": 4, "kv_heads": 2, "causal": True, "seq": 75, "block": 32},
    "16 blocks per tile, full tiles too": {
        "heads": 1, "seq": 208, "density": 0.97, "causal": True, "dtype": torch.float16,
    },
    "many tiles per block": {"heads": 1, "block": 128, "seq": 200, "causal": True},
    "float32 of 128": {"heads": 1, "dim": 128, "seq": 48},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**31 + 3, "batch": 2},
    "fp16": {"dtype": torch.float16, "seq": 64},
    "rpe, masks, dropout": {
        "heads": 2, "batch": 2, "seq": 48, "rpe": torch.randn(2, 48, 48), "attn_mask": torch.rand(48, 48) < 0.8,
        "key_padding_mask": torch.rand(2, 48) < 0.8, "dropout_p": 0.2, "dropout_seed": 4,
    },
}  # fmt: skip


interpreted = [
    pytest.mark.skipif(not has_triton, reason="needs triton (pip install triton)"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_interpreted in its own process"),
]


def apply(marks):
    return lambda test: functools.reduce(lambda t, mark: mark(t), marks, test)


def limit(p):
    return 1e-2 if p.q.dtype == torch.float16 else 1e-5


@apply(interpreted)
@pytest.mark.parametrize("case", CASES)
def test_kernels_in_the_interpreter(problem, case):
    p = problem(**CASES[case])
    if case == "plain":
        p.layout[:, 2] = 0
    assert max(p.errors("triton")) < limit(p)


@apply(interpreted)
@pytest.mark.parametrize("multiprocessors, parts, one_layout", [(1, 1, True), (2, 2, False), (132, 4, True)])
def test_query_heads_share_programs_or_not_in_the_interpreter(problem, monkeypatch, multiprocessors, parts, one_layout):
    device = triton_gpu.device_of(torch.device("cpu"))._replace(multiprocessors=multiprocessors)
    monkeypatch.setattr(triton_gpu, "device_of", lambda _: device)
    p = problem(heads=4, kv_heads=1, batch=2, seq=80, dim=16, block=16)
    p.layout[2, 1] = 1  # head 2 has a global row
    if one_layout:
        p.layout = p.layout[:1]
    call = checked(p.q, p.k, p.v, p.layout, Options(block=16))
    assert triton_gpu.group_parts(call) == parts
    assert max(p.errors("triton")) < limit(p)


@apply(interpreted)
def test_the_same_bits_in_every_run_in_the_interpreter(problem):
    p = problem(heads=4, kv_heads=1, seq=64, dropout_p=0.2, dropout_seed=5)
    assert all(torch.equal(a, b) for a, b in zip(p.run("triton"), p.run("triton"), strict=True))


@pytest.mark.skipif(not has_triton, reason="needs triton (pip install triton)")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is inside that process")
def test_interpreted():
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", "in_the_interpreter"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and f"{len(CASES) + 4} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not has_triton, reason="needs triton (pip install triton)")
@pytest.mark.skipif(os.environ.get("DSX_SIMCUDA") == "1", reason="Triton kernels do not run on the simulated device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_gpu(problem, case, dtype):
    p = problem(**{**CASES[case], "dtype": dtype})
    for name in ("q", "k", "v", "layout", "dout"):
        setattr(p, name, getattr(p, name).cuda())
    p.options = {n: o.cuda() if torch.is_tensor(o) else o for n, o in p.options.items()}
    assert max(p.errors("triton")) < (1e-5 if dtype == torch.float32 else 2e-2)
