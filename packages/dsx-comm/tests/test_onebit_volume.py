"""What the 1-bit optimizers send, counted, against the closed forms; nothing is sent to find out whether it pays."""

import dsx_comm
import pytest
import torch
from dsx_comm.onebit import ZeroOnePolicy, onebit_rounds, zero_one_rounds
from dsx_testkit import run_ranks

SHAPES = ((400, 300), (300,), (257, 129))
NUMEL = 400 * 300 + 300 + 257 * 129
UNCOUNTED = ("all_gather",)  # once: the ranks' parameters are compared


def count(rank, world, name, settings, steps):
    """Bytes that this rank sent, by kind of step, and what the optimizer says of it."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in SHAPES]
    optimizer = getattr(dsx_comm, name)(params, gradient_dtype=torch.float16, **settings)
    by_kind, said = {}, 0
    with dsx_comm.count_traffic() as everything:
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 10 + rank + i))
            with dsx_comm.count_traffic() as traffic:
                optimizer.step()
            moved = sum(b for op, (_, b) in traffic.by_op().items() if op not in UNCOUNTED)
            by_kind.setdefault(optimizer.last_traffic.kind.value, set()).add(moved)
            said += optimizer.last_traffic.sent
    total = sum(b for op, (_, b) in everything.by_op().items() if op not in UNCOUNTED)
    assert said == pytest.approx(total)
    return total, by_kind


@pytest.mark.parametrize("world", [2, 3])
def test_onebit_adam_sends_4_9_times_less_than_fp16_adam(world):
    steps, freeze = 40, 6  # warm-up 15 %
    rounds = onebit_rounds(steps, freeze)
    for total, _ in run_ranks(count, world, "OneBitAdam", {"freeze_step": freeze}, steps):
        assert total == pytest.approx(rounds.sent_bytes(NUMEL, world), rel=5e-3)
        fp16 = 2 * (world - 1) / world * NUMEL * 2 * steps
        assert fp16 / total >= 4.9
    assert rounds.reduction() == pytest.approx(1 / (0.15 + 0.85 / 16))


def test_onebit_lamb_sends_as_much():
    for total, _ in run_ranks(count, 2, "OneBitLamb", {"freeze_step": 3}, 20):
        assert total == pytest.approx(onebit_rounds(20, 3).sent_bytes(NUMEL, 2), rel=5e-3)


def test_zero_one_adam_sends_25_times_less_on_the_published_schedule():
    """Every kind of round counted on a short run, the long schedule driven by arithmetic."""
    short = {"var_freeze_step": 12, "var_update_scaler": 2, "local_step_scaler": 6, "local_step_clipper": 4}
    rounds = zero_one_rounds(48, ZeroOnePolicy(**short))
    (total, kinds), _ = run_ranks(count, 2, "ZeroOneAdam", short, 48)
    assert total == pytest.approx(rounds.sent_bytes(NUMEL, 2), rel=5e-3)
    assert set(kinds) == {"exact", "one_bit", "local", "sync"} and kinds["local"] == {0}
    ((exact,), (one_bit,), (sync,)) = kinds["exact"], kinds["one_bit"], kinds["sync"]
    assert exact == NUMEL * 2 and one_bit == sync
    published = zero_one_rounds(118_000, ZeroOnePolicy(var_freeze_step=12_500))
    counted = exact * published.steps / (exact * published.exact + one_bit * published.one_bit)
    assert counted >= 25
    assert counted == pytest.approx(published.reduction(), rel=5e-3)
    assert published.reduction() == pytest.approx(25.9, abs=0.05)


@pytest.mark.parametrize(
    ("steps", "policy", "fp16", "fp32"),
    [
        (4000, ZeroOnePolicy(300, local_step_scaler=500), 27.2, 37.4),
        (150_000, ZeroOnePolicy(12_500), 31.4, None),
        (100, ZeroOnePolicy(100, var_update_scaler=10**9), 1.0, 1.0),
    ],
)
def test_the_closed_form_of_zero_one_adam(steps, policy, fp16, fp32):
    rounds = zero_one_rounds(steps, policy)
    assert rounds.steps == steps and rounds.reduction(16) == pytest.approx(fp16, abs=0.05)
    assert fp32 is None or rounds.reduction(32) == pytest.approx(fp32, abs=0.05)


def buffers(rank, world):
    params = [torch.nn.Parameter(torch.randn(1000, 10))]
    optimizer = dsx_comm.OneBitAdam(params, freeze_step=1)
    params[0].grad = torch.ones(1000, 10)
    optimizer.step()
    return optimizer.error_bytes()


def test_memory_of_the_errors():
    for held in run_ranks(buffers, 2):
        assert held == pytest.approx(10_000 * (4 + 4 / 2), rel=1e-2)


# - no measurement, and none that is asked for


def one_step(rank, world, wish):
    params = [torch.nn.Parameter(torch.ones(100_000))]
    optimizer = dsx_comm.OneBitAdam(params, freeze_step=1, compression=wish)
    local, calls = [], []
    for _ in range(3):
        local.append(optimizer.takes_local_gradients)
        params[0].grad = torch.full((100_000,), rank + 1.0)
        with dsx_comm.count_traffic() as traffic:
            optimizer.step()
        calls.append({op: count for op, (count, _) in traffic.by_op().items()})
    return local, calls, optimizer.clock.variance_steps, str(optimizer.last_traffic)


@pytest.mark.parametrize(("wish", "compresses"), [("on", True), ("off", False)])
def test_compression_is_what_was_asked_for_and_sends_nothing_to_find_out(wish, compresses):
    for local, calls, variance_steps, text in run_ranks(one_step, 2, wish):
        assert local == [False, compresses, compresses]
        assert variance_steps == (1 if compresses else 3)
        exact = {"all_reduce_coalesced": 1}
        later = {"compressed_all_reduce": 1} if compresses else exact
        assert calls == [{**exact, "all_gather": 1}, later, later], "once the ranks' parameters are compared"
        assert text.startswith("step 3 (") and "sent" in text and "gain" not in text


def test_a_wish_to_measure_names_the_planner():
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="said by `dsx plan`"):
        dsx_comm.OneBitAdam([torch.nn.Parameter(torch.ones(1))], compression="auto")
