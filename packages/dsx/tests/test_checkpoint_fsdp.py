"""Checkpoints of a real FSDP2 program come in with their optimizer, and what is exported goes out to one.

The other side is torch alone: `fully_shard`, `torch.optim.AdamW`, `torch.distributed.checkpoint`, two ranks on gloo.
"""

import pytest
import torch
from dsx_checkpoint.command import main as checkpoint_command
from dsx_testkit import run_ranks

RATE = 0.02


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(step, rank, world):
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    return x[rank * 4 // world : (rank + 1) * 4 // world]


def fsdp(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (world,))
    for child in (net[0], net[2], net):
        fully_shard(child, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.1)


def train_fsdp(net, optimizer, rank, world, first, steps):
    losses = []
    for step in range(first, first + steps):
        loss = net(batch(step, rank, world)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / world)
    return losses


class App:
    """What torch's tutorial calls the application's state."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def state_dict(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self.net, self.optimizer)
        return {"model": weights, "optim": states}

    def load_state_dict(self, state):
        raise NotImplementedError


def save_fsdp(rank, world, folder, layout):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    net, optimizer = fsdp(world)
    train_fsdp(net, optimizer, rank, world, 0, 3)
    if layout == "app":
        state = {"app": App(net, optimizer)}
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
        weights, states = get_state_dict(net, optimizer, options=options)
        state = {"model": weights, "optim": states}
    checkpoint.save(state, checkpoint_id=folder)
    return train_fsdp(net, optimizer, rank, world, 3, 3)


def build(world, stage=0):
    import dsx

    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    return dsx.initialize(model=model(), config=config)[0]


def train(engine, rank, world, first, steps):
    losses = []
    for step in range(first, first + steps):
        loss = engine(batch(step, rank, world)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def go_on(rank, world, folder, stage):
    import dsx_comm

    engine = build(world, stage)
    engine.load_checkpoint(folder)
    losses = torch.tensor(train(engine, rank, world, 3, 3))
    dsx_comm.all_reduce(losses) if world > 1 else None
    return engine.global_steps, engine.get_lr(), (losses / world).tolist()


@pytest.mark.parametrize("layout", ["nested", "flat", "app"])
def test_a_program_with_fsdp2_goes_on_as_an_engine(tmp_path, layout, capsys):
    expected, _ = run_ranks(save_fsdp, 2, str(tmp_path / "fsdp"), layout)
    assert checkpoint_command(["import", str(tmp_path / "fsdp"), str(tmp_path / "dsx")]) == 0
    assert "4 parameters, with optimizer states" in capsys.readouterr().out
    steps, rates, losses = go_on(0, 1, str(tmp_path / "dsx"), 0)
    assert steps == 6 and rates == [RATE] and losses == pytest.approx(expected, rel=1e-5)
    if layout == "nested":
        assert run_ranks(go_on, 2, str(tmp_path / "dsx"), 3)[0][2] == pytest.approx(expected, rel=1e-5)


def load_fsdp(rank, world, folder):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net, optimizer = fsdp(world)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    weights, states = get_state_dict(net, optimizer)
    state = {"model": weights, "optim": states}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train_fsdp(net, optimizer, rank, world, 3, 3), optimizer.param_groups[0]["lr"]


def test_an_engine_goes_on_as_a_program_with_fsdp2(tmp_path):
    engine = build(1)
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"] = RATE, 0.1
    train(engine, 0, 1, 0, 3)
    engine.save_checkpoint(tmp_path / "dsx")
    expected = train(engine, 0, 1, 3, 3)
    words = ["export", str(tmp_path / "dsx"), str(tmp_path / "dcp"), "--to", "dcp", "--optimizer-states"]
    assert checkpoint_command(words) == 0
    for losses, rate in run_ranks(load_fsdp, 2, str(tmp_path / "dcp")):
        assert rate == RATE and losses == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_exported_is_named(tmp_path, capsys):
    import dsx

    net = model()
    groups = [{"params": [net[0].weight], "lr": 0.1}, {"params": [net[2].weight], "lr": 0.2}]
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {}}, "steps_per_print": None}
    engine = dsx.initialize(model=net, model_parameters=groups, config=config)[0]
    train(engine, 0, 1, 0, 1)
    engine.save_checkpoint(tmp_path / "dsx")
    words = ["export", str(tmp_path / "dsx"), str(tmp_path / "out")]
    assert checkpoint_command([*words, "--to", "dcp", "--optimizer-states"]) == 1
    assert "2 parameter groups of different numbers" in capsys.readouterr().err
    assert checkpoint_command([*words, "--optimizer-states"]) == 1
    assert "expected 'dcp'" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert checkpoint_command([*words, "--to", "dcp"]) == 0
