"""The Triton kernels: in Triton's interpreter on CPU (a process of its own, since the switch is read at import), and on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

has_triton = importlib.util.find_spec("triton") is not None
CASES = {
    "plain": {},
    "block 64, odd dimension, short": {"block": 64, "seq": 100, "dim": 20},
    "grouped, causal, short": {"heads": 4, "kv_heads": 2, "causal": True, "seq": 75, "block": 32},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**31 + 3, "batch": 2},
    "fp16": {"dtype": torch.float16, "seq": 64},
    "rpe, masks, dropout": {
        "heads": 2, "batch": 2, "seq": 48, "rpe": torch.randn(2, 48, 48), "attn_mask": torch.rand(48, 48) < 0.8,
        "key_padding_mask": torch.rand(2, 48) < 0.8, "dropout_p": 0.2, "dropout_seed": 4,
    },
}  # fmt: skip


@pytest.mark.skipif(not has_triton, reason="needs triton (pip install dsx-sparse-attn[triton])")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_interpreted in its own process")
@pytest.mark.parametrize("case", CASES)
def test_kernels_in_the_interpreter(problem, case):
    p = problem(**CASES[case])
    if case == "plain":
        p.layout[:, 2] = 0
    assert max(p.errors("triton")) < (1e-2 if p.q.dtype == torch.float16 else 1e-5)


@pytest.mark.skipif(not has_triton, reason="needs triton (pip install dsx-sparse-attn[triton])")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is inside that process")
def test_interpreted():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "in_the_interpreter",
    ]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{len(CASES)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_gpu(problem, case, dtype):
    p = problem(**{**CASES[case], "dtype": dtype})
    for name in ("q", "k", "v", "layout", "dout"):
        setattr(p, name, getattr(p, name).cuda())
    p.options = {n: o.cuda() if torch.is_tensor(o) else o for n, o in p.options.items()}
    assert max(p.errors("triton")) < (1e-5 if dtype == torch.float32 else 2e-2)
