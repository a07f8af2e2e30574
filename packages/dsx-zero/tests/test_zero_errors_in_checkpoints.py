"""Errors of quantised messages in slices, and what ranks have of each other's parameters: a job of the same ranks goes
on with the same bits; in one of other ranks what is to be made up for is, over all of them, what it was.
"""

import copy

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_comm.compressed import QuantizationFeedback
from dsx_comm.compressed.blocks import BlockFormat
from dsx_testkit import Nodes, assert_close_named, run_ranks, tiny

EXACT = {"stage": 3, "stage3_param_persistence_threshold": 0}
FEEDBACK = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_weights_bits": 4,
    "zero_quantized_gradients": True,
    "zero_quantized_gradients_bits": 2,
    "zero_quantized_error_feedback": True,
}
LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64}}
FORGETFUL = {**LOCO, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 5}}  # behind the second step after the save


def test_errors_that_are_put_back_count_as_before():
    form, rows = BlockFormat(2, 4), torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    first, second = QuantizationFeedback(0.5), QuantizationFeedback(0.5)
    for _ in range(3):
        first.advance()
        first.encode(0, rows, form)
    assert second.held() == {} and set(first.held()) == {0}
    second.put(first.held())
    assert torch.equal(second.held()[0], first.held()[0])
    for _ in range(3):
        first.advance()
        second.advance()
        assert torch.equal(first.encode(0, rows, form), second.encode(0, rows, form))
        assert torch.equal(first.held(upcoming=False)[0], second.held(upcoming=False)[0])
    second.put({})
    assert second.held() == {}


class Slices:
    """A reader of what ranks have given as slices, as a checkpoint is one."""

    def __init__(self, everybody):
        self.parts = [part for slices in everybody for part in slices]

    def _whole(self, name, pick, numel):
        found, out = False, None
        for part in self.parts:
            if part["name"] != name:
                continue
            for start, values in pick(part):
                out = torch.zeros(numel(part), dtype=values.dtype) if out is None else out
                out[start : start + values.numel()] = values
                found = True
        return out if found else None

    def _get(self, name, start, stop, pick):
        whole = self._whole(name, pick, lambda part: part["numel"])
        return None if whole is None else whole[start:stop]

    def param(self, name, start, stop):
        return self._get(name, start, stop, lambda part: [(part["start"], part["param"])])

    def master(self, name, start, stop):
        return self._get(name, start, stop, lambda part: [(part["start"], part["master"])])

    def state_keys(self, name):
        mine = [part for part in self.parts if part["name"] == name]
        return tuple(sorted({key for part in mine for key in (*part["states"], *(k for k, *_ in part["ranges"]))}))

    def state(self, key, name, start, stop):
        numbers = [part["states"][key] for part in self.parts if part["name"] == name and key in part["states"]]
        if "@" in key and numbers:
            assert len(set(numbers)) == 1
            return numbers[0]
        if "@" in key:
            return self._get(name, start, stop, lambda part: [(s, v) for k, s, v in part["ranges"] if k == key])
        found = [part["states"][key] for part in self.parts if part["name"] == name and key in part["states"]]
        if not isinstance(found[0], torch.Tensor) or found[0].dim() == 0:
            return found[0]
        return self._get(
            name, start, stop, lambda part: [(part["start"], part["states"][key])] if key in part["states"] else []
        )


def saved(optimizer):
    return [
        {
            "name": s.name,
            "start": s.start,
            "numel": torch.Size(s.shape).numel(),
            "param": s.param.clone(),
            "master": s.master.clone(),
            "states": {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.states.items()},
            "ranges": [(k, start, v.clone()) for k, start, v in s.ranges],
        }
        for s in optimizer.slices()
    ]


def make(config):
    return dsx_zero.shard(tiny.TinyGPT(), lambda p: torch.optim.AdamW(p, lr=5e-3), config={**EXACT, **config})


