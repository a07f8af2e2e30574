"""Nothing that the engine writes about a run can end it: folders that cannot be made, on one rank and on two."""

import logging
import os
from pathlib import Path

import dsx
import pytest
import torch
from dsx_testkit import run_ranks, tiny


def settings(folder):
    """Everything that writes files, below a file."""
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "wall_clock_breakdown": True,
        "jsonl": section,
        "csv_monitor": section,
        "tensorboard": section,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": f"{folder}/flops/profile.txt"},
        "timeline": {"enabled": True, "start_step": 1, "steps": 2},
        "straggler": {"enabled": True, "every": 2},
    }


def train(config, steps=5):
    net = tiny.TinyGPT(tied=True, seed=2)
    engine = dsx.initialize(model=net, config=config)[0]
    losses = []
    for index in range(steps):
        tokens, targets = net.example(2, seed=index + 100 * engine.global_rank)
        loss = torch.nn.functional.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def plain():
    config = settings("")
    return {key: config[key] for key in ("train_micro_batch_size_per_gpu", "optimizer")}


def test_a_folder_that_cannot_be_made_costs_warnings(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        losses = train(settings(tmp_path / "file" / "run"))
    assert losses == train(plain())
    said = [record.getMessage() for record in caplog.records if record.name == "dsx_monitor"]
    for part in (
        "jsonl cannot start", "csv_monitor cannot start", "tensorboard cannot start", "meta.json cannot be written",
        "the flops profile cannot be written", "the trace cannot be written",
    ):  # fmt: skip
        assert any(part in text for text in said), (part, said)
    assert (tmp_path / "file").read_text() == "in the way"


def two_ranks(rank, world, folder):
    return train(settings(folder))


def test_on_two_ranks_too_and_the_ranks_stay_together(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    found = run_ranks(two_ranks, 2, str(tmp_path / "file" / "run"), timeout=120)
    assert [len(losses) for losses in found] == [5, 5]


def one_rank_cannot(rank, world, folder):
    # The trace of rank 1 alone has no place: rank 0 waits for it at the barrier and goes on.
    (Path(folder) / "job" / "trace").mkdir(parents=True, exist_ok=True)
    if rank == 1:
        (Path(folder) / "job" / "trace" / f".rank00001.json.{os.getpid()}").mkdir()
    return len(train(settings(folder)))


def test_a_rank_that_cannot_write_its_trace_meets_the_others(tmp_path):
    pytest.importorskip("tensorboard")
    assert run_ranks(one_rank_cannot, 2, str(tmp_path), timeout=120) == [5, 5]
    assert (tmp_path / "job" / "trace.json").exists()


@pytest.mark.parametrize("name", ["../x", "/abs"])
def test_a_job_name_that_leads_away_is_an_error_of_the_configuration(name, tmp_path):
    config = settings(tmp_path)
    config["csv_monitor"] = {**config["csv_monitor"], "job_name": name}
    with pytest.raises(dsx.DsxConfigError, match=r"csv_monitor\.job_name"):
        dsx.initialize(model=torch.nn.Linear(2, 2), config=config)
