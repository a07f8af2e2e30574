"""ALST's table by exact accounting: Llama 8B with 3.7 million tokens over 8 devices of 80 GB, in two of its 32 layers,
which hold what 32 do but for the inputs of layers in host memory; the whole table is planned where `-m slow` is asked.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
BENCH = Path(__file__).resolve().parents[2] / "dsx-plan" / "bench" / "long_llama.py"
LAYERS = 2


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("long_llama", BENCH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_llama"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["long_llama"]


def room(bench):
    return int(bench.Machine.of("H100-SXM").memory_bytes * bench.RESERVE)


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_3_7_million_tokens_and_a_quarter_more_fit_on_eight_devices(bench, chunked):
    row = bench.ALST[1].longer() if chunked else bench.ALST[1]
    found = bench.planned(row, sizes={**bench.LLAMA_8B, "num_hidden_layers": LAYERS})
    assert found.peak_bytes <= room(bench)
    one = row.length // row.devices * bench.LLAMA_8B["hidden_size"] * 2  # the input of a layer, in bf16
    inputs = found.peak["host"] - 12 * found.parameters // row.devices  # beside masters, both moments in fp32
    assert LAYERS * one <= inputs
    assert found.layout["sequence"] == 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_row_fits(bench):
    for row in bench.ROWS:
        assert bench.planned(row).peak_bytes <= room(bench), row
