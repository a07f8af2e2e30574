"""`DSXStrategy` beside Lightning's own DDP strategy, on two ranks: curves, resumes, mistakes."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

lightning = pytest.importorskip("lightning", reason="needs lightning: python3 tools/dev.py clients")
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint  # noqa: E402

BATCHES, ROWS = 7, 3


class Regression(lightning.LightningModule):
    """A small regression with a schedule; keeps the losses of every batch."""

    def __init__(self, late=False, optimizer=torch.optim.AdamW):
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.late, self.made_by, self.curve, self.seen = late, optimizer, [], []
        if not late:
            self.net = network()

    def configure_model(self):
        if self.late and not hasattr(self, "net"):
            self.net = network()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.curve.append(loss.detach().float())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.seen.append(loss.detach().float())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, number):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = self.made_by(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def loader(first=0, last=BATCHES):
    """Batches of this rank: row i of a global batch is rank i's."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES, 12, 6, generator=made)
    y = x.sum(-1, keepdim=True).sin()
    each = 12 // world
    rows = [(x[n, rank * each : (rank + 1) * each], y[n, rank * each : (rank + 1) * each]) for n in range(first, last)]
    return torch.utils.data.DataLoader(rows, batch_size=None)


def trainer(strategy, folder, **options):
    settings = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 2, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "use_distributed_sampler": False, "default_root_dir": str(folder), "plugins": [TorchElasticEnvironment()],
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, **{**settings, **options})


def dsx_strategy(*args, **kwargs):
    from dsx.integrations.lightning import DSXStrategy

    return DSXStrategy(*args, **kwargs)


def as_launched(rank, world):
    """What a launcher tells its processes."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")


def curves(rank, world, cases, folder):
    """Of each case (stages, Trainer's options, the module's): curves with DDP, and with dsx at each stage."""
    as_launched(rank, world)
    found = []
    for stages, options, late in cases:
        runs = [("ddp", False), *((dsx_strategy(stage, config=SMALL), late) for stage in stages)]
        found.append([curve(strategy, late, options, folder) for strategy, late in runs])
    return found


def curve(strategy, late, options, folder):
    module, run = Regression(late=late), trainer(strategy, folder, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        run.fit(module, loader(), loader(0, 2))
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    return torch.stack(module.curve), torch.stack(module.seen), (run.global_step, rates)


SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
EXACT = {"rtol": 2e-6, "atol": 1e-7}


def check(found, **tolerance):
    for expected, *others in found:
        assert (expected[0][0] - expected[0][-1]).abs() > 0.01, "nothing was learned"
        for stage, got in enumerate(others):
            for one, other in zip(got[:2], expected[:2], strict=True):
                torch.testing.assert_close(one, other, **(tolerance or EXACT), msg=lambda text: f"{stage}: {text}")
            assert got[2] == expected[2]


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_ddp(world, tmp_path):
    for found in run_ranks(curves, world, [((0, 1, 2, 3), {}, False)], tmp_path):
        check(found)


def test_what_trainer_decides_is_done(tmp_path):
    """Accumulation with a rest at the end of an epoch, clipping, both, and layers that are made divided."""
    options = [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    ]
    cases = [*(((1, 3), one, False) for one in options), ((3,), {}, True)]
    for found in run_ranks(curves, 2, cases, tmp_path):
        check(found)
        accumulated, clipped, *_ = found
        assert not torch.equal(accumulated[0][0], clipped[0][0])


def test_autocast_is_that_of_ddp(tmp_path):
    for found in run_ranks(curves, 2, [((1, 3), {"precision": "bf16-mixed"}, False)], tmp_path):
        check(found, rtol=2e-2, atol=1e-3)  # reduced in another order, and rounded to 8 bits in the next forward


def in_sixteen_bits(rank, world, folder):
    as_launched(rank, world)
    found = []
    for precision in ("32-true", "bf16-true", "16-true"):
        module = Regression()
        strategy = dsx_strategy(3, config=SMALL)
        trainer(strategy, folder, precision=precision, max_epochs=6).fit(module, loader())
        dtypes = {p.dtype for p in module.parameters()}
        masters = {part.master.dtype for part in strategy.engine.optimizer.slices() if part.master is not None}
        found.append((torch.stack(module.curve), dtypes, masters))
    return found


def test_sixteen_bits_have_fp32_masters(tmp_path):
    for found in run_ranks(in_sixteen_bits, 2, tmp_path):
        (exact, *_), *others = found
        for (curve, dtypes, masters), dtype in zip(others, (torch.bfloat16, torch.float16), strict=True):
            assert dtypes == {dtype} and masters == {torch.float32}
            assert curve[-BATCHES:].mean().item() == pytest.approx(exact[-BATCHES:].mean().item(), rel=0.05)


def saved(rank, world, folder):
    """Trained for two epochs with a checkpoint behind each, by stage; "ddp" is Lightning's own."""
    as_launched(rank, world)
    found = {}
    for kind in ("ddp", 3, 1):
        module = Regression()
        keep = ModelCheckpoint(dirpath=folder / str(kind), filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        strategy = "ddp" if kind == "ddp" else dsx_strategy(kind, config=SMALL)
        run = trainer(strategy, folder, enable_checkpointing=True, callbacks=[keep])
        run.fit(module, loader())
        found[kind] = torch.stack(module.curve)
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return found, run.strategy.engine.module_state_dict()


def resumed(rank, world, cases, folder):
    """The second epoch, from checkpoints of other runs; and the weights of `weights.ckpt`."""
    as_launched(rank, world)
    found = []
    for stage, kind in cases:
        module = Regression()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)  # a resume that loaded nothing would show
        run = trainer(dsx_strategy(stage, config=SMALL), folder)
        run.fit(module, loader(), ckpt_path=folder / str(kind) / "epoch=0.ckpt")
        assert run.global_step == 2 * BATCHES
        found.append(torch.stack(module.curve))
    whole = Regression.load_from_checkpoint(folder / "weights.ckpt", weights_only=False)
    return found, whole.state_dict()


