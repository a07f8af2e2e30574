"""What modules keep beside parameters and buffers (`get_extra_state`) comes back, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from dsx_checkpoint import CheckpointArgumentError, CheckpointError, load_training, open_checkpoint, save_training
from dsx_checkpoint.whole import WholeTensors
from dsx_testkit import run_ranks
from torch import nn


class Scaled(nn.Linear):
    """A layer with a history of scales, as those for FP8 have."""

    def __init__(self, values) -> None:
        super().__init__(3, 3)
        self.values = values

    def get_extra_state(self):
        return self.values

    def set_extra_state(self, state) -> None:
        self.values = state


VALUES = {"amax": torch.tensor([1.5, 2.5]), "step": 7, "names": ["a", None], "ratio": 0.25}


def net(values=None, inner=None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(values), nn.Sequential(nn.ReLU(), Scaled(inner)))


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in expected.items()
    )


def write(rank: int, world: int, folder) -> None:
    # Ranks may differ, in length too: rank 0's are saved.
    save_training(folder, "one", net(VALUES if rank == 0 else {"step": 7}, torch.arange(4 + rank)), state={"step": 1})


def read(rank: int, world: int, folder) -> None:
    model = net({"step": 0}, torch.zeros(1))
    loaded = load_training(folder, model)
    assert equal(model[0].values, VALUES) and torch.equal(model[1][1].values, torch.arange(4))
    assert loaded.state == {"step": 1} and loaded.missing == loaded.unexpected == ()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 3)])
def test_it_comes_back(tmp_path, before, after):
    run_ranks(write, before, tmp_path)
    run_ranks(read, after, tmp_path)


def test_readers_of_weights_do_not_see_it(tmp_path):
    save_training(tmp_path, "one", net(VALUES, 3))
    assert sorted(WholeTensors.of(tmp_path / "one")) == ["0.bias", "0.weight", "1.1.bias", "1.1.weight"]


def test_missing_and_unexpected_ones_are_named_as_parameters_are(tmp_path):
    save_training(tmp_path, "with", net(VALUES, 3))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Scaled(5)))
    with pytest.raises(CheckpointError, match=r"0\._extra_state"):
        load_training(tmp_path, plain)
    assert load_training(tmp_path, plain, strict=False).unexpected == ("0._extra_state",) and plain[1][1].values == 3
    save_training(tmp_path, "without", nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3))))
    model = net({"step": 5}, 5)
    with pytest.raises(CheckpointError, match=r"0\._extra_state"):
        load_training(tmp_path, model)
    assert model[0].values == {"step": 5}
    assert load_training(tmp_path, model, strict=False).missing == ("0._extra_state", "1.1._extra_state")
    assert model[0].values == {"step": 5}


def test_a_value_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointArgumentError, match=r"_extra_state.*object"):
        save_training(tmp_path, "one", net(object()))
    assert list(tmp_path.iterdir()) == []


def elsewhere(rank: int, world: int, folder) -> None:
    """Two stages of a pipeline, each with a part of the model."""
    part = nn.ModuleDict({"first": nn.Linear(2, 2)} if rank == 0 else {"second": Scaled(1)})
    with pytest.raises(CheckpointArgumentError, match=r"second\._extra_state.*rank 0 does not have"):
        save_training(folder, "one", part)


def test_one_that_rank_0_does_not_have_is_refused(tmp_path):
    run_ranks(elsewhere, 2, tmp_path)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
