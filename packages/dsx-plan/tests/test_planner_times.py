"""Times of the cost model. Messages beside computation are hidden where a device has streams, and take the cores' time
on a CPU. The bytes of a matrix product come on top of its arithmetic on a device, and hide behind it on a CPU.
"""

import math
from dataclasses import replace

import pytest
from dsx_plan import Constants, Machine, MachineError
from dsx_plan.cost import simulate, stragglers
from dsx_plan.trace import ATTENTION, CAUSAL, COMPUTE, MESSAGE, OPERATOR, RATES, WAIT_MESSAGE, Message, Trace


def machine(device):
    found = replace(Machine.named("H100-SXM"), device=device, flops={"float32": 1e12}, link_bandwidth=1e9)
    constants = Constants(products=1.0, links=1.0, operator_seconds=0.0, message_seconds=0.0)
    return replace(found, constants=constants)


def traced():
    """A second of products, a message of one second, two seconds of products, and the wait for the message."""
    trace, rate = Trace(), RATES.index("float32")
    trace.messages.append(Message("all_reduce", inside=1e9, outside=0.0, ranks=2, hosts=1, small=False))
    trace.add(COMPUTE, OPERATOR, 10**12, rate=rate)
    trace.add(COMPUTE, MESSAGE, 0)
    trace.add(COMPUTE, OPERATOR, 2 * 10**12, rate=rate)
    trace.add(COMPUTE, WAIT_MESSAGE, 0)
    return trace


@pytest.mark.parametrize(("device", "step", "exposed"), [("cuda", 3.0, 0.0), ("cpu", 4.0, 1.0)])
def test_a_message_beside_products(device, step, exposed):
    trace = traced()
    found = simulate(trace, [(0, len(trace), 1)], machine(device), ranks_per_host=2)
    assert found.step == pytest.approx(step) and found.exposed_communication == pytest.approx(exposed)
    assert found.communication == pytest.approx(1.0) and found.products == pytest.approx(3.0)


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 1.25), ("cpu", 1.0)])
def test_a_product_and_its_bytes(device, seconds):
    here = machine(device)
    moved = int(here.memory_bandwidth * here.constants.memory / 4)
    trace = Trace()
    trace.add(COMPUTE, OPERATOR, 10**12, moved, rate=RATES.index("float32"))
    trace.add(COMPUTE, OPERATOR, 0, moved)
    found = simulate(trace, [(0, len(trace), 1)], here, ranks_per_host=2)
    assert found.products == pytest.approx(seconds, rel=1e-6) and found.operators == pytest.approx(0.25, rel=1e-6)


def test_calibration_takes_the_bytes_off_what_it_measured_on_a_device():
    from dsx_plan.calibrate import _rate

    assert _rate(1e12, 1e9, 1.25, 4e9) == pytest.approx(1e12)
    assert _rate(1e12, 1e9, 1.25, None) == pytest.approx(0.8e12)  # a CPU
    assert _rate(1e12, 1e12, 1.0, 1e9) == pytest.approx(2e12)  # at most half of the time


@pytest.mark.parametrize(("share", "flags", "seconds"), [
    (0.0, ATTENTION, 1.0), (0.0, ATTENTION + CAUSAL, 1.0), (0.25, ATTENTION, 4.0), (0.25, ATTENTION + CAUSAL, 2.0),
])  # fmt: skip
def test_fused_attention_has_a_share_of_the_peak_of_its_own(share, flags, seconds):
    here = machine("cuda")
    trace = Trace()
    trace.add(COMPUTE, OPERATOR, 10**12, rate=RATES.index("float32") + flags)
    trace.add(COMPUTE, OPERATOR, 10**12, rate=RATES.index("float32"))
    here = replace(here, constants=replace(here.constants, attention=share))
    found = simulate(trace, [(0, 2, 1)], here, ranks_per_host=2)
    assert found.attention == pytest.approx(seconds) and found.products == pytest.approx(1.0)
    assert found.step == pytest.approx(seconds + 1.0)


def test_messages_slow_down_what_is_computed_beside_them():
    here = machine("cuda")
    here = replace(here, constants=replace(here.constants, interference=0.5))
    trace = traced()
    found = simulate(trace, [(0, len(trace), 1)], here, ranks_per_host=2)
    # One of the two seconds behind the message runs beside it.
    assert found.interference == pytest.approx(0.5) and found.step == pytest.approx(3.5)


def test_links_of_a_host_and_links_between_hosts_work_at_the_same_time():
    here = replace(machine("cuda"), network_bandwidth=1e9)
    inside = Message("all_gather", inside=1e9, outside=0.0, ranks=2, hosts=1, small=False)
    outside = Message("all_reduce", inside=0.0, outside=1e9, ranks=2, hosts=2, small=False)

    def step(*messages):
        trace = Trace()
        trace.messages.extend(messages)
        for number in range(len(messages)):
            trace.add(COMPUTE, MESSAGE, number)
        for number in range(len(messages)):
            trace.add(COMPUTE, WAIT_MESSAGE, number)
        return simulate(trace, [(0, len(trace), 1)], here, ranks_per_host=2).step

    assert step(inside, outside) == pytest.approx(1.0)
    assert step(inside, inside) == pytest.approx(2.0) and step(outside, outside) == pytest.approx(2.0)
    assert step(inside, replace(outside, inside=1e9)) == pytest.approx(2.0), "it needs both"


def test_the_slowest_rank_is_later_where_there_are_more():
    here = machine("cuda")
    assert stragglers(here, 1024) == 0.0
    uneven = replace(here, constants=replace(here.constants, jitter=0.01))
    assert stragglers(uneven, 1) == 0.0
    assert stragglers(uneven, 1024) == pytest.approx(0.01 * math.sqrt(2 * math.log(1024)))


@pytest.mark.parametrize("name", ["attention", "interference", "jitter"])
def test_shares_below_nothing_are_refused(name):
    with pytest.raises(MachineError, match=f"constants.{name}: got -0.1"):
        Constants(**{name: -0.1})