def test_a_resume_goes_on_at_another_stage_and_number_of_ranks(tmp_path):
    """Also from a checkpoint of DDP; and `weights_only` is Lightning's own file."""
    trained = run_ranks(saved, 2, tmp_path)
    expected = torch.stack([found["ddp"] for found, _ in trained]).mean(0)[BATCHES:]
    for world, cases in ((2, [(3, 3), (0, 3), (2, 1), (3, "ddp"), (1, "ddp")]), (1, [(2, 3), (3, 1)])):
        ranks = run_ranks(resumed, world, cases, tmp_path)
        for number, case in enumerate(cases):
            got = torch.stack([found[number] for found, _ in ranks]).mean(0)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{case}: {text}")
        for _, weights in ranks:
            assert weights.keys() == trained[0][1].keys()
            assert all(torch.equal(value, trained[0][1][name]) for name, value in weights.items())


def used_after_training(rank, world, folder):
    as_launched(rank, world)
    return [used(stage, folder) for stage in (0, 2, 3)]


def used(stage, folder):
    """Validate, test, predict, fit again with one strategy; then a new trainer on the trained module."""
    module = Regression()
    strategy = dsx_strategy(stage, config=SMALL)
    run = trainer(strategy, folder)
    run.fit(module, loader())
    whole = strategy.engine.module_state_dict()
    plain = network()
    plain.load_state_dict({name.removeprefix("net."): value for name, value in whole.items()})
    with torch.no_grad():
        wanted = [plain(x) for x, _ in loader()]
    for call in (run.validate, run.test):
        (values,) = call(module, loader(), verbose=False)
        assert set(values) == {"val_loss"}
    for got, want in zip(run.predict(module, loader()), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    fresh = trainer(dsx_strategy(stage, config=SMALL), folder)
    for got, want in zip(fresh.predict(module, loader()), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    again = trainer(dsx_strategy(stage, config=SMALL), folder, max_epochs=1)
    again.fit(module, loader())
    first = (wanted[0] - next(iter(loader()))[1]).square().mean().item()
    return len(module.curve), module.curve[2 * BATCHES].item(), first


def test_a_trained_model_is_evaluated_and_trained_again(tmp_path):
    for found in run_ranks(used_after_training, 2, tmp_path):
        for count, first, expected in found:
            assert count == 3 * BATCHES and first == pytest.approx(expected, rel=1e-5)


class ByHand(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, number):
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.curve.append(loss.detach())
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if number % 2:
            optimizer.step()
            self.lr_schedulers().step()
            optimizer.zero_grad()


def by_hand(rank, world, folder):
    as_launched(rank, world)
    found = []
    for strategy in ("ddp", *(dsx_strategy(stage, config=SMALL) for stage in (0, 1, 2, 3))):
        module = ByHand()
        run = trainer(strategy, folder)
        run.fit(module, loader(0, 6))
        found.append((torch.stack(module.curve), run.global_step))
    return found


def test_manual_optimization(tmp_path):
    for (curve, steps), *others in run_ranks(by_hand, 2, tmp_path):
        for got, got_steps in others:
            torch.testing.assert_close(got, curve, **EXACT)
            assert got_steps == steps == 6


class Two(ByHand):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)]


