"""Programs without an engine: plain modules, DDP and FSDP2 save, and each loads what the others saved."""

from __future__ import annotations

from pathlib import Path

import dsx_checkpoint
import pytest
import torch
from dsx_checkpoint import CheckpointArgumentError, CheckpointError, load_training, save_training
from dsx_testkit import run_ranks
from torch import nn

ROWS = 12


class Net(nn.Module):
    """Odd sizes, a buffer, a tied weight and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7)
        self.inner = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens))) * self.scale.mean()


def make(kind: str):
    net = Net()
    net.inner[1].eval()  # the same on any number of ranks
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.inner)
        model = fully_shard(net)
    else:
        model = net
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:], "lr": 0.02}]
    return model, torch.optim.AdamW(groups, weight_decay=0.1)


def train(model, optimizer, first: int, steps: int, rank: int, world: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(11, (ROWS,), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank * ROWS // world : (rank + 1) * ROWS // world]
        loss = nn.functional.cross_entropy(model(mine), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def before(rank: int, world: int, kind: str, folder: str) -> list[float]:
    model, optimizer = make(kind)
    train(model, optimizer, 0, 3, rank, world)
    optimizer.param_groups[1]["lr"] = 0.01
    save_training(folder, "three", model, optimizer, state={"step": 3, "note": torch.arange(3)})
    return train(model, optimizer, 3, 3, rank, world)


def after(rank: int, world: int, kind: str, folder: str) -> list[float]:
    model, optimizer = make(kind)
    loaded = load_training(folder, model, optimizer)
    assert loaded is not None and loaded.state["step"] == 3 and loaded.state["note"].tolist() == [0, 1, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    return train(model, optimizer, loaded.state["step"], 3, rank, world)


def run(kind: str, what, folder: Path) -> list[float]:
    return run_ranks(what, 1 if kind == "plain" else 2, kind, str(folder))[0]


@pytest.mark.parametrize("first", ["plain", "ddp", "fsdp2"])
def test_each_goes_on_from_what_the_others_saved(tmp_path: Path, first: str) -> None:
    wanted = run(first, before, tmp_path)
    for second in ("plain", "ddp", "fsdp2"):
        assert run(second, after, tmp_path) == pytest.approx(wanted, rel=2e-5), second


def test_the_files_are_ordinary_safetensors_with_whole_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run("fsdp2", before, tmp_path)
    found = load_file(tmp_path / "three" / "model.safetensors")
    assert found["embed.weight"].shape == (11, 7)
    assert {"inner.0.weight", "inner.1.running_mean", "scale"} <= set(found)


def test_weights_alone_and_a_model_in_evaluation(tmp_path: Path) -> None:
    model, optimizer = make("plain")
    train(model, optimizer, 0, 2, 0, 1)
    save_training(tmp_path, "weights", model)
    other, _ = make("plain")
    loaded = load_training(tmp_path, other)
    assert loaded is not None and loaded.state == {}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


def test_compiled_models_have_plain_names(tmp_path: Path) -> None:
    model, optimizer = make("plain")
    save_training(tmp_path, "t", torch.compile(model, backend="eager"), optimizer)
    assert "inner.0.weight" in dsx_checkpoint.open_checkpoint(tmp_path).index.tensors["model"]


def test_no_checkpoint_is_none_and_an_unfit_one_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make("plain")
    (tmp_path / "empty").mkdir()
    assert load_training(tmp_path / "empty", model, optimizer) is None
    save_training(tmp_path, "t", model, optimizer)
    wider = nn.Sequential(nn.Linear(7, 6))
    kept = [p.detach().clone() for p in wider.parameters()]
    with pytest.raises(CheckpointError):
        load_training(tmp_path, wider, torch.optim.AdamW(wider.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(kept, wider.parameters()))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, _ = make("plain")
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointArgumentError, match="not of the model"):
        save_training(tmp_path / "a", "t", model, stranger)
    with pytest.raises(CheckpointArgumentError, match=r"expected a torch\.nn\.Module"):
        save_training(tmp_path / "a", "t", model.state_dict())
    assert not (tmp_path / "a").exists()


def partial_and_two_dimensional(rank: int, world: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(35.0).reshape(5, 7)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))  # columns: a box, not a range of rows
    save_training(folder, "columns", model)
    again = nn.Module()
    again.weight = nn.Parameter(torch.zeros(5, 7))
    load_training(folder, again)
    assert torch.equal(again.weight, whole)
    waiting = nn.Module()
    waiting.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    with pytest.raises(CheckpointArgumentError, match="Partial"):
        save_training(folder, "partial", waiting)


def test_columns_are_boxes_and_unfinished_sums_are_refused(tmp_path: Path) -> None:
    run_ranks(partial_and_two_dimensional, 2, str(tmp_path))
