import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from dsx_testkit import RankError, RankTimeout, assert_close_named, run_ranks, seed_all, stop_zygote, tiny

OFFSET = 40


@dataclass
class Answer:
    value: int


def helper(x):
    return Answer(x + OFFSET)


def sum_of_ranks(rank, world_size, extra):
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    return helper(int(t.item()) + extra.value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_by_rank_and_test_globals_travel(world_size):
    got = run_ranks(sum_of_ranks, world_size, Answer(2))
    assert got == [Answer(42 + sum(range(world_size)))] * world_size


def test_closures_and_lambdas_travel():
    factor = 3
    assert run_ranks(lambda rank, world_size: rank * factor, 2, backend=None) == [0, 3]


def surroundings(rank, world_size):
    return dist.is_initialized(), os.environ["RANK"], os.environ["KIT"], torch.get_num_threads(), os.getcwd()


def test_environment_directory_and_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("KIT", "yes")
    monkeypatch.chdir(tmp_path)
    want = [(False, str(r), "yes", 2, str(tmp_path)) for r in range(2)]
    assert run_ranks(surroundings, 2, backend=None, threads=2) == want


def one_raises(rank, world_size):
    if rank == 1:
        raise KeyError("the planted error")
    dist.barrier()


def test_a_failure_stops_the_others_and_comes_first():
    with pytest.raises(RankError, match="rank 1 of 3 failed first: KeyError: 'the planted error'") as caught:
        run_ranks(one_raises, 3)
    error = caught.value
    assert error.failures[0].rank == 1
    assert sorted(f.rank for f in error.failures) == [0, 1, 2]
    assert f'{__file__}", line' in error.failures[0].traceback and "in one_raises" in error.failures[0].traceback
    assert "zygote.py" not in error.failures[0].traceback
    assert "one_raises" in error.failures[1].traceback  # the stack of a stopped rank
    assert isinstance(error.__cause__, KeyError)


def all_raise(rank, world_size):
    print("words of rank", rank)
    raise ValueError(f"bad {rank}")


def test_all_tracebacks_and_output_are_kept():
    with pytest.raises(RankError) as caught:
        run_ranks(all_raise, 3)
    assert sorted(f.text for f in caught.value.failures) == ["bad 0", "bad 1", "bad 2"]
    assert "words of rank 2" in str(caught.value)


def hang(rank, world_size, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        subprocess.Popen(["sleep", "1000"]).pid
        time.sleep(1000)
    dist.barrier()


def test_timeout_shows_the_stacks_and_leaves_nothing(tmp_path):
    with pytest.raises(RankTimeout, match=r"not finished after 1\.5 s") as caught:
        run_ranks(hang, 2, tmp_path, timeout=1.5)
    by_rank = {f.rank: f for f in caught.value.failures}
    assert sorted(by_rank) == [0, 1]
    for failure in by_rank.values():
        assert "in hang" in failure.traceback or "barrier" in failure.traceback
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):  # neither running nor a zombie
            os.kill(pid, 0)


def killed(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.1)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match="SIGSEGV") as caught:
        run_ranks(killed, 2)
    assert caught.value.failures[0].rank == 0
    assert "in killed" in caught.value.failures[0].traceback


def skips(rank, world_size):
    pytest.skip("not on this machine")


def test_skip_in_a_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        run_ranks(skips, 2, backend=None)


def computes(rank, world_size):
    a = torch.ones(600, 600)  # large enough for a parallel region
    return (a @ a).sum().item(), torch.rand(1).item()


