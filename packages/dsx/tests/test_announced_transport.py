"""A new engine tells on rank 0 how its ranks reach each other, and why not by shared memory."""

import logging

import pytest
import torch
from dsx_testkit import run_ranks


def lines(rank, world):
    """What this rank's engine logs."""
    import dsx

    seen = []

    class Keep(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    log, keep = logging.getLogger("dsx"), Keep()
    level = log.level
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    try:
        dsx.initialize(model=torch.nn.Linear(2, 2), config=config)
    finally:
        log.removeHandler(keep)  # one rank is the process of all tests
        log.setLevel(level)
    return [line for line in seen if line.startswith("transport")]


@pytest.mark.parametrize(
    ("backend", "words"),
    [("dsx", "shared memory of this host"), ("gloo", "dsx.init_distributed"), (None, "shared memory of this host")],
)
def test_rank_0_says_once_how_ranks_reach_each_other(backend, words):
    first, second = run_ranks(lines, 2, backend=backend)
    assert len(first) == 1 and words in first[0]
    assert second == []


def test_one_rank_has_no_transport():
    assert lines(0, 1) == []
