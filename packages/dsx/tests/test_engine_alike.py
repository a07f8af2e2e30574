"""`dsx.initialize` on ranks that differ: the difference is named on all of them, and a mistake on one of them does
not leave the others waiting.
"""

import os

import pytest
from dsx_testkit import run_ranks, tiny


def build(**changes):
    import dsx

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        **changes.pop("config", {}),
    }
    return dsx.initialize(model=changes.pop("model", None) or tiny.MLP(4, 6, 3, depth=2), config=config, **changes)[0]


DIFFERENCES = [
    (
        {"config": {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}},
        r"optimizer\.params\.lr \(rank 0: 0\.1; rank 1: 0\.2\)",
    ),
    (
        {"config": {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}},
        r"optimizer\.type \(rank 0: 'SGD'; rank 1: 'Adam'\)",
    ),
    ({"config": {"gradient_clipping": 0.5}}, r"gradient_clipping \(rank 0: 1\.0; rank 1: 0\.5\)"),
    ({"config": {"bf16": {"enabled": True}}}, r"bf16\.enabled \(rank 0: False; rank 1: True\)"),
    ({"config": {"zero_optimization": {"stage": 2}}}, r"zero_optimization\.stage"),
    ({"config": {"gradient_accumulation_steps": 3}}, r"gradient_accumulation_steps"),
    (
        {"lr_scheduler": lambda optimizer: __import__("torch").optim.lr_scheduler.StepLR(optimizer, 1)},
        r"lr_scheduler=\.\.\.\)",
    ),
    (
        {"model": "frozen"},
        (
            r"layers\.0\.weight \(rank 0: .*frozen; rank 1: .*trained\)|layers\.0\.weight \(rank 0: .*trained; rank 1:"
            r" .*frozen\)"
        ),
    ),
]


def differ(rank, world):
    from dsx_zero import RanksDifferError

    for changes, text in DIFFERENCES:
        changes = dict(changes)
        if changes.get("model") == "frozen":
            changes["model"] = tiny.MLP(4, 6, 3, depth=2)
            changes["model"].layers[0].requires_grad_(rank == 0)
        elif rank == 0:
            changes = {}
        with pytest.raises(RanksDifferError, match=text):
            build(**changes)
    engine = build(config={"tensorboard": {"output_path": f"rank{rank}"}, "log_level": ["info", "warning"][rank]})
    assert engine.world_size == world, "what a rank writes down may differ"


def test_what_differs_is_named():
    run_ranks(differ, 2)


def one_fails(rank, world):
    import dsx
    import dsx_comm
    from dsx_zero import RanksDifferError

    mistakes = [{"config": {"train_batch_size": 7}}, {"optimizer": lambda params: 3}]
    for mistake in mistakes:
        if rank == 1:
            with pytest.raises((dsx.DsxConfigError, ValueError)) as caught:
                build(**mistake)
            assert not isinstance(caught.value, RanksDifferError)
        else:
            with pytest.raises(RanksDifferError, match="rank 1 failed"):
                build()
        if not dsx_comm.is_initialized() or os.environ.get("ONE_MISTAKE"):
            break


def test_a_mistake_on_one_rank_reaches_the_others_in_a_group():
    run_ranks(one_fails, 2, timeout=40)


def test_a_mistake_on_one_rank_reaches_those_that_wait_for_it_in_init_distributed(monkeypatch):
    monkeypatch.setenv("ONE_MISTAKE", "1")
    run_ranks(one_fails, 2, backend=None, timeout=60)
