"""Loops that train by themselves are audited: their samples are seen, their updates are cut where they are.

The Trainers here have the calls of the real ones, in their order; `bench/other_systems.py` runs the real ones.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from dsx_verify import AuditError, Expected, LightningLoop, ModelLoop, TitanLoop, TrainerLoop, audit_loop
from dsx_verify.loops import loop_for

sys.path.insert(0, str(Path(__file__).parent))
from verify_systems import Net, pairs

CLIP = 0.1


def samples(count):
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [pairs(50 + number * size + rank) for number in range(count)]


def wrapped(model):
    return torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Accelerator:
    scaler = None


class HfTrainer:
    """Calls of transformers' Trainer: `compute_loss` for each micro-batch, also in evaluation; the loss of one that
    knows all tokens of an update is a share of the mean over the ranks.
    """

    accelerator = Accelerator()

    def __init__(self, accumulation, updates, fault=""):
        self.model = Net(drop=0.2)
        self.accumulation, self.updates, self.fault = accumulation, updates, fault

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(inputs["x"], inputs["y"]) / self.accumulation
        return (loss, None) if return_outputs else loss

    def evaluate(self):
        self.model_wrapped.eval()
        with torch.no_grad():
            self.compute_loss(self.model_wrapped, dict(zip("xy", pairs(0))))

    def train(self):
        self.model_wrapped, self.optimizer = wrapped(self.model), sgd(self.model.parameters())
        for micro, (x, y) in enumerate(samples(self.accumulation * self.updates)):
            self.model_wrapped.train()
            inputs = {"x": x, "y": y}
            loss = self.compute_loss(self.model_wrapped, inputs, num_items_in_batch=12)
            (loss * self.accumulation if self.fault == "not divided" else loss).backward()
            x.zero_()  # a loop may use its memory again
            each = 1 if self.fault == "steps at once" else self.accumulation
            if (micro + 1) % each == 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                if self.fault != "no step":
                    self.optimizer.step()
                self.model.zero_grad()
                self.evaluate()


class LitModule(torch.nn.Module):
    """Calls of a LightningModule."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.trainer = None

    def training_step(self, batch, index):
        return self.net(*batch)

    def on_train_batch_start(self, batch, index):
        return None

    def on_train_batch_end(self, outputs, batch, index):
        assert outputs["loss"].grad_fn is None

    def configure_optimizers(self):
        return sgd(self.parameters())


class LitTrainer:
    """Calls of Lightning's Trainer: the last forward and backward of an update run in the closure of `step`."""

    precision_plugin = None

    def __init__(self, accumulation, updates):
        self.accumulation, self.updates = accumulation, updates

    def fit(self, module):
        module.trainer, self.strategy = self, type("Strategy", (), {})()
        self.strategy.model = wrapped(module) if dist.is_initialized() else module
        self.optimizers = [module.configure_optimizers()]
        for index, batch in enumerate(samples(self.accumulation * self.updates)):
            assert module.on_train_batch_start(batch, index) is None
            told = {}

            def closure(batch=batch, index=index, told=told):
                loss = self.redirected(module, batch, index) / self.accumulation
                loss.backward()
                told["loss"] = loss.detach()
                return loss

            if (index + 1) % self.accumulation:
                closure()
            else:
                self.optimizers[0].step(closure)
                self.optimizers[0].zero_grad()
            module.on_train_batch_end(told, batch, index)

    def redirected(self, module, *args):
        if self.strategy.model is module:
            return module.training_step(*args)
        module.forward, forward = module.training_step, module.forward
        try:
            return self.strategy.model(*args)
        finally:
            module.forward = forward


class TitanTrainer:
    """Calls of torchtitan's Trainer: losses are sums over the tokens of all ranks."""

    def __init__(self, accumulation, updates):
        model = Net()
        self.model, self.model_parts, self.optimizers = wrapped(model), [model], [sgd(model.parameters())]
        self.accumulation, self.updates = accumulation, updates

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        loss = self.model(input_dict["input"], labels) * (4 / global_valid_tokens)
        size = dist.get_world_size() if dist.is_initialized() else 1
        (loss * size).backward()  # DDP averages
        return loss

    def train(self):
        size = dist.get_world_size() if dist.is_initialized() else 1
        data = samples(self.accumulation * self.updates)
        for first in range(0, len(data), self.accumulation):
            self.optimizers[0].zero_grad()
            for x, y in data[first : first + self.accumulation]:
                self.forward_backward_step(
                    input_dict={"input": x}, labels=y, global_valid_tokens=4 * self.accumulation * size
                )
            torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), CLIP)
            self.optimizers[0].step()


