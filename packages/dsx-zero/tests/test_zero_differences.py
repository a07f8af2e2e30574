"""Parameters in 4 and 2 bits as differences to a second copy: what ranks compute with stays within a part of one step
of the exact parameters, comes ever closer where they rest, and is exact after a load or an edit.
"""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import Nodes, run_ranks, tiny

CONFIG = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
}


def make(bits, *, lr=5e-3, model=None, **more):
    config = {**CONFIG, "zero_quantized_weights_bits": bits, **more}
    # SGD's steps are of very different sizes, and some are nothing: the hardest case for blocks with one scale.
    return dsx_zero.shard(model or tiny.TinyGPT(), lambda p: torch.optim.SGD(p, lr=lr), config=config)


def train(model, optimizer, rank, step):
    loss = model.loss(*model.example(2, seed=100 * step + rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def computed_with(optimizer):
    """The parameters as a forward has them, by name."""
    stage, have = optimizer.runtime.publisher, {}
    for unit in stage.partitioned:
        with stage.lifetime.gathered([unit.index]):
            for group in unit.groups:
                for name, parameter in zip(group.layout.names, group.parameters):
                    have[name] = parameter.detach().clone()
    return have


def whole(model):
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


def farthest(left, right):
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


def close(rank, world, bits, dtype):
    with Nodes(world, 2).environment(rank):
        model, optimizer = make(bits, model=tiny.TinyGPT().to(dtype))
        assert farthest(computed_with(optimizer), whole(model)) == 0.0  # the first values are sent as they are
        for step in range(4):
            before = computed_with(optimizer)
            train(model, optimizer, rank, step)
            exact, have = whole(model), computed_with(optimizer)
            left = farthest(before, exact)  # a difference of this size was sent
            digits = 0 if dtype == torch.float32 else max(v.abs().max().item() for v in exact.values()) / 128
            assert 0 < farthest(have, exact) <= left / {4: 14, 2: 1.1}[bits] + 1e-6 + digits, (bits, step)
            for value in have.values():  # the same bits on all ranks
                first = value.clone()
                dsx_comm.broadcast(first, 0)
                assert torch.equal(first, value)
            assert farthest(computed_with(optimizer), have) == 0.0  # a second gather reads the copy
        stayed = [farthest(have, exact)]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for step in range(8):
            train(model, optimizer, rank, step)
            stayed.append(farthest(computed_with(optimizer), exact))
        assert farthest(whole(model), exact) == 0.0
        assert stayed[-1] <= (1e-6 if bits == 4 else stayed[0]) + digits / 4, stayed


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (2, torch.float32), (4, torch.bfloat16)])
def test_what_ranks_compute_with_is_within_a_part_of_a_step(bits, dtype):
    run_ranks(close, 4, bits, dtype, timeout=120)


def replaced(rank, world):
    """Values that no step has made may be far from the copy: they are sent as they are."""
    model, optimizer = make(4)
    for step in range(2):
        train(model, optimizer, rank, step)
    assert farthest(computed_with(optimizer), whole(model)) > 0
    parameters = dict(model.named_parameters())
    edits = [
        lambda: parameters["blocks.0.up.weight"].data.mul_(100.0),
        lambda: dsx_zero.safe_set_full_fp32_param(
            parameters["blocks.1.up.weight"], torch.full_like(whole(model)["blocks.1.up.weight"], 7.0)
        ),
        lambda: optimizer.load_slices(Weights(9.0)),
    ]
    for edit in edits:
        edit()
        have, exact = computed_with(optimizer), whole(model)
        touched = [name for name in have if exact[name].abs().max() > 5]
        assert touched
        for name in touched:
            assert torch.equal(have[name], exact[name]), name
    assert farthest(computed_with(optimizer), whole(model)) == 0.0
    train(model, optimizer, rank, 5)
    assert farthest(computed_with(optimizer), whole(model)) > 0  # and differences follow


class Weights:
    """A reader of parameters alone, all of them one value."""

    def __init__(self, value):
        self.value = value

    def param(self, name, start, stop):
        return torch.full((stop - start,), self.value)

    def master(self, name, start, stop):
        return None

    def state_keys(self, name):
        return ()

    def state(self, key, name, start, stop):
        return None


def test_loads_and_edits_are_sent_as_they_are():
    run_ranks(replaced, 2, timeout=100)


def training(rank, world):
    """Losses of 12 steps of Adam, from exact gradients: the parameters alone are quantised."""
    with Nodes(world, 2).environment(rank):
        found = {}
        for bits in (0, 8, 4, 2):
            config = {**CONFIG, "zero_quantized_weights_bits": bits}
            if not bits:
                config = {"stage": 3, "stage3_param_persistence_threshold": 0}
            model, optimizer = dsx_zero.shard(tiny.TinyGPT(), lambda p: torch.optim.AdamW(p, lr=5e-3), config=config)
            found[bits] = [mean(train(model, optimizer, rank, step), world) for step in range(12)]
            optimizer.release()
        for bits, bound in ((8, 0.01), (4, 0.001), (2, 0.01)):
            off = max(abs(a - b) / b for a, b in zip(found[bits], found[0]))
            assert 0 < off < bound, (bits, off)


def mean(value, world):
    total = value.clone()
    dsx_comm.all_reduce(total)
    return total.item() / world


def test_training_is_that_of_exact_parameters():
    run_ranks(training, 4, timeout=150)


def frozen(rank, world):
    model = tiny.TinyGPT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name)
    model, optimizer = make(2, model=model)
    for step in range(2):
        train(model, optimizer, rank, step)
    have, exact = computed_with(optimizer), whole(model)
    for name in have:  # what is not trained is sent once, as it is
        assert torch.equal(have[name], exact[name]) == ("up" not in name), name


def test_frozen_parameters_stay_exact():
    run_ranks(frozen, 2, timeout=100)


def memory(rank, world):
    """Beside the second copy a rank keeps what the others have of its shard."""
    with Nodes(world, 2).environment(rank):
        model, optimizer = make(4)
        for step in range(2):
            train(model, optimizer, rank, step)
        numel = sum(g.layout.numel for u in optimizer.runtime.units for g in u.groups)
        kept = sum(t.nbytes for t in optimizer.runtime.publisher.executor.kept_tensors())
        assert kept == 4 * numel // 2 + 4 * numel // world


def test_what_it_keeps():
    run_ranks(memory, 4, timeout=60)


REFUSED = [
    ({"zero_hpz_partition_size": 1}, "zero_quantized_weights_bits", "set zero_hpz_partition_size"),
    ({"zero_quantized_error_feedback": True}, "zero_quantized_error_feedback", "gradients are not quantised"),
    (
        {"zero_quantized_weights": False, "zero_quantized_nontrainable_weights": True},
        "zero_quantized_weights_bits",
        "differences of parameters that are trained",
    ),
]


@pytest.mark.parametrize(("more", "key", "reason"), REFUSED)
def test_what_has_no_second_copy_is_refused(more, key, reason):
    with pytest.raises(dsx_zero.ZeroConfigError, match=reason) as caught:
        make(2, **more)
    assert f"zero_optimization.{key}" in str(caught.value)
