"""A model that is compiled as a whole trains as one that is not; hooks of ours are not traced into its graph."""

import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny


def work(rank, world, stage):
    import dsx_zero
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = tiny.MLP()
    model, optimizer = dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), stage=stage)
    model.compile(backend="aot_eager")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for net, steps in ((model, optimizer), (plain, reference)):
            net.loss(*net.example(2, seed=step)).backward()
            steps.step()
            steps.zero_grad()
    got = {name: p.detach() for name, p in model.named_parameters()}
    assert_close_named(got, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert all("compiler.disable" in reason for reason in counters["graph_break"]), list(counters["graph_break"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_model_is_one_graph(stage):
    run_ranks(work, 2, stage)