class NoOptimizer(Regression):
    def configure_optimizers(self):
        return None


class Clips(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


class Leaves(Regression):
    def training_step(self, batch, number):
        return None


class ClipsByHand(ByHand):
    def training_step(self, batch, number):
        self.manual_backward((self(batch[0]) - batch[1]).square().mean())
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        self.optimizers().step()


def refused(rank, world, names, folder):
    as_launched(rank, world)
    found = {}
    for name in names:
        kind, options, strategy, _ = MISTAKES[name]
        try:
            trainer(dsx_strategy(**strategy), folder, **options).fit(kind(), loader())
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


MISTAKES = {
    "two-optimizers": (Two, {}, {}, "got 2 optimizers, expected one"),
    "no-optimizer": (NoOptimizer, {}, {}, "configure_optimizers: got none"),
    "clipping-by-hand": (Clips, {}, {}, "configure_gradient_clipping"),
    "no-loss": (Leaves, {}, {}, "by returning None"),  # Lightning's own error, on several ranks
    "clips-to-another-norm": (ClipsByHand, {}, {}, "got 0.3, but this engine's step clips to 0"),
    "clipping-by-value": (
        Regression, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, {}, "got 'value', expected 'norm'"
    ),
    "double-precision": (Regression, {"precision": "64-true"}, {}, "got '64-true'"),
    "stage-four": (Regression, {}, {"stage": 4}, "got 4, expected 0, 1, 2 or 3"),
    "two-stages": (Regression, {}, {"stage": 2, "config": {"zero_optimization": {"stage": 3}}}, "give one"),
    "batch": (Regression, {}, {"config": {"train_batch_size": 8}}, "which Lightning decides"),
    "precision-in-config": (Regression, {}, {"config": {"bf16": {"enabled": True}}}, 'Trainer(precision="bf16-true")'),
    "misspelt": (Regression, {}, {"config": {"zero_optimisation": {"stage": 3}}}, "zero_optimization"),
    "argument-of-ddp": (Regression, {}, {"find_unused_parameters": True}, "got find_unused_parameters"),
    "clipping-twice": (
        Regression, {"gradient_clip_val": 1.0}, {"config": {"gradient_clipping": 2.0}}, "expected one of them"
    ),
}  # fmt: skip


def test_mistakes_are_named(tmp_path):
    (alone,) = run_ranks(refused, 1, ["no-loss"], tmp_path)
    assert "training_step: got None" in alone["no-loss"]
    for found in run_ranks(refused, 2, list(MISTAKES), tmp_path):
        assert {name: found[name] for name, (*_, text) in MISTAKES.items() if text not in found[name]} == {}


def stopped(rank, world, folder):
    """Callbacks as users have them."""
    as_launched(rank, world)
    module = Regression()
    keep = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1, save_last=True)
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    norms = []

    class Norms(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            norms.append(trainer.strategy.engine.get_global_grad_norm())

    run = trainer(
        "dsx", folder, enable_checkpointing=True, callbacks=[keep, stop, Norms()], max_epochs=5
    )  # fmt: skip
    run.fit(module, loader(), loader())
    assert run.current_epoch == 2 and len(norms) == 2 * BATCHES and all(norm > 0 for norm in norms)
    run.test(module, loader(), ckpt_path="best", verbose=False)
    return sorted(path.name for path in folder.iterdir())


def test_callbacks_and_the_registered_name(tmp_path):
    import dsx.integrations.lightning  # noqa: F401  registers "dsx"

    for names in run_ranks(stopped, 2, tmp_path):
        assert len(names) == 2 and "last.ckpt" in names
