"""Units that are stepped on the host before the norm is known: kept, or undone bit by bit and made again."""

from __future__ import annotations

import copy
import errno
import random

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny
from dsx_testkit.early_steps import CLIP, CountedSteps, everything, same_bits, strengths, update

pytest.importorskip("dsx_ops")

WIDTH = 12


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)


def lion(parameters):
    import dsx_ops

    return dsx_ops.FusedLion(parameters, lr=1e-3)


OPTIMIZERS = {
    "fused": fused,
    "lion": lion,
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}


class Net(tiny.Residual):
    """Its gradients are as large as `strength`, which a test sets."""

    strength = 1.0

    def forward(self, x):
        return super().forward(x) * self.strength


def built(
    early, kind="fused", stage=2, dtype=torch.float32, depth=3, check=None, store=None, offload_param="none", **section
):
    torch.manual_seed(3)
    config = {
        "stage": stage,
        "reduce_bucket_size": WIDTH * WIDTH + WIDTH,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", "step_during_backward": early, **section},
    }
    if offload_param != "none":
        config["offload_param"] = {"device": offload_param, "nvme_path": "unused", "max_in_cpu": 1300}
    model = Net(WIDTH, 3, dtype=dtype)
    precision = dsx_zero.Precision()
    optimizer = OPTIMIZERS[kind] if isinstance(kind, str) else kind
    return dsx_zero.shard(model, optimizer, config=config, precision=precision, store=store)


def sequences(rank, world, kind, stage, dtype, number, micro=1):
    """Random sequences of three steps, each with the same bits as the plain order."""
    chance = random.Random(f"{kind} {stage} {dtype}")
    plain = built(False, kind, stage, dtype)
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        early = built(True, kind, stage, dtype)
        for sequence in range(number):
            # In fp32 nothing is checked: what is not finite would stay in the parameters.
            for step, strength in enumerate(strengths(chance, 3, finite=dtype == torch.float32)):
                scale = chance.choice((1.0, 8.0, 3.0))
                batches = [early[0].batch(rank, 100 * sequence + 10 * step + part) for part in range(micro)]
                said = update(*plain, batches, strength, scale)
                assert repr(said) == repr(update(*early, batches, strength, scale, counted))
                if sequence % 5 == 4 or number < 20:
                    assert same_bits(everything(*plain), everything(*early)), (sequence, step)
        assert same_bits(everything(*plain), everything(*early))
    for _, optimizer in (plain, early):
        optimizer.release()
    return counted.announced, counted.stepped, counted.undone


CASES = [
    ("fused", 2, torch.bfloat16, 1),
    ("adamw", 2, torch.float16, 1),
    ("sgd", 1, torch.float32, 2),
    ("rmsprop", 3, torch.bfloat16, 1),
    ("lion", 3, torch.float32, 2),
]


@pytest.mark.parametrize(("kind", "stage", "dtype", "world"), CASES)
def test_random_sequences_have_the_bits_of_the_plain_order(kind, stage, dtype, world):
    for announced, stepped, undone in run_ranks(sequences, world, kind, stage, dtype, 12):
        assert announced > 5 and stepped > 10 and undone > 1


def accumulated(rank, world, place, nvme, folder):
    """Masters and states on disk, or fp32 parameters in host memory; two micro-batches per update."""
    import dsx_nvme

    section = {"device": "nvme", "nvme_path": "unused"} if nvme else {}
    chance, pairs = random.Random(place), []
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        for on in (False, True):
            store = dsx_nvme.TensorStore(f"{folder}/{place}.{on}.{rank}") if nvme else None
            pairs.append(built(on, "fused", 3, torch.float32, store=store, offload_param=place, **section))
        for step, strength in enumerate((1e-3, 1e-3, 30.0, 1e-3, 1e-3, 30.0, 30.0, 1e-3, 1e-3)):
            scale = chance.choice((1.0, 4.0))
            said = []
            for model, optimizer in pairs:
                batches = [model.batch(rank, 10 * step + part) for part in range(2)]
                noting = counted if optimizer is pairs[1][1] else None
                said.append(update(model, optimizer, batches, strength, scale, noting))
            assert repr(said[0]) == repr(said[1])
            assert same_bits(*(everything(*pair) for pair in pairs)), step
    for _, optimizer in pairs:
        optimizer.release()
    return counted.announced, counted.stepped, counted.undone


@pytest.mark.parametrize(("place", "nvme"), [("none", True), ("cpu", True), ("nvme", True), ("cpu", False)])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_and_every_place_of_states_and_parameters(place, nvme, world, tmp_path):
    for announced, stepped, undone in run_ranks(accumulated, world, place, nvme, str(tmp_path)):
        assert (announced, undone) == (5, 2) and stepped >= 15


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_random_sequences(dtype):
    ((announced, _, undone),) = run_ranks(sequences, 1, "fused", 2, dtype, 1000, timeout=1200)
    assert announced > 1000 and undone > 200


