"""The backend nccl on two ranks: results, what is reported, FSDP2 and DDP without a report, a rank that dies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("rank_cases.py")
FSDP2 = [[3.3317, 2.3452, 1.8161], [8.4918, 5.2714, 3.6256]]  # the losses of the same model on the CPU
RESULTS = {  # case: what ranks 0 and 1 find
    "reductions": [
        [3.0, 1.5, 2.0, 2.0, 3.0, 1.0, [0.0, 2.0], [2.0, 2.0]],
        [3.0, 1.5, 2.0, 2.0, 3.0, 3.0, [4.0, 6.0], [4.0, 4.0]],
    ],
    "premultiplied_sums": [[1.5, 11.0]] * 2,
    "gathers": [
        [[0.0, 0.0, 1.0, 1.0], [[0.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 1.0], [0.0, 10.0], 1.0, 5.0, [3.0, 4.0], 1],
        [[0.0, 0.0, 1.0, 1.0], [[0.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 1.0], [1.0, 11.0], 1.0, 6.0, [], 1],
    ],
    "read_with_pythons_lock_held": [0, 0],
    "timeout_of_a_group": [True, True],
    "point_to_point": [[[1.0] * 3, 0.0, 1.0, 10.0], [[0.0] * 3, 7.0, 1.0, 10.0]],
    "communicators_in_one_order": [[2.0, 4.0]] * 2,
    "fsdp2": FSDP2,
    "ddp": FSDP2,
}


@pytest.fixture(scope="module")
def record_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(run_program, torchrun, record_folder):
    folder = record_folder
    options, recording = ("--mode", "slow-side", "--one-collective"), {"TORCH_FR_BUFFER_SIZE": "2000"}
    done = run_program(*torchrun(CASES, folder), options=options, env=recording)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    assert "not compiled" not in done.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", RESULTS)
def test_results_are_right_and_nothing_is_reported(ranks, case):
    for rank, wanted in zip(ranks, RESULTS[case]):
        assert rank[case]["result"] == wanted
        assert rank[case]["reports"] == [], rank[case]["text"]


def test_communicators_split(ranks):
    assert [rank["split_communicators"]["result"][:3] for rank in ranks] == [[1.0, 3.0, 1], [2.0, 3.0, 1]]
    assert [rank["split_communicators"]["reports"] for rank in ranks] == [[], []]


@pytest.mark.parametrize("case", ["a_forgotten_wait", "wait_on_another_stream"])
def test_a_collective_that_is_not_waited_for_is_reported(ranks, case):
    for rank in ranks:
        (report,) = rank[case]["reports"]
        assert report["kind"] == "read before write"
        assert report["earlier"]["name"].startswith("all_reduce of 16384 Float")
        assert report["earlier"]["stream"].startswith("stream 'nccl")
        assert "call wait() of the work" in report["fix"]
        files = [file for file, _, function in report["earlier"]["stack"] if function == case]
        assert files == [str(CASES)]


def test_a_different_order_is_named_on_both_ranks(ranks):
    texts = [rank["different_order"]["reports"][0]["text"] for rank in ranks]
    assert texts[0].endswith("runs 'all_reduce of 10 Float by sum', while rank 1 runs 'all_reduce of 20 Float by sum'")
    assert texts[1].endswith("runs 'all_reduce of 20 Float by sum', while rank 0 runs 'all_reduce of 10 Float by sum'")
    for rank in ranks:
        assert rank["different_order"]["reports"][0]["kind"] == "collectives in different order"
        assert "different collectives" in rank["different_order"]["result"], "the error is raised by the next wait"


def test_the_flight_recorder_has_torchs_form_and_what_failed_has_not_completed(ranks):
    for rank, sizes in zip(ranks, ([[[10]], [[20]]], [[[20]], [[10]]])):
        record = rank["record"]
        first = record["entries"][0]
        assert first["profiling_name"] == "nccl:all_reduce" and first["state"] == "completed" and first["retired"]
        assert (first["input_sizes"], first["output_dtypes"]) == ([[10]], ["Float"])
        assert (first["collective_seq_id"], first["is_p2p"]) == (1, False)
        assert next(f["name"] for f in first["frames"] if f["filename"] == str(CASES)) == "reductions"
        assert first["time_created_ns"] <= first["time_discovered_started_ns"] <= first["time_discovered_completed_ns"]
        last = record["entries"][-2:]
        assert [entry["input_sizes"] for entry in last] == sizes
        assert all(entry["state"] != "completed" for entry in last) and record["active"] == 2
        group = str(first["pg_id"])
        status = record["pg_status"][group]
        assert status["last_enqueued_collective"] == last[-1]["collective_seq_id"]
        assert status["last_completed_collective"] == last[0]["collective_seq_id"] - 1
        assert record["pg_config"][first["process_group"][0]]["ranks"] == "[0, 1]"
        assert record["without"] == ["comm_lib_version", "pg_config", "pg_status", "version"]


def test_gloos_recorder_shows_the_programs_own_calls_and_not_those_that_carry_the_bytes(ranks):
    for rank in ranks:
        carrying = rank["record"]["carrying"]
        assert [entry["profiling_name"] for entry in carrying["entries"]] == ["gloo:all_gather"] * 2, "one object"
        assert set(carrying["pg_status"]) == {str(carrying["entries"][0]["pg_id"])}
        assert rank["record"]["carrying_status"] == carrying["pg_status"]


def test_torchs_own_analyzer_names_the_different_order(ranks, record_folder):
    analyze = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(record_folder)]
    done = subprocess.run([*analyze, "-p", "nccl_trace_rank_"], capture_output=True, text=True, timeout=120)
    last = ranks[0]["record"]["entries"][-2]["collective_seq_id"]
    said = done.stdout + done.stderr
    assert f"Collective sequence number: {last} has errors" in said, said
    assert f"Collective sequence number: {last - 1} has errors" not in said
    assert "SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[10]]' does not match found input sizes: '[[20]]'" in said


def test_a_gathered_tensor_is_recorded_with_what_came_in_and_what_went_out(ranks):
    names = {entry["profiling_name"]: entry for entry in ranks[0]["record"]["entries"]}
    gather, scatter = names["nccl:_all_gather_base"], names["nccl:_reduce_scatter_base"]
    for entry, growth in ((gather, 2), (scatter, 0.5)):
        (before,), (after,) = entry["input_sizes"][0], entry["output_sizes"][0]
        assert after == before * growth
    messages = [entry for entry in ranks[0]["record"]["entries"] if entry["is_p2p"]]
    assert messages and all(entry["collective_seq_id"] == 0 and entry["p2p_seq_id"] > 0 for entry in messages)


UNORDERED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
other = dist.new_group([0, 1])
a, b = torch.ones(10, device="cuda"), torch.ones(10, device="cuda")
first = dist.all_reduce(a, async_op=True)
second = dist.all_reduce(b, group=other, async_op=True)
first.wait(), second.wait()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("in_order", [False, True])
def test_two_communicators_that_may_stop_each_other_are_named(run_program, torchrun, tmp_path, in_order):
    """At the launch, whether they then stop each other or not; and not where NCCL begins them in one order."""
    script = tmp_path / "unordered.py"
    script.write_text(UNORDERED)
    variables = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"} if in_order else {"DSX_SIMCUDA_HANG_S": "10"}
    done = run_program(*torchrun(script), options=("--one-collective",), env=variables)
    assert (done.returncode == 0) == in_order, done.stderr
    assert ("simcuda: collectives not ordered: all_reduce of 10 Float by sum" in done.stderr) != in_order
    if not in_order:
        assert all(part in done.stderr for part in ("unordered.py:6", "unordered.py:7", "one communicator for both"))


DYING = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("nccl")
values = torch.ones(10, device="cuda")
dist.all_reduce(values)
torch.cuda.synchronize()
if rank == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(values)
print(values.sum().item())
"""


def test_a_rank_that_dies_inside_a_collective_is_named(built, run_program, tmp_path):
    """Without torchrun, which would kill the other rank, too."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(run_program, str(script), env={**shared, "RANK": "1"})
        done = run_program(str(script), env={**shared, "RANK": "0"})
    assert other.result().returncode == -9
    assert done.returncode != 0 and done.stdout == ""
    assert "simcuda: rank lost: 'all_reduce of 10 Float by sum' on rank 0" in done.stderr
