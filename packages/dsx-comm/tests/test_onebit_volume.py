"""What the 1-bit optimizers send, counted, against the closed forms; and the gate that decides whether it pays."""

import dsx_comm
import pytest
import torch
from dsx_comm.compressed import OneBitLayout
from dsx_comm.onebit import Link, ZeroOnePolicy, onebit_rounds, zero_one_rounds
from dsx_comm.onebit.gate import estimate
from dsx_testkit import run_ranks

SHAPES = ((400, 300), (300,), (257, 129))
NUMEL = 400 * 300 + 300 + 257 * 129
UNCOUNTED = ("measure_link", "all_gather")  # once: the link is measured, and the ranks' parameters are compared


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


# - the gate


def test_the_estimate_is_arithmetic():
    layout = OneBitLayout.of(1_000_000, 2)
    slow = estimate(Link(latency=1e-3, rate=1e6, codec=1e-9), 1_000_000, 2, layout)
    assert slow.exact_bytes == 2_000_000 and slow.compressed_bytes == layout.sent_bytes
    assert slow.exact_seconds == pytest.approx(1e-3 + 2.0)
    assert slow.compressed_seconds == pytest.approx(2e-3 + layout.sent_bytes / 1e6 + 1e-3)
    assert slow.pays and "exact 2 MB" in str(slow)
    assert not estimate(Link(latency=1e-6, rate=1e12, codec=1e-9), 1_000_000, 2, layout).pays


def gated(rank, world, rate, wish):
    import dsx_comm.onebit.gate as gate

    measurements = []
    gate.measure = lambda *a: measurements.append(a) or Link(latency=1e-5, rate=rate, codec=1e-9)
    params = [torch.nn.Parameter(torch.ones(100_000))]
    optimizer = dsx_comm.OneBitAdam(params, freeze_step=1, compression=wish)
    local = []
    with dsx_comm.count_traffic() as traffic:
        for _ in range(3):
            local.append(optimizer.takes_local_gradients)
            params[0].grad = torch.ones(100_000)
            optimizer.step()
    return (
        local,
        traffic.calls("compressed_all_reduce"),
        optimizer.last_traffic.gain_seconds,
        optimizer.clock.variance_steps,
        len(measurements),
    )


@pytest.mark.parametrize(
    ("rate", "wish", "compresses"),
    [(1e6, "auto", True), (1e13, "auto", False), (1e13, "on", True), (1e6, "off", False)],
)
def test_auto_compresses_where_it_pays(rate, wish, compresses):
    for local, calls, gain, variance_steps, measurements in run_ranks(gated, 2, rate, wish):
        assert local == [False, compresses, compresses]
        assert calls == (2 if compresses else 0) and variance_steps == (1 if compresses else 3)
        assert measurements == (wish == "auto"), "the link is measured where the answer depends on it, and only there"
        assert (gain is None) if wish != "auto" else (gain > 0) == (compresses and rate < 1e9)


def measured(rank, world):
    params = [torch.nn.Parameter(torch.ones(50_000))]
    optimizer = dsx_comm.OneBitAdam(params, freeze_step=1, compression="auto")
    with dsx_comm.count_traffic() as traffic:
        params[0].grad = torch.ones(50_000)
        optimizer.step()
    found = optimizer.last_traffic.estimate
    assert traffic.calls("measure_link") > 0 and found.exact_seconds > 0 and found.compressed_seconds > 0
    assert "sent 200000 B, uncompressed 200000 B, estimated gain 0.00 ms" in str(optimizer.last_traffic)
    return found, optimizer.takes_local_gradients


def test_the_link_is_measured_and_ranks_agree():
    first, second = run_ranks(measured, 2)
    assert first == second and first[1] == first[0].pays
