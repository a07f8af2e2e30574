"""How many files of ours a reader of one warm training step has to open.

`sys.setprofile` sees each Python function that is entered. The limits are what is reached today, without a margin: a
file more is a new place that everybody who reads a step has to read.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import dsx
import torch
from dsx_testkit import count_calls, run_ranks, tiny
from torch import nn

PACKAGES = (
    "dsx", "dsx_activations", "dsx_checkpoint", "dsx_comm", "dsx_compress", "dsx_core", "dsx_data", "dsx_launch",
    "dsx_moe", "dsx_monitor", "dsx_nvme", "dsx_ops", "dsx_pipe", "dsx_plan", "dsx_sparse_attn", "dsx_zero",
)  # fmt: skip
MODEL = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@contextmanager
def files_on_the_way(hook, transport):
    """The files of ours on the stack, from the innermost call of `hook` to a call of `transport`, at its first call."""
    found = []

    def profile(frame, event, argument):
        del argument
        if event != "call" or found or frame.f_code.co_qualname != transport:
            return
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            if frame.f_code.co_qualname == hook:
                ours = [name for name in files if not {*PACKAGES}.isdisjoint(Path(name).parts)]
                found.extend(dict.fromkeys(reversed(ours)))
                return
            frame = frame.f_back

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _step(engine, batch):
    loss = engine(batch).float().square().mean()
    engine.backward(loss)
    engine.step()


def _measure(rank, world_size, stage):
    model = nn.Sequential(nn.Linear(8, 8), *(tiny.ResidualBlock() for _ in range(4)))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = dsx.initialize(model=model, config={**MODEL, "gradient_clipping": 1.0, "zero_optimization": zero})
    batch = torch.randn(4, 8)
    for _ in range(13):  # the first ten collectives of a group are compared between ranks
        _step(engine, batch)
    with count_calls(*PACKAGES) as step:
        _step(engine, batch)
    with files_on_the_way("Gradients._hook.<locals>.arrived", "ReduceScatter.start") as reduce:
        _step(engine, batch)
    return _ours(step.files), _ours(reduce)


def _ours(files):
    """By the folder behind `src`: the checkout itself may lie in a folder that is named like a package."""
    found = [name.rpartition("/src/")[2] for name in files if "/src/" in name]
    return [name for name in found if name.partition("/")[0] in PACKAGES]


def test_a_step_of_stage_3_enters_few_files():
    step, reduce = run_ranks(_measure, 2, 3)[0]
    assert "dsx_zero/optimizer.py" in step and reduce[0].startswith("dsx_zero/grads/")
    assert len(step) <= 45, sorted(step)
    assert len(reduce) <= 5, reduce
