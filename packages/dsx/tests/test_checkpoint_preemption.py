"""A signal on any rank: all ranks save after the same update and end with the exit code that means "resume me"."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from dsx_testkit import run_ranks


def build(world, stage=2, seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.arange(6000.0).view(-1, 1))
    model = torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1))
    config = {
        "train_batch_size": 2 * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **changes,
    }
    return dsx.initialize(model=model, training_data=data, config=config)[0]


def train(engine, steps):
    """Losses of updates; batches come from the loader of the engine."""
    losses = []
    for (x,) in engine.training_dataloader:
        loss = engine(x / 6000).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break
    return losses


def preempted(call):
    """What the preemption said."""
    from dsx.engine.preemption import Preempted

    try:
        call()
    except Preempted as error:
        return error.code, error.path, error.reason
    return None


def signal_one_rank(rank, world, folder, which, stage):
    engine = build(world, stage)
    engine.save_on_preemption(folder, client_state=lambda: {"at": engine.global_steps})
    if rank == which:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    found = preempted(lambda: train(engine, 3000))
    steps = engine.global_steps
    engine.destroy()
    return found, steps


def resume(rank, world, folder, steps):
    engine = build(world, seed=3)
    _, client = engine.load_checkpoint(folder)
    got = train(engine, 3)
    engine.destroy()
    whole = build(world)
    expected = train(whole, steps + 3)[-3:]
    return client, got, expected


@pytest.mark.parametrize("which, stage", [(1, 2), (0, 3)])
def test_all_ranks_save_after_the_same_update_and_go_on_exactly(tmp_path, which, stage):
    outcomes = run_ranks(signal_one_rank, 2, str(tmp_path), which, stage)
    ((code, path, reason), steps), (other, other_steps) = outcomes
    assert code == 75 and steps == other_steps and other == (code, path, reason)
    assert reason == f"SIGUSR1 on rank {which}" and path.endswith(f"global_step{steps}")
    if stage == 2:
        for client, got, expected in run_ranks(resume, 2, str(tmp_path), steps):
            assert client == {"at": steps} and got == expected


def signal_in_evaluation(rank, world, folder):
    engine = build(world)
    engine.save_on_preemption(folder)
    train(engine, 2)
    deadline = time.monotonic() + 60

    def evaluate():
        # Ranks evaluate different numbers of batches, and one comes to training again.
        with torch.no_grad():
            while time.monotonic() < deadline:
                engine(torch.ones(2, 1))
                if rank == 0:
                    time.sleep(0.05)

    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    found = preempted(evaluate)
    engine.destroy()
    return found, engine.global_steps


def test_an_evaluation_is_left_in_the_middle(tmp_path):
    (found, steps), (other, others) = run_ranks(signal_in_evaluation, 2, str(tmp_path))
    assert found == other and found[0] == 75 and steps == others == 2 and found[2] == "SIGTERM on rank 1"
    assert found[1].endswith("global_step2")


def test_the_handlers_from_before_come_back(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    engine = build(1, stage=0)
    engine.save_on_preemption(tmp_path, signals=["SIGUSR1"])
    assert signal.getsignal(signal.SIGUSR1) is not before
    engine.destroy()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_signals_that_do_not_exist_are_refused(tmp_path):
    engine = build(1, stage=0)
    with pytest.raises(ValueError, match="got 'SIGNALL', expected names of signals"):
        engine.save_on_preemption(tmp_path, signals=["SIGNALL"])


SCRIPT = """
    import os, sys, torch, dsx
    torch.manual_seed(0)
    engine = dsx.initialize(model=torch.nn.Linear(2, 1), config={
        "train_batch_size": int(os.environ.get("WORLD_SIZE", 1)),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None})[0]
    engine.save_on_preemption(sys.argv[-1])
    engine.load_checkpoint(sys.argv[-1])
    began = engine.global_steps
    while engine.global_steps < began + 100000:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        if engine.global_steps == began + 5 and engine.global_rank == 0:
            print("running", flush=True)
        if began and engine.global_steps == began + 20:
            print("resumed from", began > 0, flush=True)
            engine.destroy()
            sys.exit(0)
"""


def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def start(tmp_path, *options):
    command = [sys.executable, "-m", "dsx.launcher", "--num_procs", "2", *options, script(tmp_path)]
    return subprocess.Popen(
        [*command, str(tmp_path / "ckpt")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_launcher_passes_the_signal_and_the_exit_code_on(tmp_path):
    job = start(tmp_path)
    for line in job.stdout:
        if line.startswith("running"):
            break
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 75, said
    assert "saved" in said and "Traceback" not in said


@pytest.mark.slow
def test_the_launcher_starts_preempted_ranks_again(tmp_path):
    job = start(tmp_path, "--restarts", "1")
    for line in job.stdout:
        if line.startswith("running"):
            break
    ranks = subprocess.run(["pgrep", "-f", f"_worker.py {tmp_path}"], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[0]), signal.SIGUSR1)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert "resumed from True" in said
