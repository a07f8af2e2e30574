"""The Triton kernels compiled ahead of time for GPUs that are not there: what they need is what the table says.

A sample runs with every test run. The whole table: python -m pytest -m slow
    packages/dsx-sparse-attn/tests/test_sparse_triton_ahead.py
"""

import os

import pytest
import torch
from dsx_sparse_attn import SparseAttentionError
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.backends import triton_gpu
from dsx_sparse_attn.backends.triton_table import ARCHITECTURES, MOST_SPILLED, TABLE, Row, Tiles

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted")
ahead = pytest.importorskip("dsx_sparse_attn.ahead")
LIMITS = {80: 166912, 90: 232448, 100: 232448}  # shared memory of one program on an A100, H100 and H200, B200


def first(kernel, dim, biased=False, wide=False, block=64):
    """The row that a call is started with first."""
    return next(
        row for row in TABLE
        if (row.kernel, row.dim, row.biased, row.wide) == (kernel, dim, biased, wide) and row.least_block <= block
    )  # fmt: skip


# Calls that did not start, or spilled 29 KB, with tiles as large as the layout's blocks; and one for every
# architecture.
SAMPLE = {
    "dq of dimension 256": (first("dq", 256), 90),
    "dkv of dimension 128, causal, with a bias": (first("dkv", 128, biased=True), 90),
    "float32 forward of dimension 128": (first("forward", 128, wide=True), 90),
    "forward on sm_80": (first("forward", 64), 80),
    "dq on sm_100": (first("dq", 64), 100),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table_compiles_and_fits(name):
    row, arch = SAMPLE[name]
    found = ahead.compile_row(row, arch)
    assert ahead.broken_promises(row, arch, found) == []
    assert 0 < found.shared <= LIMITS[arch] and 0 < found.registers <= 255


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "row", TABLE, ids=lambda row: f"{row.kernel}-{32 if row.wide else 16}-{row.dim}-{row.biased}-{row.tiles}"
)
def test_the_whole_table_compiles_and_fits(row, arch):
    if row.shared[ARCHITECTURES.index(arch)] is None:
        pytest.skip("not for this architecture")
    for option in ahead.OPTIONS:
        assert ahead.broken_promises(row, arch, ahead.compile_row(row, arch, option)) == [], option


def test_a_row_that_needs_more_than_it_says_is_found():
    row = first("forward", 64)._replace(shared=(1, 1, 1))
    found = ahead.compile_row(row, 90, "plain")
    (wrong,) = ahead.broken_promises(row, 90, found)
    assert f"needs {found.shared} bytes of shared memory, the table says 1" in wrong
    assert ahead.broken_promises(row._replace(shared=(None,) * 3), 90, found)
    slow = found._replace(spilled=MOST_SPILLED + 4, seconds=61.0)
    assert [w.split()[0] for w in ahead.broken_promises(row, 90, slow)] == ["needs", "spills", "took"]


def test_tiles_that_triton_cannot_compile_are_said():
    row = Row("forward", False, 64, False, 16, Tiles(64, 48, 4, 1), (0, 0, 0))
    with pytest.raises(SparseAttentionError, match=r"Triton \S+ does not compile it for sm_90"):
        ahead.compile_row(row, 90, "plain")


def test_what_is_compiled_has_the_types_of_what_is_launched():
    """1, None and multiples of 16 are special to Triton; big strides are 64-bit numbers."""
    q = torch.empty(1, 2, 64, 24, dtype=torch.float16)
    c = checked(q, q, q, torch.ones(1, 4, 4), Options(block=16, scale=0.5))
    launch = triton_gpu.forward_launch(c, torch.empty_like(q), torch.empty(1, 2, 64)).make(Tiles(64, 64, 4, 1))
    launch.arguments["k_b"] = 1 << 33
    source = ahead._source(launch)
    types = source.signature
    assert (types["Q"], types["LSE"], types["STARTS"]) == ("*fp16", "*fp32", "*i32")
    assert (types["scale"], types["q_s"], types["k_b"], types["drop_below"]) == ("fp32", "i32", "i64", "i32")
    assert types["group"] == types["BIAS"] == types["ROWS"] == "constexpr"
    known = {launch.kernel.arg_names[at[0]] for at in source.attrs}
    assert {"Q", "seq", "k_b"} <= known and "q_s" not in known and not known & {"drop_below", "long_lines", "copies"}
