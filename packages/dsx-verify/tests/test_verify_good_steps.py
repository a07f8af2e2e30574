"""Systems that train right get a clean receipt: wrappers, accumulation, clipping, schedules, 16 bits, dropout."""

import sys
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_verify import Expected, audit

sys.path.insert(0, str(Path(__file__).parent))
from verify_systems import OPTIMIZERS, Net, Tied, Turned, pairs, step_of, tokens, wrap

VARIANTS = {
    "plain": (Net, pairs, {}),
    "accumulated": (Net, pairs, {"accumulation": 3, "max_norm": 0.1}),
    "dropout": (lambda: Net(drop=0.3), pairs, {"accumulation": 2}),
    "batch norm": (lambda: Net(norm=True), pairs, {"accumulation": 2}),
    "frozen": (lambda: Net(frozen=True), pairs, {"max_norm": 0.05}),
    "tied": (Tied, tokens, {}),
    "complex buffer": (Turned, pairs, {}),
    "autocast": (Net, pairs, {"compute": torch.bfloat16, "autocast": True, "accumulation": 2}),
    "scheduled": (Net, pairs, {"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}),
}


def receipts(rank, world, kind, names):
    told = []
    for name in names:
        make, batches, settings = VARIANTS[name]
        for optimizer in ("sgd", "adamw"):
            expected = Expected(make, OPTIMIZERS[optimizer], same_start=True, **settings)
            model = wrap(kind, make())
            inner = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
            schedule = None if expected.schedule is None else expected.schedule(inner)
            step = step_of(model, inner, expected, schedule)
            receipt = audit(
                step, model, expected=expected, batches=batches, optimizer=inner, steps=2, raise_error=False
            )
            told.append((name, optimizer, receipt.ok, str(receipt), receipt.compared))
    return told


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_a_right_system_gets_a_clean_receipt(kind):
    names = [
        n
        for n in VARIANTS
        if not (kind.startswith("fsdp") and n in ("batch norm", "frozen" if kind == "fsdp1" else ""))
    ]
    by_rank = run_ranks(receipts, 1 if kind == "plain" else 2, kind, names, timeout=120)
    assert all(told == by_rank[0] for told in by_rank), "all ranks have one receipt"
    assert [text for _, _, ok, text, _ in by_rank[0] if not ok] == []
    for name, _, _, _, compared in by_rank[0]:
        assert compared["gradient" if name not in ("frozen", "accumulated") else "clipped gradient"] >= 2
        assert compared["parameter"] >= 4 and compared["loss"] >= 2 and compared["random stream"] >= 2
