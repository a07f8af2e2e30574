"""The engine around a model of torch's tensor parallelism: numbers of one process, and checkpoints at other layouts."""

import tempfile

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, STEPS = 8, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def loss_of(model, index, step):
    """Targets are random: with a constant one the gradients below the norm would be rounding alone."""
    generator = torch.Generator().manual_seed(100 * step + index)
    x, y = torch.randn(2, 4, WIDTH, generator=generator)
    return F.mse_loss(model(x), y)


def train(engine, index, steps):
    losses = []
    for step in steps:
        loss = loss_of(engine, index, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def one_process(ranks, steps):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    losses = []
    for step in range(steps):
        each = [loss_of(model, index, step) for index in range(ranks)]
        (sum(each) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


def parallel_engine(stage, shape):
    import dsx
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return dsx.initialize(model=model, config=config(stage), mesh_param=mesh["dp"])[0], mesh["dp"].get_local_rank()


def saved(rank, world, stage, folder):
    engine, index = parallel_engine(stage, (2, 2))
    losses = train(engine, index, range(STEPS))
    engine.save_checkpoint(folder, tag="here")
    losses += train(engine, index, range(STEPS, STEPS + 2))
    engine.destroy()
    return index, losses


def loaded(rank, world, stage, folder, sliced):
    import dsx

    if sliced:
        engine, index = parallel_engine(stage, (1, 2))
    else:
        engine, index = dsx.initialize(model=Net(), config=config(stage))[0], rank
    with torch.no_grad():
        engine.load_checkpoint(folder, tag="here")
    values = {n: p.clone() for n, p in dsx.zero.full_state_dict(engine.optimizer, rank0_only=False)["model"].items()}
    engine.destroy()
    return index, values


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_a_tensor_parallel_engine_load_without_it_and_with_other_ranks(stage):
    folder = tempfile.mkdtemp()
    expected = one_process(2, STEPS + 2)
    for index, losses in run_ranks(saved, 4, stage, folder, timeout=180):
        torch.testing.assert_close(losses, [each[index] for each in expected], rtol=1e-6, atol=0)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, fused=True)
    for step in range(STEPS):
        (sum(loss_of(plain, index, step) for index in range(2)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for other, sliced in ((3, False), (1, True)):
        for _, values in run_ranks(loaded, 2, other, folder, sliced, timeout=180):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5, msg=f"{name} at stage {other}")