# What happens between backward and step -------------------------------------------------------------------------------


def change_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def clip_by_hand(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)


def set_gradient(model, optimizer):
    p = next(iter(model.parameters()))
    dsx_zero.safe_set_full_grad(p, torch.full(p.shape, 1e-3))


def drop_gradients(model, optimizer):
    model.zero_grad()


def write_parameter(model, optimizer):
    with torch.no_grad(), dsx_zero.GatheredParameters(model, modifier_rank=0):
        model.blocks[2].weight.mul_(0.5)


def another_backward(model, optimizer):
    model(model.batch(optimizer.runtime.ranks.rank, 77)).backward()


def forget_and_begin_again(model, optimizer):
    optimizer.zero_grad()
    optimizer.step_during_backward(max_norm=CLIP)
    another_backward(model, optimizer)


def read_master(model, optimizer):
    assert dsx_zero.safe_get_full_fp32_param("blocks.0.weight", optimizer=optimizer) is not None


def save_and_load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move_states_away(model, optimizer):
    optimizer.offload_states()
    optimizer.reload_states()


def read_gradient(model, optimizer):
    assert dsx_zero.safe_get_full_grad("blocks.0.weight", optimizer=optimizer) is not None


CHANGES = [change_rate, clip_by_hand, set_gradient, drop_gradients, write_parameter, another_backward,
           forget_and_begin_again, read_master, save_and_load, move_states_away, read_gradient]  # fmt: skip


def changed(rank, world, stage, change, store, folder):
    def run(on):
        disk = None
        if store:
            import dsx_nvme

            disk = dsx_nvme.TensorStore(f"{folder}/{on}.{rank}")
        section = {"device": "nvme", "nvme_path": "unused"} if store else {}
        model, optimizer = built(on, "fused", stage, store=disk, **section)
        said = []
        for step in range(4):
            said.append(optimizer.step_during_backward(max_norm=CLIP))
            model.strength = 1e-3
            model(model.batch(rank, step)).backward()
            if step == 2:
                change(model, optimizer)
            optimizer.step(max_norm=CLIP)
            optimizer.zero_grad()
        found = everything(model, optimizer)
        optimizer.release()
        return said, found

    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        said, found = run(True)
    none, wanted = run(False)
    assert not any(none) and said[1:3] == [True, True] and counted.stepped
    assert same_bits(found, wanted)
    assert counted.undone == (change is not read_gradient)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_backward_and_step_means_what_it_says(change, tmp_path):
    run_ranks(changed, 1, 2, change, change in (change_rate, read_master, another_backward), str(tmp_path))


@pytest.mark.parametrize("change", [another_backward, write_parameter, save_and_load], ids=lambda c: c.__name__)
def test_a_change_at_stage_3_of_two_ranks(change, tmp_path):
    run_ranks(changed, 2, 3, change, False, str(tmp_path))


def breaking(error):
    import dsx_ops

    class Breaks(dsx_ops.FusedAdam):
        left = -1

        def step_flat(self, param, *args, **options):
            super().step_flat(param, *args, **options)  # half of the work is done
            type(self).left -= 1
            if type(self).left == 0:
                raise error

    return Breaks


def failing(rank, world, error, heals):
    """One rank's optimizer fails in the middle of the step during backward."""
    kind = breaking(error)
    model, optimizer = built(True, lambda p: kind(p, lr=1e-2))
    for step in range(2):
        optimizer.step_during_backward(max_norm=CLIP)
        model.strength = 1e-3
        model(model.batch(rank, step)).backward()
        if step == 0:
            optimizer.step(max_norm=CLIP)
            optimizer.zero_grad()
            before = everything(model, optimizer)
            kind.left = 3 if rank == world - 1 else -1
    if not heals:
        with pytest.raises(dsx_zero.ZeroStateError, match=f"rank {world - 1}: .*{error}"):
            optimizer.step(max_norm=CLIP)
        assert same_bits(everything(model, optimizer), before)  # on every rank: a checkpoint can be saved
    optimizer.step(max_norm=CLIP)  # the gradients are there
    optimizer.zero_grad()
    other, plain = built(False)
    plain.param_groups[0]["weight_decay"] = 0.0
    for step in range(2):
        other.strength = 1e-3
        other(other.batch(rank, step)).backward()
        plain.step(max_norm=CLIP)
        plain.zero_grad()
    found, wanted = everything(model, optimizer), everything(other, plain)
    assert same_bits(found, wanted)


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_undoes_the_step_on_all_ranks(world):
    run_ranks(failing, world, RuntimeError("the host has had enough"), False)


