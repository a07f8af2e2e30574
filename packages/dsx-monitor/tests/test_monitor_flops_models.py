"""The profiler against closed-form counts of whole models, forward and backward, and against torch's own counter."""

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from dsx_monitor import FlopsProfiler  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

spec = importlib.util.spec_from_file_location("monitor_zoo", Path(__file__).with_name("monitor_zoo.py"))
zoo = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = zoo
spec.loader.exec_module(zoo)


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.name)
def test_products_of_forward_and_backward_are_the_analytical_ones(case):
    torch.manual_seed(0)
    model, args = case.build()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*args).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == pytest.approx(case.forward, rel=1e-3)
    assert profiler.totals.backward_macs == pytest.approx(case.backward, rel=1e-3)
    assert not profiler.get_unknown_operators()
    # What is not a product is small change, and is counted once per element.
    assert profiler.get_total_flops() >= 2 * case.forward
    # The tree accounts for everything.
    assert sum(node.own_macs for _, node in profiler.root.walk()) == profiler.get_total_macs()
    assert profiler.root.backward_macs == profiler.totals.backward_macs


def test_where_torch_counts_too_both_agree():
    for case in zoo.CASES:
        if case.name not in ("ResNet", "conv1d", "conv3d", "einsum", "sparse attention"):
            continue
        model, args = case.build()
        with FlopCounterMode(display=False) as counter:
            model(*args)
        assert counter.get_total_flops() == 2 * case.forward, case.name


def test_a_custom_operator_counts_by_the_formula_registered_with_torch():
    from torch.utils.flop_counter import register_flop_formula

    @torch.library.custom_op("dsx_monitor_tests::pairs", mutates_args=())
    def pairs(x: torch.Tensor) -> torch.Tensor:
        return x @ x.T

    class Model(torch.nn.Module):
        def forward(self, x):
            return pairs(x)

    model, x = Model(), torch.randn(4, 8)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    profiler.stop_profile()
    # Nothing inside a custom operator is dispatched: without a formula it is named, not guessed.
    assert profiler.get_unknown_operators() == {"dsx_monitor_tests::pairs": 1} and profiler.get_total_macs() == 0

    register_flop_formula(torch.ops.dsx_monitor_tests.pairs)(
        lambda shape, out_shape=None, **_: 2 * shape[0] ** 2 * shape[1]
    )
    profiler.start_profile()
    model(x)
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * 4 * 4 * 8 and not profiler.get_unknown_operators()


def data_parallel(rank, world):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, args = (
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)),
        torch.randn(4, 8),
    )
    alone, wrapped = FlopsProfiler(model), FlopsProfiler(DistributedDataParallel(model))
    for profiler in (alone, wrapped):
        profiler.start_profile()
        profiler.model(args).sum().backward()
        profiler.stop_profile()
    assert dist.get_world_size() == world
    return [
        (p.get_total_flops(), p.root.backward_flops, p.get_total_params(), p.get_unknown_operators())
        for p in (alone, wrapped)
    ]


def test_a_model_under_ddp_counts_as_it_does_alone():
    testkit = pytest.importorskip("dsx_testkit")
    for alone, wrapped in testkit.run_ranks(data_parallel, 2):
        assert alone == wrapped and alone[0] > 0 and not alone[3]


def test_gradients_that_refuse_python_calls_are_accumulated_as_without_a_profile():
    """As dsx_zero's gradients inside a backward: autograd may add to them, Python may not."""

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError(f"{func} was called from Python")

    model = torch.nn.Linear(4, 2, bias=False)
    gradient = torch.ones(2, 4).as_subclass(Refusing)
    model.weight.grad = gradient
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(3, 4)).sum().backward()
    profiler.stop_profile()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(model.weight.grad.as_subclass(torch.Tensor), torch.full((2, 4), 4.0))
    assert profiler.totals.backward_macs == 3 * 4 * 2
