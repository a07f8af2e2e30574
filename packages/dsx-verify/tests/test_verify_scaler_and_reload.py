"""The loss scale follows its rule, a checkpoint brings everything back, and Megatron's attributes are read."""

import sys
from pathlib import Path

import pytest
import torch
from dsx_verify import AuditError, Expected, MegatronSystem, TorchSystem, audit

sys.path.insert(0, str(Path(__file__).parent))
from verify_systems import Net, pairs


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def scaled(fault=""):
    """A step with a GradScaler whose scale grows after two good updates."""
    model = Net()
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(batches):
        optimizer.zero_grad()
        loss = model(*batches[0])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(*([scaler.get_scale()] if fault == "never grows" else []))
        return float(loss.detach())

    return step, model, {"optimizer": optimizer, "scaler": scaler}


def test_a_loss_scale_that_follows_its_rule_is_compared():
    step, model, more = scaled()
    receipt = audit(step, model, expected=Expected(Net, adamw), batches=pairs, steps=4, **more)
    assert receipt.compared["loss scale"] == 8 and more["scaler"].get_scale() == 1024.0


def test_a_loss_scale_that_never_grows_is_named():
    step, model, more = scaled("never grows")
    receipt = audit(step, model, expected=Expected(Net, adamw), batches=pairs, steps=3, raise_error=False, **more)
    assert receipt.fault is not None and receipt.fault.kind == "loss scale", receipt


def checkpointed(lost):
    model = Net(norm=True)
    optimizer = adamw(model.parameters())

    def step(batches):
        optimizer.zero_grad()
        model(*batches[0]).backward()
        optimizer.step()

    def save(folder):
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/both")

    def load(folder):
        weights, states = torch.load(f"{folder}/both")
        if lost == "buffers":
            weights = {name: value for name, value in weights.items() if "running" not in name}
        model.load_state_dict(weights, strict=False)
        if lost == "rate":
            states["param_groups"][0]["lr"] *= 0.5
        if lost != "states":
            optimizer.load_state_dict(states)

    expected = Expected(lambda: Net(norm=True), adamw)
    return audit(
        step, model, expected=expected, batches=pairs, optimizer=optimizer, save=save, load=load, raise_error=False
    )


@pytest.mark.parametrize(
    "lost, name", [("", ""), ("buffers", "buffer norm"), ("states", "state "), ("rate", "learning rate")]
)
def test_what_a_checkpoint_does_not_bring_back_is_named(lost, name):
    receipt = checkpointed(lost)
    if not lost:
        assert receipt.ok and receipt.compared["checkpoint"] > 20, receipt
        return
    assert receipt.fault.kind == "checkpoint" and receipt.fault.name.startswith(name), receipt


class MegatronOptimizer:
    """Attributes and results of Megatron's mixed-precision optimizer, over a loss scale."""

    def __init__(self, model, clip, fault):
        self.model, self.clip, self.fault = model, clip, fault
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.main_param = torch.nn.Parameter(parameter.detach().clone())
        self.inner = adamw([p.main_param for p in model.parameters()])
        self.param_groups = self.inner.param_groups

    def get_loss_scale(self):
        return torch.tensor([8.0])

    def step(self):
        for parameter in self.model.parameters():
            scale = 1.0 if self.fault == "not unscaled" else 8.0
            parameter.main_param.grad = parameter.main_grad / scale
        grads = [p.main_param for p in self.model.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(grads, self.clip)
        self.inner.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.main_param)
        return True, norm, 0


@pytest.mark.parametrize("fault", ["", "not unscaled"])
def test_megatrons_attributes_are_read(fault):
    model = Net()
    inside = torch.nn.Module()
    inside.module = model
    optimizer = MegatronOptimizer(model, 1e4, fault)

    def step(batches):
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        for batch in batches:
            model.zero_grad()
            (model(*batch) * 8.0 / len(batches)).backward()
            for parameter in model.parameters():
                parameter.main_grad += parameter.grad
        optimizer.step()

    expected = Expected(Net, lambda p: torch.optim.SGD(p, lr=0.1) if fault else adamw(p), accumulation=2, max_norm=1e4)
    if fault:
        optimizer.inner = torch.optim.SGD([p.main_param for p in model.parameters()], lr=0.1)
        optimizer.param_groups = optimizer.inner.param_groups
    receipt = audit(
        step, model, expected=expected, batches=pairs, system=MegatronSystem([inside], optimizer), raise_error=False
    )
    assert receipt.ok == (not fault), receipt
    if fault:
        assert receipt.fault.kind != "values", receipt


def test_a_distributed_optimizer_and_several_chunks_are_refused():
    model = Net()
    with pytest.raises(AuditError, match="2 chunks"):
        MegatronSystem([model, model], None)
    model.inner.weight.main_param = torch.zeros(3)
    with pytest.raises(AuditError, match="without the distributed optimizer"):
        MegatronSystem(model, None)


def test_a_closure_computes_gradients_inside_step():
    model = Net()
    optimizer = adamw(model.parameters())

    def step(batches):
        def closure():
            optimizer.zero_grad()
            loss = model(*batches[0])
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    system = TorchSystem(model, optimizer)
    receipt = audit(step, model, expected=Expected(Net, adamw), batches=pairs, system=system)
    assert receipt.ok and receipt.compared["gradient"] == 18
