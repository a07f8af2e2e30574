"""Swappers: the numbers are those of an optimizer in memory, for any buffers and pipelining.

Schedules are checked, and memory is bounded.
"""

import os
import random

import dsx_nvme
import pytest
import torch
from dsx_nvme import OptimizerSwapper, ParameterSwapper
from dsx_nvme.swap import Action, SwapPlan, make_plan

SIZES = {"a": 10_000, "b": 1, "c": 4097, "d": 0, "e": 2500}


def adam(state, grad, step):
    """In place, on slices: what an elementwise optimizer does."""
    state["exp_avg"].lerp_(grad, 0.1)
    state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
    state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-6, value=-0.01 / step)


def initial(key):
    return torch.randn(SIZES[key], generator=torch.Generator().manual_seed(ord(key)))


def gradient(key, step):
    return torch.randn(SIZES[key], generator=torch.Generator().manual_seed(1000 * step + ord(key)))


def reference(steps):
    states = {
        k: {"master": initial(k), "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)} for k, n in SIZES.items()
    }
    for step in range(1, steps + 1):
        for key, state in states.items():
            adam(state, gradient(key, step), step)
    return states


@pytest.mark.parametrize("pipeline", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("buffer_size", [4096, 9000, 10**8])
@pytest.mark.parametrize("max_in_cpu", [0, 5000])
@pytest.mark.parametrize("fast_init", [False, True])
def test_the_numbers_are_those_of_an_optimizer_in_memory(pipeline, buffer_size, max_in_cpu, fast_init, tmp_path):
    with OptimizerSwapper(
        tmp_path, SIZES, buffer_count=4, buffer_size=buffer_size, max_in_cpu=max_in_cpu, fast_init=fast_init,
        pipeline_read=pipeline[0], pipeline_write=pipeline[1], pin=False,
    ) as swapper:  # fmt: skip
        swapper.initialize(lambda key, state, a, b: initial(key)[a:b] if state == "master" else None)
        for step in range(1, 4):
            swapper.step(lambda v, step=step: adam(v.states, gradient(v.key, step)[v.start : v.stop], step))
        expected = reference(3)
        for key, states in expected.items():
            for name, value in states.items():
                assert torch.equal(swapper.get_state(key, name), value), (key, name)
        assert swapper.times.passes == 3 + fast_init
        resident = sum(p.numel for p in swapper.plan.pieces if p.resident)
        assert resident <= max_in_cpu and (resident > 0) == (max_in_cpu > 0)
        assert swapper.pool.budget <= max(4 * buffer_size * 4, 5 * 3 * 4096)
        assert os.path.getsize(swapper.path) == swapper.plan.file_bytes
    assert os.listdir(tmp_path) == []


def test_gradients_come_by_and_are_not_written_back(tmp_path):
    names = ("master", "grad")
    with OptimizerSwapper(
        tmp_path, {"g": 5000}, states=names, read_only=("grad",), buffer_size=2048, pipeline_read=True
    ) as s:
        s.set_state("g", "grad", torch.arange(5000.0))
        for visit in s.sweep():
            visit.states["master"].add_(visit.states["grad"])
            visit.states["grad"].fill_(-1)
        assert torch.equal(s.get_state("g", "master"), torch.arange(5000.0))
        assert torch.equal(s.get_state("g", "grad"), torch.arange(5000.0))
        assert s.times.bytes_written == s.times.bytes_read // 2


def test_states_go_in_and_out_whole(tmp_path):
    with OptimizerSwapper(tmp_path, SIZES, buffer_size=2048, dtype=torch.bfloat16, keep=True, max_in_cpu=3000) as s:
        for key, n in SIZES.items():
            s.set_state(key, "exp_avg", torch.arange(n).to(torch.bfloat16))
        for key, n in SIZES.items():
            assert torch.equal(s.get_state(key, "exp_avg"), torch.arange(n).to(torch.bfloat16))
            assert not s.get_state(key, "master").any()
        with pytest.raises(KeyError, match="momentum"):
            s.get_state("a", "momentum")
        with pytest.raises(KeyError, match="no group 'z'"):
            s.get_state("z", "master")
        with pytest.raises(KeyError, match="no group 'z'"):
            s.set_state("z", "master", torch.zeros(0, dtype=torch.bfloat16))
        with pytest.raises(dsx_nvme.TensorError):
            s.set_state("a", "master", torch.zeros(3, dtype=torch.bfloat16))
        path = s.path
    assert os.path.exists(path)


def test_a_pass_that_fails_is_not_taken_for_a_finished_one(tmp_path):
    with OptimizerSwapper(tmp_path, SIZES, buffer_size=4096, pipeline_read=True, pipeline_write=True) as s:
        with pytest.raises(ZeroDivisionError):
            s.step(lambda visit: 1 / 0)
        with pytest.raises(dsx_nvme.NvmeError, match="failed half-way"):
            s.step(lambda visit: None)
    with OptimizerSwapper(tmp_path, SIZES, buffer_size=3072) as s:
        os.truncate(s.path, 100)
        with pytest.raises(dsx_nvme.EndOfFileError):
            s.step(lambda visit: None)


def test_buffers_are_announced_in_pieces_that_the_kernel_takes(tmp_path, monkeypatch):
    announced = []
    monkeypatch.setattr(dsx_nvme.Engine, "register", lambda engine, tensor: announced.append(tensor.numel()))
    monkeypatch.setattr(OptimizerSwapper, "_reserve", lambda swapper: None)  # nor is the file filled
    with OptimizerSwapper(
        tmp_path, {"a": 200_000_000}, buffer_size=10**8, pipeline_read=True, pipeline_write=True, pin=False
    ) as s:  # only its pages are counted, none is touched
        assert s.pool.budget > 1 << 30
        assert max(announced) <= 1 << 30 and sum(announced) == s.pool.in_use


def test_what_the_buffers_cannot_hold_is_said(tmp_path):
    with pytest.raises(dsx_nvme.BudgetError, match="raise buffer_size"):
        OptimizerSwapper(tmp_path, SIZES, buffer_size=100)
    with pytest.raises(dsx_nvme.BudgetError, match="group 'a' has 10000"):
        OptimizerSwapper(tmp_path, SIZES, buffer_size=4096, divisible=False)
    with pytest.raises(dsx_nvme.OptionError, match="buffer_count"):
        OptimizerSwapper(tmp_path, SIZES, buffer_count=2)
    with pytest.raises(dsx_nvme.OptionError):
        OptimizerSwapper(tmp_path, SIZES, read_only=("other",))


def test_plans_are_valid_cover_everything_and_can_be_read():
    rng = random.Random(0)
    for _ in range(60):
        sizes = {f"g{i}": rng.choice([0, 1, 1023, 1024, 5000, 100_000]) for i in range(rng.randrange(6))}
        plan = make_plan(
            sizes, states=rng.randrange(1, 5), itemsize=rng.choice([2, 4]),
            buffer_bytes=rng.choice([1, 3, 40]) * 61_440,
            read_ahead=rng.random() < 0.5, write_behind=rng.random() < 0.5, resident_elements=rng.choice([0, 5000]),
        )  # fmt: skip
        for key, n in sizes.items():
            covered = [i for p in plan.pieces if p.key == key for i in (p.start, p.stop)]
            assert covered == sorted(covered) and sum(p.numel for p in plan.pieces if p.key == key) == n
        moving = [p for p in plan.pieces if not p.resident]
        assert all(p.room * 1 <= plan.slot_bytes and p.offset % 4096 == 0 for p in moving)
        assert plan.render().count("\n") == len(plan.actions)


def test_a_wrong_schedule_is_refused():
    plan = make_plan({"a": 100, "b": 100}, states=1, itemsize=4, buffer_bytes=1 << 20, read_ahead=True)
    for wrong in (plan.actions[1:], plan.actions[:-1], (*plan.actions[:2], Action("read", 1, 0), *plan.actions[2:])):
        with pytest.raises(dsx_nvme.OptionError):
            SwapPlan(plan.pieces, tuple(wrong), plan.states, plan.slots, plan.slot_bytes).validate()


def layers(swapper, count=8, numel=3000):
    for i in range(count):
        swapper.add(f"layer{i}", torch.full((numel,), float(i)))
    return [f"layer{i}" for i in range(count)]


def test_parameters_come_by_and_are_prefetched_along_the_recorded_order(tmp_path):
    with ParameterSwapper(tmp_path, buffer_count=4, buffer_size=3072, ahead=2, checksum=True) as s:
        names = layers(s)
        for step in range(3):
            for name in names:
                with s.use(name, dirty=True) as t:
                    assert t[0] == float(name[5:]) + step and t.shape == (3000,)
                    t += 1
            s.end_pass()
            if step == 0:
                assert s.counts.misses == 8 and s.counts.prefetched == 0
        assert s.counts.misses <= 8 + 2 and s.counts.prefetched >= 12
        assert s.pool.peak <= s.pool.budget == 4 * 3072 * 4
        with s.use("layer3") as t:  # out of order: still right
            assert t[0] == 6.0
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_parameters_larger_than_a_buffer_and_kept_in_memory(tmp_path):
    with ParameterSwapper(tmp_path, buffer_count=3, buffer_size=2048, max_in_cpu=500, dtype=torch.bfloat16) as s:
        s.add("kept", torch.ones(20, 20))
        s.add("wide", torch.ones(3000))
        assert s.fetch("kept").shape == (20, 20) and s.fetch("kept").dtype == torch.bfloat16
        with s.use("wide") as wide:
            assert wide.numel() == 3000
            s.add("other", torch.ones(4000))
            with pytest.raises(dsx_nvme.BudgetError, match="in use"):
                s.fetch("other")
        assert s.fetch("other").numel() == 4000
        with pytest.raises(dsx_nvme.BudgetError, match="do not fit"):
            s.add("huge", torch.ones(7000))
        with pytest.raises(dsx_nvme.NvmeError, match="more often"):
            s.release("wide")
        with pytest.raises(KeyError):
            s.fetch("none")


@pytest.mark.parametrize("max_in_cpu", [0, 100])
def test_a_parameter_added_again_has_its_new_values(max_in_cpu, tmp_path):
    with ParameterSwapper(tmp_path, buffer_count=4, buffer_size=4096, max_in_cpu=max_in_cpu) as s:
        for value, numel in enumerate((100, 100, 300, 50)):
            s.add("w", torch.full((numel,), float(value)))
            for _ in range(2):  # the second time from memory
                with s.use("w") as w:
                    assert w.shape == (numel,) and w.unique().tolist() == [value]
        s.add("x", torch.zeros(200))
        with s.use("x"), pytest.raises(dsx_nvme.NvmeError, match="in use; release it first"):
            s.add("x", torch.ones(200))
        with s.use("x", dirty=True) as x:
            x += 5
        s.add("x", torch.ones(200))  # the write under way does not come after it
        with s.use("x") as x:
            assert x.unique().tolist() == [1.0]


def test_prefetch_on_request_and_lost_files(tmp_path):
    with ParameterSwapper(tmp_path, buffer_count=3, buffer_size=3072) as s:
        names = layers(s)
        assert s.prefetch(*names) == 3
        assert s.fetch("layer1")[0] == 1.0 and s.counts.prefetched == 1
        s.release("layer1")
        os.truncate(s.store._file.path, 20_000)
        with pytest.raises(dsx_nvme.EndOfFileError):
            s.fetch("layer7")
        assert s.fetch("layer0")[0] == 0.0


class Listener:
    """An `on_transfer` that keeps what it hears."""

    def __init__(self):
        self.heard, self.open = [], 0

    def __call__(self, op, name, nbytes):
        self.open += 1
        self.heard.append((op, name, nbytes))

        def over():
            self.open -= 1

        return over


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_listener_hears_of_every_transfer_of_a_pass_once(pipelined, tmp_path):
    listener = Listener()
    with OptimizerSwapper(
        tmp_path, SIZES, buffer_size=4096, max_in_cpu=3000, pipeline_read=pipelined, pipeline_write=pipelined,
        on_transfer=listener,
    ) as swapper:  # fmt: skip
        most = 0
        for _ in swapper.sweep():
            most = max(most, listener.open)
        moving = [p for p in swapper.plan.pieces if not p.resident]
        names = sorted(f"{p.key}[{p.start}:{p.stop}]" for p in moving)
        for op, nbytes in (("read", swapper.times.bytes_read), ("write", swapper.times.bytes_written)):
            assert sorted(name for what, name, _ in listener.heard if what == op) == names
            assert sum(n for what, _, n in listener.heard if what == op) == nbytes
        assert listener.open == 0 and (most > 0) == pipelined
        swapper.get_state("a", "master")
        assert len(listener.heard) > 2 * len(moving) and listener.open == 0
        visits = swapper.sweep()
        next(visits)
        visits.close()  # a pass that is left in the middle
        assert listener.open == 0


def test_a_listener_hears_of_parameters_also_of_those_that_fail(tmp_path):
    listener = Listener()
    with ParameterSwapper(tmp_path, buffer_count=2, buffer_size=2048, on_transfer=listener) as swapper:
        for name in "abc":
            swapper.add(name, torch.ones(2000))
        with swapper.use("a", dirty=True):
            assert listener.open == 0
        swapper.fetch("b")
        begun = [("write", n, 8000) for n in "abc"]
        assert listener.heard == [*begun, ("read", "a", 8000), ("write", "a", 8000), ("read", "b", 8000)]
        swapper.release("b")
        with open(os.path.join(swapper.store.folder, "tensors.dat"), "r+b") as file:
            file.truncate(0)
        with pytest.raises(OSError):
            swapper.fetch("c")
    assert listener.open == 0
