"""The backend nccl on two ranks: results, what is reported, FSDP2 and DDP without a report, a rank that dies."""

from __future__ import annotations

import json
import socket
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
    "point_to_point": [[[1.0] * 3, 0.0, 1.0, 10.0], [[0.0] * 3, 7.0, 1.0, 10.0]],
    "communicators_in_one_order": [[2.0, 4.0]] * 2,
    "fsdp2": FSDP2,
    "ddp": FSDP2,
}


@pytest.fixture(scope="module")
def ranks(run_program, torchrun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run_program(*torchrun(CASES, folder), options=("--mode", "slow-side", "--one-collective"))
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