def hf(accumulation, updates, fault=""):
    trainer = HfTrainer(accumulation, updates, fault)
    expected = Expected(
        lambda: Net(drop=0.2), sgd, accumulation=accumulation, max_norm=CLIP, loss=lambda m, b: m(b["x"], b["y"])
    )
    return trainer.train, TrainerLoop(trainer), expected


def lightning(accumulation, updates):
    trainer, module = LitTrainer(accumulation, updates), LitModule()
    expected = Expected(LitModule, sgd, accumulation=accumulation, loss=lambda m, b: m.training_step(b, 0))
    return lambda: trainer.fit(module), LightningLoop(module), expected


def titan(accumulation, updates):
    trainer = TitanTrainer(accumulation, updates)
    loss = lambda m, b: m(b[0]["input"], b[1])  # noqa: E731
    return trainer.train, TitanLoop(trainer), Expected(Net, sgd, accumulation=accumulation, max_norm=CLIP, loss=loss)


def by_hand(accumulation, updates):
    trainer = TitanTrainer(accumulation, updates)
    expected = Expected(Net, sgd, accumulation=accumulation, max_norm=CLIP, loss=lambda m, b: m(*b[0], **b[1]))
    return trainer.train, ModelLoop(trainer.model, trainer.optimizers[0]), expected


LOOPS = {"transformers": hf, "lightning": lightning, "torchtitan": titan, "model": by_hand}


def receipts(rank, world, accumulation):
    found = {}
    for name, make in LOOPS.items():
        run, owner, expected = make(accumulation, 3)
        receipt = audit_loop(run, owner, expected=expected, steps=2, raise_error=False)
        found[name] = (receipt.ok, receipt.steps, dict(receipt.compared), str(receipt))
    return found


@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (1, 3), (2, 3)])
def test_a_right_loop_gets_a_clean_receipt(ranks, accumulation):
    by_rank = run_ranks(receipts, ranks, accumulation)
    assert by_rank[0] == by_rank[-1]
    for name, (ok, steps, compared, text) in by_rank[0].items():
        assert ok and steps == 2, (name, text)
        assert compared["accumulation"] == 2 and compared["parameter"] >= 8
        assert name == "model" or compared["loss"] == 2 * accumulation, compared
        assert name == "lightning" or compared["random stream"] == 2 * accumulation, compared


@pytest.mark.parametrize(
    "fault, kind",
    [("not divided", "scaled by accumulation"), ("steps at once", "accumulation"), ("no step", "accumulation")],
)
def test_what_a_loop_does_wrong_is_named_and_it_runs_to_its_end(fault, kind):
    run, owner, expected = hf(3, 4, fault)
    ended = []
    receipt = audit_loop(lambda: ended.append(run()), owner, expected=expected, steps=3, raise_error=False)
    assert receipt.fault is not None and receipt.fault.kind == kind, receipt
    assert receipt.fault.step == 1 and ended == [None]


def test_a_loop_that_ends_too_early_and_wrong_owners_are_refused():
    run, owner, expected = hf(2, 2)
    with pytest.raises(AuditError, match="ended after 2 whole updates"):
        audit_loop(run, owner, expected=expected, steps=3)
    with pytest.raises(AuditError, match="steps: got 0"):
        audit_loop(run, owner, expected=expected, steps=0)
    lightning_trainer = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})()
    with pytest.raises(AuditError, match="expected the LightningModule"):
        loop_for(lightning_trainer)
    with pytest.raises(AuditError, match="no adapter for int"):
        loop_for(3)
    trainer = TitanTrainer(1, 1)
    trainer.model_parts.append(Net())
    with pytest.raises(AuditError, match="2 model parts"):
        TitanLoop(trainer).system()


def test_loops_are_known_by_the_classes_of_their_owners():
    known = {"transformers.trainer": TrainerLoop, "torchtitan.trainer": TitanLoop}
    for module, loop in known.items():
        kind = type("Trainer", (), {"__module__": module})
        assert type(loop_for(type("Mine", (kind,), {})())) is loop
    kind = type("LightningModule", (torch.nn.Module,), {"__module__": "lightning.pytorch.core.module"})
    assert type(loop_for(type("Mine", (kind,), {})())) is LightningLoop
    model = Net()
    assert type(loop_for(model, sgd(model.parameters()))) is ModelLoop
