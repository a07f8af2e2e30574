"""A GAN, a pipeline and experts, written like DeepSpeed's public examples, train on two ranks as in plain PyTorch."""

from __future__ import annotations

import argparse

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks

dsx_compat.activate()
STEPS, WORLD = 6, 2


def close(got, expected):
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-8)
    return True


# - A GAN: two engines, two backward calls before one step ------------------------------------------------------------


def gan_nets():
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    discriminator = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1))
    return generator, discriminator


def gan_batch(step, rank):
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=made), torch.randn(4, 4, generator=made)


def gan_adam(parameters):
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.5, 0.999))


def gan_loss(scores, label):
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def plain_gan():
    generator, discriminator = gan_nets()
    of_generator, of_discriminator = gan_adam(generator.parameters()), gan_adam(discriminator.parameters())
    curve = []
    for step in range(STEPS):
        real, noise = (torch.cat(part) for part in zip(*(gan_batch(step, rank) for rank in range(WORLD))))
        fake = generator(noise)
        first, second = gan_loss(discriminator(real), 1.0), gan_loss(discriminator(fake.detach()), 0.0)
        (first + second).backward()
        torch.nn.utils.clip_grad_norm_(discriminator.parameters(), 1.0)
        of_discriminator.step()
        of_discriminator.zero_grad()
        third = gan_loss(discriminator(fake), 1.0)
        third.backward()
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        curve.append((first + second + third).item())
    return curve


def gan(rank, world, stage, lose_gradient):
    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    generator, discriminator = (
        deepspeed.initialize(
            args=args, model=net, model_parameters=net.parameters(), optimizer=gan_adam(net.parameters()), config=config
        )[0]
        for net in gan_nets()
    )
    losses = []
    for step in range(STEPS):
        real, noise = gan_batch(step, rank)
        fake = generator(noise)
        first = gan_loss(discriminator(real), 1.0)
        discriminator.backward(first)
        if lose_gradient:  # a fault that the comparison must find: the gradient of the first loss is lost
            discriminator.zero_grad()
        second = gan_loss(discriminator(fake.detach()), 0.0)
        discriminator.backward(second)
        discriminator.step()
        third = gan_loss(discriminator(fake), 1.0)
        generator.backward(third)
        generator.step()
        discriminator.zero_grad()
        losses.append((first + second + third).detach())
    curve = torch.stack(losses)
    deepspeed.comm.all_reduce(curve)
    return (curve / world).tolist()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gan_with_two_engines_trains_as_plain_pytorch(stage):
    for curve in run_ranks(gan, WORLD, stage, False):
        close(curve, plain_gan())


def test_the_comparison_finds_a_lost_gradient():
    curve = run_ranks(gan, WORLD, 1, True)[0]
    with pytest.raises(AssertionError):
        close(curve, plain_gan())


# - A pipeline, fed by the engine's own loader ------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=made)
        return x, x.sum().sin().view(1)


def pipe_layers():
    torch.manual_seed(0)
    made = [torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)]
    return made


def pipeline(rank, world):
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import RepeatingLoader

    net = PipelineModule(
        layers=pipe_layers(), loss_fn=torch.nn.functional.mse_loss, num_stages=2, partition_method="uniform",
        activation_checkpoint_interval=0,
    )  # fmt: skip
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}},
    }
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
    )
    assert isinstance(engine, (deepspeed.PipelineEngine, deepspeed.DeepSpeedEngine))
    loader = RepeatingLoader(torch.utils.data.DataLoader(Samples(), batch_size=2))
    batches = iter(loader)
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def plain_pipeline():
    net = torch.nn.Sequential(*pipe_layers())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    rows, curve = Samples(), []
    for step in range(STEPS):
        x, y = (torch.stack(part) for part in zip(*(rows[i] for i in range(8 * step, 8 * step + 8))))
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def test_a_pipeline_trains_as_plain_pytorch():
    for curve in run_ranks(pipeline, 2):
        close(curve, plain_pipeline())


# - A mixture of experts with expert parallelism ----------------------------------------------------------------------


class Mixture(torch.nn.Module):
    def __init__(self, ep_size):
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 8)
        self.moe = MoE(
            hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=ep_size, k=1,
            capacity_factor=4.0, min_capacity=8,
        )  # fmt: skip
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        hidden, auxiliary, _ = self.moe(self.first(x))
        return torch.nn.functional.mse_loss(self.last(hidden), y) + 0.01 * auxiliary


def experts(rank, world, ep_size):
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    net = Mixture(ep_size)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [p for p in net.parameters() if p.requires_grad], "name": "parameters"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
    curve = []
    for step in range(STEPS):
        made = torch.Generator().manual_seed(step)  # both ranks get the batch of the run on one rank
        x = torch.randn(8, 6, generator=made)
        loss = engine(x, x.sum(1, keepdim=True).sin())
        engine.backward(loss)
        engine.step()
        curve.append(loss.item())
    return curve


def test_experts_on_two_ranks_train_as_experts_on_one():
    alone = run_ranks(experts, 1, 1)[0]
    for curve in run_ranks(experts, 2, 2):
        close(curve, alone)
    assert len(set(alone)) == STEPS