def test_ranks_fork_cleanly_after_ranks_with_threads():
    torch.set_num_threads(max(2, torch.get_num_threads()))
    assert (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item() == 600.0**3  # this process has run one
    for _ in range(3):
        got = run_ranks(computes, 2, threads=2, backend=None)
        assert got[0] == got[1] and got[0][0] == 600.0**3


def test_the_zygote_has_one_thread_and_is_reused():
    pids = run_ranks(lambda r, w: (os.getppid(), len(os.listdir(f"/proc/{os.getppid()}/task"))), 2, backend=None)
    again = run_ranks(lambda r, w: (os.getppid(), len(os.listdir(f"/proc/{os.getppid()}/task"))), 2)
    assert {n for _, n in pids + again} == {1}
    assert len({pid for pid, _ in pids + again}) == 1


def importing_late(rank, world_size):
    was_there = "dsx_testkit.deepspeed_layout" in sys.modules
    importlib.import_module("dsx_testkit.deepspeed_layout")
    return was_there


def test_what_a_rank_imports_is_loaded_once_for_all_later_ranks():
    stop_zygote()
    assert "dsx_testkit.deepspeed_layout" not in sys.modules, "this test needs a module that nothing here has loaded"
    assert run_ranks(importing_late, 2, backend=None) == [False, False]
    assert run_ranks(importing_late, 2, backend=None) == [True, True]
    assert run_ranks(lambda r, w: len(os.listdir(f"/proc/{os.getppid()}/task")), 1) == [1]


def test_a_stopped_zygote_is_replaced():
    (first,) = run_ranks(lambda r, w: os.getppid(), 1, backend=None)
    stop_zygote()
    (second,) = run_ranks(lambda r, w: os.getppid(), 1, backend=None)
    assert first != second


def test_the_zygote_and_its_ranks_die_with_the_test_process(tmp_path):
    script = (
        "import os, pathlib, time\nfrom dsx_testkit import run_ranks\n"
        "def f(rank, world_size, folder):\n"
        "    (folder / str(rank)).write_text(f'{os.getpid()} {os.getppid()} .')\n    time.sleep(1000)\n"
        f"run_ranks(f, 2, pathlib.Path({str(tmp_path)!r}), backend=None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    files = [tmp_path / "0", tmp_path / "1"]
    until = time.monotonic() + 180  # two cold imports of torch, perhaps on a busy machine
    while time.monotonic() < until and not all(f.exists() and f.read_text().endswith(".") for f in files):
        time.sleep(0.02)
    pids = {int(p) for f in files for p in f.read_text().split()[:2]}
    assert len(pids) == 3
    process.kill()
    process.wait()
    while pids and time.monotonic() < until:
        pids = {pid for pid in pids if _runs(pid)}
        time.sleep(0.02)
    assert not pids


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_assert_close_named_names_the_first_difference():
    a = {"x": torch.ones(3), "y": torch.zeros(2, 3), "z": torch.zeros(1)}
    b = {k: v.clone() for k, v in a.items()}
    assert_close_named(a, b)
    b["y"][1, 2], b["z"][0] = 0.5, 9.0
    with pytest.raises(AssertionError, match=r"'y' is the first .* worst at \(1, 2\): got 0, expected 0.5"):
        assert_close_named(a, b, atol=0.1)
    assert_close_named(a, b, atol=10.0)
    with pytest.raises(AssertionError, match="missing \\['q'\\], unexpected \\['z'\\]"):
        assert_close_named(a, {"x": a["x"], "y": a["y"], "q": a["z"]})
    with pytest.raises(AssertionError, match=r"'x': got .* torch\.float32, expected .* torch\.float64"):
        assert_close_named(a, {**a, "x": a["x"].double()})


MODELS = [
    tiny.MLP,
    tiny.TinyGPT,
    tiny.Tied,
    tiny.Reused,
    tiny.Frozen,
    lambda seed: tiny.Unused(1, seed=seed),
    tiny.OddSizes,
    tiny.TwoGroups,
    tiny.MixedDtypes,
    lambda seed: tiny.Checkpointed(reentrant=False, seed=seed),
    lambda seed: tiny.Checkpointed(reentrant=True, seed=seed),
]


@pytest.mark.parametrize("make", MODELS)
def test_models_are_deterministic_and_train(make):
    seed_all(1)
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    assert_close_named(one.state_dict(), two.state_dict())
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    if isinstance(one, tiny.TwoGroups):
        assert sum(len(g["params"]) for g in one.groups()) == len(list(one.parameters()))
    one.loss(*one.example()).backward()
    used = [n for n, p in one.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert used


def test_unused_has_its_single_process_oracle():
    parts = [tiny.Unused(r, rows=4) for r in range(3)]
    x, _ = parts[0].example(12)
    want = torch.cat([m(rows) for m, rows in zip(parts, x.split(4))])
    assert torch.allclose(tiny.Unused(None, rows=4)(x), want)
    assert not torch.allclose(parts[0](x), want)
