"""DeepSpeed's names and arguments of the 1-bit optimizers: other class names, the engine argument, backend names."""

import logging

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks

SETTINGS = {
    "OnebitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
    "OnebitLamb": {"freeze_step": 3, "weight_decay": 0.1},
}


def test_both_spellings_are_one_class():
    assert dsx_comm.onebit.OnebitAdam is dsx_comm.OneBitAdam and dsx_comm.onebit.OnebitLamb is dsx_comm.OneBitLamb


class Engine:
    """Reduces gradients during backward unless its flag says no, as DeepSpeed's does."""

    def __init__(self, pipeline=False):
        self.enable_backward_allreduce = True
        if pipeline:
            self.pipeline_enable_backward_allreduce = True

    def backward(self, loss, params):
        loss.backward()
        if self.enable_backward_allreduce:
            for p in params:
                dsx_comm.all_reduce(p.grad, dsx_comm.ReduceOp.AVG)


def gradient(step, rank):
    return torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank))


def switched(rank, world, name, pipeline):
    ours, plain = (torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2))
    engine, seen = Engine(pipeline), []
    a = getattr(dsx_comm.onebit, name)([ours], engine, lr=0.01, **SETTINGS[name])
    b = getattr(dsx_comm.onebit, name)([plain], None, 0.01, **SETTINGS[name])  # lr is third, as in DeepSpeed
    for step in range(9):
        seen.append(engine.enable_backward_allreduce)
        if pipeline:
            assert engine.pipeline_enable_backward_allreduce == engine.enable_backward_allreduce
        a.zero_grad(), b.zero_grad()
        engine.backward((ours * gradient(step, rank)).sum(), [ours])
        (plain * gradient(step, rank)).sum().backward()
        a.step(), b.step()
        assert seen[-1] == (b.last_traffic.kind.value == "exact")
    a.synchronize(), b.synchronize()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert True in seen and False in seen
    late = Engine()
    c = getattr(dsx_comm.onebit, name)([torch.nn.Parameter(torch.ones(40))], late, **SETTINGS[name])
    assert late.enable_backward_allreduce
    c.load_state_dict(a.state_dict())
    assert late.enable_backward_allreduce == engine.enable_backward_allreduce


@pytest.mark.parametrize(("name", "pipeline"), [("OnebitAdam", True), ("ZeroOneAdam", False), ("OnebitLamb", False)])
def test_an_engine_with_a_flag_is_told_when_to_reduce(name, pipeline):
    run_ranks(switched, 2, name, pipeline)


def test_what_is_no_engine_is_refused():
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(
        dsx_comm.errors.CommArgumentError, match=r"got 0\.01 as the second positional argument.*lr=0\.01"
    ):
        dsx_comm.OneBitAdam(params, 0.01)
    with pytest.raises(
        dsx_comm.errors.CommArgumentError, match="expected an engine with the attribute enable_backward_allreduce"
    ):
        dsx_comm.ZeroOneAdam(params, torch.nn.Linear(1, 1))


def backends(rank, world, name, backend):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx_comm").addHandler(handler)
    optimizer = dsx_comm.OneBitAdam([torch.nn.Parameter(torch.ones(3))], comm_backend_name=name)
    for _ in range(2):
        optimizer.step()
    return lines


@pytest.mark.parametrize(
    ("name", "said"), [("nccl", True), ("hccl", True), ("gloo", False), ("compressed", False), (None, False)]
)
def test_a_backend_name_that_is_not_the_groups_is_said_once(name, said):
    first, second = run_ranks(backends, 2, name, "gloo")
    assert len(first) == said and not second
    if said:
        assert f"comm_backend_name '{name}' is not used: messages go over the process group's backend, gloo" in first[0]