def step(model, optimizer, number, rank):
    model.loss(*model.example(2, seed=100 * number + rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def resumes(rank, world, config, devices):
    with Nodes(world, devices).environment(rank):
        model, optimizer = make(config)
        for number in range(3):
            step(model, optimizer, number, rank)
        mine = saved(optimizer)
        assert any(key.startswith("gradient_error@") for part in mine for key, *_ in part["ranges"])
        local = copy.deepcopy(optimizer.state_dict())
        everybody = [None] * world
        dsx_comm.all_gather_object(everybody, mine)
        for number in (3, 4):
            step(model, optimizer, number, rank)
        want = whole(model)
        for load in (lambda o: o.load_slices(Slices(everybody)), lambda o: o.load_state_dict(local)):
            other, resumed = make(config)
            step(other, resumed, 77, rank)  # errors of its own, which go
            load(resumed)
            for number in (3, 4):
                step(other, resumed, number, rank)
            assert_close_named(whole(other), want, rtol=0, atol=0)
            resumed.release()
        # without the errors it is another training
        other, forgetful = make(config)
        for part in everybody:
            for found in part:
                found["ranges"] = []
        forgetful.load_slices(Slices(everybody))
        for number in (3, 4):
            step(other, forgetful, number, rank)
        assert any(not torch.equal(a, b) for a, b in zip(whole(other).values(), want.values()))


@pytest.mark.parametrize(
    ("world", "devices", "config"),
    [
        (4, 2, FEEDBACK),
        (2, 2, {**FEEDBACK, "stage": 3}),
        (4, 2, {**FEEDBACK, "zero_quantized_weights_bits": 2, "zero_quantized_gradients_bits": 4}),
        (4, 2, {**LOCO, "stage": 2}),
        (2, 1, FORGETFUL),
    ],
    ids=["two hops", "one hop", "2 and 4 bits", "LoCo at stage 2", "LoCo that forgets in between"],
)
def test_a_job_of_the_same_ranks_resumes_with_the_same_bits(world, devices, config):
    run_ranks(resumes, world, config, devices, timeout=200)


def between(rank, world):
    """A job that has run an evaluation since its last step had sent the values of that step already."""
    with Nodes(world, 2).environment(rank):
        model, optimizer = make(FEEDBACK)
        for number in range(3):
            step(model, optimizer, number, rank)
        x = model.example(2, seed=9)
        with torch.no_grad():
            want = [model.loss(*x)]
        everybody = [None] * world
        dsx_comm.all_gather_object(everybody, saved(optimizer))
        other, resumed = make(FEEDBACK)
        resumed.load_slices(Slices(everybody))
        again = [None] * world
        dsx_comm.all_gather_object(again, saved(resumed))  # saved before anything has run
        third, last = make(FEEDBACK)
        last.load_slices(Slices(again))
        for one, stepped in ((model, optimizer), (other, resumed), (third, last)):
            with torch.no_grad():
                assert torch.equal(one.loss(*x), want[0])
            step(one, stepped, 3, rank)
        for one in (other, third):
            assert_close_named(whole(one), whole(model), rtol=0, atol=0)


def test_values_that_were_sent_before_the_save_are_those_behind_it():
    run_ranks(between, 4, timeout=120)


def at_work(rank, world):
    with Nodes(world, 2).environment(rank):
        model, optimizer = make(FEEDBACK)
        for number in range(3):
            step(model, optimizer, number, rank)
        return saved(optimizer)


def missing(parts):
    """What is to be made up for, by parameter: of gradients the mean over the ranks, of parameters each element's."""
    gradients, weights = {}, {}
    world = len({key for part in parts for key, *_ in part["ranges"] if key.startswith("gradient_error@")})
    for part in parts:
        for key, start, values in part["ranges"]:
            kind = weights if key.startswith("weight") else gradients
            total = kind.setdefault(part["name"], torch.zeros(part["numel"]))
            total[start : start + values.numel()] += values if kind is weights else values / world
    return gradients, weights


def elsewhere(rank, world, everybody):
    with Nodes(world, 1).environment(rank):
        _, optimizer = make(FEEDBACK)
        optimizer.load_slices(Slices(everybody))
        return saved(optimizer)


def test_another_number_of_ranks_makes_up_for_the_same():
    everybody = run_ranks(at_work, 4, timeout=100)
    before = missing([part for slices in everybody for part in slices])
    after = missing([part for slices in run_ranks(elsewhere, 2, everybody, timeout=100) for part in slices])
    for old, new in zip(before, after):
        assert old.keys() == new.keys() and len(old) > 5
        assert_close_named(new, old, rtol=1e-5, atol=1e-8)
        assert max(value.abs().max() for value in old.values()) > 0


def alone(rank, world, everybody):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("dsx_zero.transports.errors")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    _, optimizer = make({})
    optimizer.load_slices(Slices(everybody))
    return said


def test_a_job_without_feedback_says_that_errors_are_lost():
    (said,) = run_ranks(alone, 1, run_ranks(at_work, 4, timeout=100))
    assert len(said) == 1 and "not made up for" in said[0]
