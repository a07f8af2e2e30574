"""A run saved at one (ZeRO stage, number of ranks) goes on at any other, optimizer included, as if nothing had
happened.

The oracle is the same engine, uninterrupted, on one rank at stage 0. The global batch is the same for all numbers of
ranks, so losses and parameters agree to rounding (fp32: the order of sums over ranks differs).
"""

import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks

STEPS, GLOBAL_BATCH, WIDTH = 3, 12, 7


def build(stage, world, optimizer="AdamW", precision="fp32"):
    import dsx

    torch.manual_seed(1)

    class Tied(torch.nn.Module):
        """Odd sizes, a tied weight, a frozen block and a buffer."""

        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(WIDTH, WIDTH)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.outer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.outer.weight = self.inner.weight
            self.blocks[1].requires_grad_(False)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            x = self.inner(x)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.outer(x)

    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "optimizer": {"type": optimizer, "params": {"lr": 0.05}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 5, "warmup_type": "linear"},
        },
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        precision: {"enabled": True},
    }
    if precision == "fp32":
        del config["fp32"]
    model = Tied()
    return dsx.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )[0]


def train(engine, rank, world, first, last):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, GLOBAL_BATCH, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)
        mine = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss = torch.nn.functional.mse_loss(engine(x[mine]), y[mine])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    total = torch.stack(losses)
    if world > 1:
        import dsx_comm

        dsx_comm.all_reduce(total)
    return total / world


def whole(engine):
    return {n: p.float().clone() for n, p in engine.module_state_dict().items()}


def save_run(rank, world, folder, stage, optimizer, precision):
    engine = build(stage, world, optimizer, precision)
    train(engine, rank, world, 0, STEPS)
    engine.save_checkpoint(folder, client_state={"note": [1, "two"]})
    return whole(engine)


def resume_run(rank, world, folder, stage, optimizer, precision):
    engine = build(stage, world, optimizer, precision)
    path, client = engine.load_checkpoint(folder)
    loaded = whole(engine)
    losses = train(engine, rank, world, STEPS, 2 * STEPS)
    return str(path), client, loaded, losses, whole(engine), engine.global_steps, engine.get_lr()


def straight_run(rank, world, optimizer, precision):
    engine = build(0, world, optimizer, precision)
    losses = train(engine, rank, world, 0, 2 * STEPS)
    return losses[STEPS:], whole(engine), engine.get_lr()


@pytest.fixture(scope="module")
def straight():
    """The uninterrupted run with AdamW."""
    return run_ranks(straight_run, 1, "AdamW", "fp32")[0]


@pytest.mark.parametrize(("before", "after"), [((0, 1), (3, 2)), ((2, 2), (0, 1)), ((3, 3), (1, 2)), ((1, 2), (2, 3))])
def test_saved_at_one_layout_resumes_at_another(tmp_path, before, after, straight):
    expected_losses, expected, expected_lr = straight
    saved, *_ = run_ranks(save_run, before[1], str(tmp_path), before[0], "AdamW", "fp32")
    for path, client, loaded, losses, final, steps, lr in run_ranks(
        resume_run, after[1], str(tmp_path), after[0], "AdamW", "fp32"
    ):
        assert path.endswith("global_step3") and client == {"note": [1, "two"]} and steps == 2 * STEPS
        assert lr == expected_lr
        assert all(torch.equal(loaded[n], saved[n]) for n in saved), "loading changed bits"
        torch.testing.assert_close(losses, expected_losses, rtol=2e-5, atol=1e-6)
        assert_close_named(final, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["Lion", "Adagrad"])
def test_other_optimizers_resume_too(tmp_path, optimizer):
    (expected_losses, expected, _), *_ = run_ranks(straight_run, 1, optimizer, "fp32")
    run_ranks(save_run, 2, str(tmp_path), 2, optimizer, "fp32")
    (_, _, _, losses, final, *_), *_ = run_ranks(resume_run, 1, str(tmp_path), 3, optimizer, "fp32")
    torch.testing.assert_close(losses, expected_losses, rtol=2e-5, atol=1e-6)
    assert_close_named(final, expected, rtol=1e-4, atol=2e-6)


def test_masters_of_low_precision_models_are_kept_exactly(tmp_path):
    run_ranks(save_run, 2, str(tmp_path), 2, "AdamW", "bf16")
    from dsx.checkpoint import open_checkpoint

    reader = open_checkpoint(tmp_path)
    name = "blocks.0.weight"
    master = reader.master(name, 0, WIDTH * WIDTH)
    param = reader.param(name, 0, WIDTH * WIDTH)
    assert master.dtype == torch.float32 and param.dtype == torch.bfloat16
    assert torch.equal(master.bfloat16(), param) and not torch.equal(master, param.float())
    (_, _, loaded, low, *_), *_ = run_ranks(resume_run, 3, str(tmp_path), 3, "AdamW", "bf16")
    assert torch.equal(loaded[name].flatten(), param.float())
    (_, _, _, same, *_), *_ = run_ranks(resume_run, 2, str(tmp_path), 2, "AdamW", "bf16")
    torch.testing.assert_close(low, same, rtol=2e-2, atol=1e-2)
