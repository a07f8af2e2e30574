"""`dsx_verify.audit` over dsx's engine: clean receipts at every stage, and a planted mistake is named by its kind."""

from unittest.mock import patch

import dsx
import torch
from dsx_testkit import run_ranks
from dsx_verify import Expected, audit
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.outer(torch.tanh(self.inner(x))), y)


def batches(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 3, generator=generator)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def receipt_of(stage, accumulation=2):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = dsx.initialize(model=Net(), optimizer=adam, config=config)

    def step(micro_batches):
        losses = []
        for batch in micro_batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    expected = Expected(Net, adam, accumulation=accumulation, max_norm=0.3, same_start=True)
    found = audit(step, engine, expected=expected, batches=batches, steps=2, raise_error=False)
    engine.destroy()
    return found


def all_stages(rank, world):
    return [str(receipt_of(stage)) for stage in range(4)]


def test_every_stage_gets_a_clean_receipt():
    for told in run_ranks(all_stages, 2, timeout=120):
        assert all("2 updates equal to plain torch" in text for text in told), told


def not_averaged(rank, world):
    from dsx_zero.grads.reduction import Reduction

    with patch.object(Reduction, "factors", lambda self, world_size: (1.0, False, 1.0)):
        return receipt_of(2, accumulation=3).fault


def test_a_sum_in_place_of_a_mean_is_named():
    for fault in run_ranks(not_averaged, 2):
        assert (fault.kind, fault.name, fault.step) == ("scaled by the ranks", "inner.weight", 1), fault
