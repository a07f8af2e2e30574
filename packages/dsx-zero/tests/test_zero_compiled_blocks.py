"""`compile_units` at every stage: no graph is broken, nothing is compiled again after the second step, and training is
that of the plain model, with offload and recomputation around the blocks too.
"""

import copy
import importlib
import pickle
from functools import partial

import pytest
import torch
from dsx_core.modules import is_compiled
from dsx_testkit import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x, scale=None):
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, call=None):
        super().__init__()
        torch.manual_seed(0)
        self.call = call or (lambda block, x, **kw: block(x, **kw))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x, scale=2.0)
        return self.last(x).square().mean()


OFFLOADED = {
    1: {"offload_optimizer": {"device": "cpu"}},
    2: {"offload_optimizer": {"device": "cpu"}},
    3: {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def losses(model, optimizer, rank, steps=4):
    dynamo = importlib.import_module("torch._dynamo")  # by name: `run_ranks` would pickle its configuration
    from torch._dynamo.utils import counters

    found = []
    for step in range(steps):
        with dynamo.config.patch(error_on_recompile=step >= 2):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if step == 1:
            graphs = counters["stats"]["unique_graphs"]
    return torch.stack(found), counters["stats"]["unique_graphs"] - graphs


def work(rank, world, stage, offload, how):
    import dsx_zero

    dynamo = importlib.import_module("torch._dynamo")  # by name: `run_ranks` would pickle its configuration
    from torch._dynamo.utils import counters

    def run(compiled):
        dynamo.reset()
        counters.clear()
        call = partial(checkpoint, use_reentrant=False) if how == "checkpoint" else None
        config = {
            "stage": stage,
            **(OFFLOADED.get(stage, {}) if offload else {}),
            "stage3_param_persistence_threshold": 0,
        }
        model, optimizer = dsx_zero.shard(Model(call), lambda p: torch.optim.AdamW(p, lr=0.01), config=config)
        if compiled:
            assert dsx_zero.compile_units(model, backend="aot_eager", fullgraph=True) == (
                "blocks.0",
                "blocks.1",
                "blocks.2",
            )
        found, later = losses(model, optimizer, rank)
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert later == 0
        if compiled:
            assert 1 <= counters["stats"]["unique_graphs"] <= 2, counters["stats"]
        optimizer.release()
        return found

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "offload", "how"),
    [(0, False, ""), (3, True, "checkpoint")],
)
def test_blocks(stage, offload, how):
    run_ranks(work, 2, stage, offload, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "checkpoint"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_everywhere(stage, offload, how):
    run_ranks(work, 2, stage, offload, how)


def resident(rank, world):
    import dsx_zero

    model, _ = dsx_zero.shard(Model(), lambda p: torch.optim.AdamW(p, lr=0.01), stage=3)  # small: all stay whole
    return dsx_zero.compile_units(model, backend="eager")


def test_blocks_that_stay_whole_at_stage_3_are_compiled_by_themselves():
    assert run_ranks(resident, 1) == [("blocks.0", "blocks.1", "blocks.2")]


def whole(rank, world, stage):
    import dsx_zero

    dynamo = importlib.import_module("torch._dynamo")  # by name: `run_ranks` would pickle its configuration
    from torch._dynamo.utils import counters

    def run(compiled):
        dynamo.reset()
        counters.clear()
        model, optimizer = dsx_zero.shard(Model(), lambda p: torch.optim.AdamW(p, lr=0.01), stage=stage)
        found, later = losses(torch.compile(model, backend="aot_eager") if compiled else model, optimizer, rank)
        assert later == 0
        optimizer.release()
        return found

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_compiled_as_a_whole_is_not_compiled_again(stage):
    run_ranks(whole, 2, stage)


def test_copies_are_ordinary_modules():
    import dsx_zero

    model = Block(32)
    assert dsx_zero.compile_units(model, backend="eager") == ("",)
    assert is_compiled(model)
    x = torch.randn(2, 16)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_compiled(copied)
        with torch.no_grad():
            copied.up.weight.zero_()
        assert not torch.equal(copied(x), model(x))  # its own forward, not that of the original
        assert torch.equal(copied(x), Block.forward(copied, x))


def test_an_unknown_backend_is_named():
    import dsx_zero

    with pytest.raises(dsx_zero.ZeroModelError, match="aot_eager"):
        dsx_zero.compile_units(Block(4), backend="nothing")
