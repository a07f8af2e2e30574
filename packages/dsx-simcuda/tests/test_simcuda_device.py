"""The device of one process: which mistakes are reported and with which lines, which programs are right, what waits.

All cases of device_cases.py run in one process on the simulated device, once lazily and once with slow side streams.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("device_cases.py")
RACES = {  # case: the kinds of its reports
    "read_before_write": {"read before write"},
    "write_after_read": {"write after read"},
    "write_after_write": {"write after write"},
    "event_recorded_too_early": {"read before write", "write after write"},
    "overlapping_columns_on_two_streams": {"write after write"},
    "columns_then_all_with_one_wait": {"read before write"},
    "wrong_devices_stream": {"wrong device's stream"},
    "freed_in_use": {"freed while in use"},
    "made_aside_freed_early": {"freed while in use"},
    "early_read_of_pinned": {"host access too early"},
    "early_read_by_numpy": {"host access too early"},
    "early_read_of_a_small_one": {"host access too early"},
    "early_write_of_pinned": {"host access too early"},
    "registered_memory_too_early": {"host access too early"},
    "native_read_too_early": {"host access too early"},
    "native_write_too_early": {"host access too early"},
    "native_system_call_too_early": {"host access too early"},
    "two_streams_use_a_pinned_block": {"read before write", "write after read"},
    "names_in_reports": {"read before write"},
    "race_in_backward": {"write after write"},
    "sparse_values_on_two_streams": {"read before write"},
}
RESULTS = {
    "waits_right": 65536.0,
    "host_wait_orders_too": 3.0,
    "polled_event_orders_too": 3.0,
    "interleaved_columns_on_two_streams": 64 * 4 * 3.0,
    "right_devices_stream": 65536.0,
    "copy_between_devices": [3 * 65536.0, "cuda:1"],
    "freed_in_use_recorded": True,
    "out_of_memory": ["CUDA out of memory (simulated)", True],
    "fresh_memory_is_nan": True,
    "calls_that_look_alike": [],
    "counters": [True, True, True, [], True, True],
    "storage_resize": [0, 2.0],
    "read_behind_an_event": [65536.0, 1.0],
    "reading_a_source_is_right": [65536.0, 65536.0],
    "neighbour_of_a_copy_is_free": [4.0, 1.0, 5.0],
    "pinned_freed_and_made_again": 190.0,
    "pinned_read_and_written_on_one_stream": [7.0, 7.0],
    "registered_memory_waited_for": [65536.0, True],
    "native_accesses_in_time": [131072.0, "memory: got a tensor on cuda:0, expected one in host memory"],
    "pageable_source_may_change": 65536.0,
    "mixed_devices": True,
    "sync_debug_mode": "called a synchronizing CUDA operation: item",
    "random_state": [True, True, 3],
    "wrong_generator": True,
    "save_and_load": ["cuda:0", [0, 1, 2]],
    "deepcopies": ["cuda:0", "cuda:0"],
    "indexing": [[0, 2], [1, 1, 1, 1], 2, [0, 1, 2, 3]],
    "conjugated_and_negated_views": [True] * 9,
    "layers": [True] * 6,
    "recurrent_layers": [[True] * 10, "torch.bfloat16", "torch.float16"],
    "optimizers": [True] * 5,
    "mixed_precision": ["torch.bfloat16", 65536.0, True],
    "events_and_streams": [True, -1, 0, True, True],
    "profiler_ranges": [True, 0],
    "inductor_is_refused": True,
    "sparse_tensors": [True, [6.0, 6.0], [[1.0, 3.0], [1.0, 1.0], [11.0, 1.0]], ["cuda:0", False]],
    "what_sparse_tensors_lack_is_named": [True] * 4,
    "sparse_gradients_of_an_embedding": True,
}


@pytest.fixture(scope="module", params=["lazy", "slow-side"])
def outcome(request, run_program, tmp_path_factory):
    file = tmp_path_factory.mktemp("device") / "outcome.json"
    options = ("--mode", request.param, "--devices", "2", "--memory-mib", "256")
    done = run_program(str(CASES), str(file), options=options)
    assert file.exists(), done.stderr[-3000:]
    assert done.returncode == 86, "reports change the exit status"
    return json.loads(file.read_text())


def line_of(case: str, which: str) -> int:
    (number,) = [n for n, text in enumerate(CASES.read_text().splitlines(), 1) if f"# LINE {case} {which}" in text]
    return number


def lines(case: str) -> list[str]:
    return re.findall(rf"# LINE {case} (\w+)", CASES.read_text())


@pytest.mark.parametrize("case", RACES)
def test_a_mistake_is_reported(outcome, case):
    found = outcome[case]["reports"]
    assert {report["kind"] for report in found} == RACES[case], outcome[case]
    assert all(report["fix"] for report in found)


@pytest.mark.parametrize("case", [case for case in RACES if lines(case)])
def test_the_two_lines_are_named(outcome, case):
    report = outcome[case]["reports"][0]
    for which in lines(case):
        stack = report["earlier" if which == "earlier" else "later"]["stack"]
        if which == "forward":
            assert report["earlier"]["backward"]
            stack = report["earlier"]["stack"]
        (first, *_) = [line for file, line, _ in stack if file == str(CASES)]
        assert first == line_of(case, which), report


@pytest.mark.parametrize("case", RESULTS)
def test_a_right_program_gives_its_result_and_no_report(outcome, case):
    assert outcome[case]["result"] == RESULTS[case]
    assert outcome[case]["reports"] == [], outcome[case]["texts"]


def test_a_host_that_is_too_early_reads_nan(outcome, request):
    if "lazy" in request.node.name:  # in the other mode the copy has run by luck, and is reported all the same
        assert outcome["early_read_of_pinned"]["result"] is None


def test_waits_of_the_host_are_counted(outcome):
    assert outcome["waits_are_counted"]["syncs"] == 5  # item, cpu, nonzero, synchronize, tolist
    assert outcome["no_wait"]["syncs"] == 0
    assert outcome["read_behind_an_event"]["syncs"] == 1


def test_waits_are_counted_for_the_thread_that_waited(outcome):
    waited = outcome["waits_of_threads"]["threads"]
    assert waited == {"reader": 2, "MainThread": 1, "pt_autograd_0": 1}


def test_names_of_tensors_and_streams_are_shown(outcome):
    (report,) = outcome["names_in_reports"]["reports"]
    assert report["tensor"].startswith("'model.weight' (float32, 300x300) in a block of 360000 bytes on cuda:0")
    assert report["earlier"]["stream"] == "stream 'updates' (cuda:0)"
    assert report["later"]["stream"] == "the default stream of cuda:0"
    assert "wait_stream" in report["fix"]


def test_a_freed_block_names_record_stream(outcome):
    assert "record_stream" in outcome["freed_in_use"]["reports"][0]["fix"]


def test_the_map_of_accesses_is_pruned(outcome):
    most = outcome["intervals_are_pruned"]["result"]
    assert 1500 < most < 6000, "12000 single elements were written, with waits of the host between"


def test_what_is_not_simulated_is_named(outcome):
    said = outcome["refusals"]["result"]
    names = ("CUDAGraph", "graph", "make_graphed_callables", "MemPool", "events between processes", "cudaMalloc")
    assert len(said) == len(names) + 1
    for name, text in zip((*names, "aten::_efficient_attention_forward"), said):
        assert name in text and "simul" in text
