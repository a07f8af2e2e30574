"""Optimizers by name: which class, with which arithmetic, and why."""

import pytest
import torch
from dsx.errors import DsxConfigError
from dsx.optimizers import choose_optimizer, torch_optimizers


def one_step(choice, *, weight=2.0, grad=0.5):
    parameter = torch.nn.Parameter(torch.full((4,), weight))
    optimizer = choice.build([parameter])
    for _ in range(3):
        parameter.grad = torch.full((4,), grad)
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize(
    "name, params, reference",
    [
        ("Adam", {"weight_decay": 0.1, "lr": 0.1}, torch.optim.AdamW),
        ("adam", {"weight_decay": 0.1, "lr": 0.1, "adam_w_mode": False}, torch.optim.Adam),
        ("ADAMW", {"weight_decay": 0.1, "lr": 0.1, "adam_w_mode": False}, torch.optim.AdamW),
        ("Adam", {"weight_decay": 0.1, "lr": 0.1, "adam_w_mode": False, "torch_adam": True}, torch.optim.Adam),
        ("AdamW", {"lr": 0.1, "torch_adam": True, "betas": [0.8, 0.9]}, torch.optim.AdamW),
        ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}, torch.optim.AdamW),
        ("sgd", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad),
        ("rmsprop", {"lr": 0.1}, torch.optim.RMSprop),
        ("Adagrad", {"lr": 0.1, "amsgrad": False, "fp32_optimizer_states": True}, torch.optim.Adagrad),
    ],
)
def test_arithmetic_is_that_of_the_named_class(name, params, reference):
    ours = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")
    kept = {k: v for k, v in params.items() if k not in ours and (k, name) != ("amsgrad", "Adagrad")}
    expected, _ = one_step(type("Plain", (), {"build": staticmethod(lambda p: reference(p, **kept))}))
    got, _ = one_step(choose_optimizer(name, params))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    plain, _ = one_step(choose_optimizer(name, params, reference=True))
    torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_weight_decay_without_a_number_is_that_of_fused_adam_whoever_steps(name, monkeypatch):
    choices = [{}, {"amsgrad": True}, {"adam_w_mode": False}]
    found = [choose_optimizer(name, more, reference=plain) for more in choices for plain in (False, True)]
    monkeypatch.setattr("dsx.optimizers._ops_class", lambda *args, **kwargs: (None, "it is not here"))
    found += [choose_optimizer(name, {})]
    assert {one_step(choice)[1].param_groups[0]["weight_decay"] for choice in found} == {0.0}
    asked = [choose_optimizer("AdamW", {"torch_adam": True}, reference=plain) for plain in (False, True)]
    assert {one_step(choice)[1].param_groups[0]["weight_decay"] for choice in asked} == {0.01}


def test_lion_and_lamb_move_the_parameter():
    got, _ = one_step(choose_optimizer("Lion", {"lr": 0.1}))
    torch.testing.assert_close(got, torch.full((4,), 2.0 - 3 * 0.1))
    got, optimizer = one_step(choose_optimizer("Lamb", {"lr": 0.1, "max_coeff": 0.5}))
    assert (got < 2.0).all() and type(optimizer).__name__ == "FusedLamb"


def test_every_choice_says_why():
    assert "torch_adam is set" in choose_optimizer("Adam", {"torch_adam": True}).reason
    assert "amsgrad is set" in choose_optimizer("Adam", {"amsgrad": True}).reason
    assert choose_optimizer("SGD", {"lr": 1.0}).reason == "torch.optim.SGD, fused"
    reason = choose_optimizer("Adam", {}).reason
    assert "dsx_ops.FusedAdam" in reason or "without its native code" in reason


def test_without_native_code_adam_is_torchs(monkeypatch):
    import dsx_ops

    monkeypatch.setattr(dsx_ops, "native_status", lambda: {"native": False, "reason": "no compiler"})
    choice = choose_optimizer("Adam", {"lr": 0.1})
    assert choice.reason == "torch.optim.AdamW, fused, because dsx-ops runs without its native code (no compiler)"
    assert type(choice.build([torch.nn.Parameter(torch.ones(2))])) is torch.optim.AdamW


@pytest.mark.parametrize(
    "name, params, match",
    [
        ("OneBitAdam", {"freze_step": 3}, "optimizer.params.freze_step"),
        ("Adm", {}, "did you mean Adam"),
        ("Adam", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("Adam", {"learning_rate": 1.0}, "optimizer.params.learning_rate"),
        ("SGD", {"betas": [0.9, 0.99]}, "optimizer.params.betas"),
        ("Adagrad", {"amsgrad": True}, "optimizer.params.amsgrad"),
        ("Adam", {"torch_adam": True, "bias_correction": False}, "always corrects the bias"),
    ],
)
def test_what_cannot_be_built_is_named(name, params, match):
    with pytest.raises(DsxConfigError, match=match):
        choose_optimizer(name, params)


def test_names_of_torch_are_all_known():
    assert {"sgd", "adamw", "nadam", "rprop", "asgd"} <= set(torch_optimizers())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lamb", "Lion"])
def test_fp32_states_of_masters_in_16_bits(name, native, monkeypatch):
    import dsx_ops

    if not native:
        monkeypatch.setattr(dsx_ops, "native_status", lambda: {"native": False, "reason": "no compiler"})
    for states, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = choose_optimizer(name, {"lr": 0.1}, masters="bf16", states=states).build([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moments = [v for v in optimizer.state[parameter].values() if torch.is_tensor(v) and v.numel() == 4]
        assert moments and all(moment.dtype == expected for moment in moments)


@pytest.mark.parametrize(
    "name, params", [("Adagrad", {}), ("SGD", {"momentum": 0.9}), ("RMSprop", {}), ("Adam", {"torch_adam": True})]
)
def test_torchs_optimizers_cannot_keep_wider_states(name, params):
    with pytest.raises(DsxConfigError, match=r"bf16\.bf16_optimizer_states"):
        choose_optimizer(name, params, masters="bf16", states="fp32")
    choose_optimizer(name, params, masters="bf16", states="bf16")
    choose_optimizer(name, params, masters="bf16", states="fp32", reference=True)


def test_sgd_without_momentum_has_no_states():
    choose_optimizer("SGD", {"lr": 0.1}, masters="bf16", states="fp32")


@pytest.mark.parametrize(
    "masters, states, asked", [("bf16", "fp32", False), ("bf16", "bf16", True), ("fp16", "fp16", True)]
)
def test_two_words_about_states_must_agree(masters, states, asked):
    with pytest.raises(DsxConfigError, match="fp32_optimizer_states"):
        choose_optimizer("Adam", {"fp32_optimizer_states": asked}, masters=masters, states=states)
    choose_optimizer("Adam", {"fp32_optimizer_states": not asked}, masters=masters, states=states)