def test_without_space_beside_the_old_values_the_step_is_made_after_backward():
    run_ranks(failing, 2, OSError(errno.ENOSPC, "no space"), True)


# Where it pays --------------------------------------------------------------------------------------------------------


def said_by(rank, world, section):
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        config = {"stage": 2, "reduce_bucket_size": 200, "offload_optimizer": {"device": "cpu", **section}}
        model, optimizer = dsx_zero.shard(Net(WIDTH, 3), fused, config=config)
        for step in range(3):
            update(model, optimizer, [model.batch(rank, step)], 1e-3, 1.0, counted)
        copied = optimizer.state_bytes_by_tier()["optimizer"]["host"]
        held = 8 * sum(m.numel for name, _ in model.named_parameters() for m in optimizer.layout.masters_of(name))
        optimizer.release()
    return counted.announced, counted.stepped, (copied - held) // 12


def test_on_a_cpu_nothing_is_speculated_unless_it_is_asked_for():
    assert run_ranks(said_by, 1, {}) == [(0, 0, 0)]
    ((announced, stepped, copied),) = run_ranks(said_by, 1, {"step_during_backward": True})
    assert (announced, copied) == (2, 3 * (WIDTH * WIDTH + WIDTH)) and stepped >= 4


def test_copies_of_old_values_are_bounded():
    room = {"step_during_backward": True, "max_in_cpu": 2 * (WIDTH * WIDTH + WIDTH)}
    ((announced, stepped, copied),) = run_ranks(said_by, 1, room)
    assert announced == 2 and stepped >= 2 and 0 < copied <= room["max_in_cpu"]


def test_after_a_clipped_step_the_norm_is_waited_for():
    """The cost of a wrong guess is paid once where every step is clipped."""

    def clipped(rank, world):
        with pytest.MonkeyPatch.context() as patch:
            counted = CountedSteps(patch)
            model, optimizer = built(True)
            for step, strength in enumerate((1e-3, 30.0, 30.0, 30.0, 1e-3, 1e-3)):
                update(model, optimizer, [model.batch(rank, step)], strength, 1.0, counted)
        assert (counted.announced, counted.undone) == (2, 1)

    run_ranks(clipped, 1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_update_of_sgd_follows_bit_by_bit_from_that_of_another_factor(momentum):
    """Why a wrong guess is undone and not rescaled (decision 0065): even p - lr g, without any state, rounds."""
    torch.manual_seed(0)
    values, grad, lr, clipped = torch.randn(1000), torch.randn(1000), 0.1, 0.37

    def stepped(factor):
        parameter = torch.nn.Parameter(values.clone())
        parameter.grad = grad * factor
        torch.optim.SGD([parameter], lr=lr, momentum=momentum).step()
        return parameter.detach()

    speculated, right = stepped(1.0), stepped(clipped)
    rescaled = values + (speculated - values) * clipped  # from the finished update and the old value
    without_old = speculated + lr * grad * (1.0 - clipped)  # from the finished update and the gradient
    for found in (rescaled, without_old):
        torch.testing.assert_close(found, right)
        assert not torch.equal(found, right)
    assert not torch.equal(speculated + lr * grad, values)  # nor does the inverse give the old value


def narrow(rank, world, stage, store_folder):
    """The compiled step reads 16-bit gradients itself: the same bits as from widened ones."""
    import dsx_nvme
    import dsx_ops

    seen, step_flat = [], dsx_ops.FusedAdam.step_flat

    def noting(self, param, grad, *args, **options):
        seen.append(grad.dtype)
        return step_flat(self, param, grad, *args, **options)

    found = []
    for takes in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dsx_ops.FusedAdam, "takes_16_bit_gradients", takes)
            patch.setattr(dsx_ops.FusedAdam, "step_flat", noting)
            seen.clear()
            store = dsx_nvme.TensorStore(f"{store_folder}/{takes}.{rank}") if store_folder else None
            section = {"device": "nvme", "nvme_path": "unused"} if store_folder else {"max_in_cpu": 10**6}
            model, optimizer = built(True, "fused", stage, torch.bfloat16, store=store, **section)
            said = [
                update(model, optimizer, [model.batch(rank, step)], s, 4.0) for step, s in enumerate((1e-3, 1e-3, 30.0))
            ]
            found.append((repr(said), everything(model, optimizer)))
            optimizer.release()
        # The first step is not stepped during backward, and is one call for all masters.
        assert seen and set(seen) == {torch.bfloat16 if takes else torch.float32}
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize(("stage", "disk", "world"), [(2, False, 1), (3, True, 2)])
def test_16_bit_gradients_go_to_the_kernel_as_they_are(stage, disk, world, tmp_path):
    run_ranks(narrow, world, stage, str(tmp_path) if disk else "")
