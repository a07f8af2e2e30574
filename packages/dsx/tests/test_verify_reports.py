"""`dsx.verify` on honest runs (dropout, Adam, bf16, tied weights) and what it says when something differs."""

import pickle

import dsx
import pytest
import torch
from dsx.verification import Tolerance
from dsx_testkit import run_ranks, tiny


def config(**changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "steps_per_print": None,
        **changes,
    }


class Language(tiny.TinyGPT):
    """A tied GPT that returns its loss in a mapping and drops activations."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        logits = torch.nn.functional.dropout(logits, 0.2, self.training)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def tokens(index):
    return {"tokens": torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index))}


DEFAULTS = [
    ("AdamW", {}),
    ("AdamW", {"torch_adam": True}),
    ("Adam", {}),
    ("Adam", {"adam_w_mode": False}),
    ("Lion", {}),
]


def honest(rank, world):
    warm = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3}}}
    whole = {"stage3_param_persistence_threshold": 0}
    runs = [
        config(zero_optimization={"stage": 3, **whole}, gradient_accumulation_steps=2, **warm),
        config(zero_optimization={"stage": 2}, bf16={"enabled": True}, gradient_clipping=0.5),
        config(zero_optimization={"stage": 1}, optimizer={"type": "Lamb", "params": {"lr": 0.01}}),
        config(zero_optimization={"stage": 0}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        *(config(optimizer={"type": kind, "params": {"lr": 0.01, **more}}) for kind, more in DEFAULTS),
    ]
    return [str(dsx.verify(Language, run, tokens, steps=3)) for run in runs]


def test_honest_runs_are_equal_to_plain_torch():
    first, second = run_ranks(honest, 2, timeout=150)
    assert first == second
    assert all("3 steps equal" in text for text in first)


def wrong_batch(model, batch):
    """A loss that is not the same function on both sides: the engine's is ten percent off."""
    factor = 1.1 if isinstance(model, dsx.Engine) else 1.0
    return factor * (model(batch) ** 2).mean()


def test_a_difference_is_raised_and_named():
    with pytest.raises(dsx.VerifyError, match=r"step 1, loss of micro-batch 0 on rank 0: got .*, expected ") as caught:
        dsx.verify(tiny.MLP, config(), lambda i: torch.ones(2, 8) * (i + 1), loss_fn=wrong_batch)
    report = caught.value.report
    assert not report.ok and report.steps == 0 and report.first.kind == "loss"
    assert report.first.got == pytest.approx(1.1 * report.first.expected)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    quiet = dsx.verify(tiny.MLP, config(), lambda i: torch.ones(2, 8), loss_fn=wrong_batch, raise_error=False, steps=1)
    assert not quiet.ok
    loose = Tolerance(loss=0.2, grad=0.2)
    assert dsx.verify(tiny.MLP, config(), lambda i: torch.ones(2, 8), loss_fn=wrong_batch, tolerance=loose, steps=1).ok


def test_an_optimizer_of_the_caller_is_compared_too():
    def make(parameters):
        return torch.optim.RMSprop(parameters, lr=0.01)

    settings = config()
    del settings["optimizer"]
    report = dsx.verify(
        tiny.MLP, settings, lambda i: torch.ones(2, 8), loss_fn=lambda m, x: m(x).mean(), optimizer=make
    )
    assert report.ok and report.compared["master"] > 0
    with pytest.raises(ValueError, match="no optimizer to compare"):
        dsx.verify(tiny.MLP, settings, lambda i: torch.ones(2, 8))
