"""Times of the cost model. Messages beside computation are hidden where a device has streams, and take the cores' time
on a CPU. The bytes of a matrix product come on top of its arithmetic on a device, and hide behind it on a CPU.
"""

from dataclasses import replace

import pytest
from dsx_plan import Machine
from dsx_plan.cost import simulate
from dsx_plan.trace import COMPUTE, MESSAGE, OPERATOR, RATES, WAIT_MESSAGE, Message, Trace


def machine(device):
    found = replace(Machine.named("H100-SXM"), device=device, flops={"float32": 1e12}, link_bandwidth=1e9)
    constants = replace(found.constants, products=1.0, links=1.0, operator_seconds=0.0, message_seconds=0.0)
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
