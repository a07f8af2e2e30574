"""What the CUDA module does to the thread's device, shown by a recording driver; and which drivers it takes."""

import pytest

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("stack", "device", "calls"),
    [
        # A fresh thread: it is on no device before and after, and nothing ever touches device 0.
        ([], 3, ["retain 3", "push 3", "work on 3", "pop", "push 3", "pop"]),
        # torch's own device: nothing to do.
        ([2], 2, ["work on 2"]),
        # Another device than the thread's: put back afterwards; the context is asked for once.
        ([0], 1, ["retain 1", "push 1", "work on 1", "pop", "push 1", "pop"]),
        ([1, 4], 0, ["retain 0", "push 0", "work on 0", "pop", "push 0", "pop"]),
    ],
)
def test_a_call_leaves_the_thread_on_the_device_it_was_on(emulator_module, stack, device, calls):
    assert emulator_module.guarded_calls(stack, device) == (calls, stack)


def test_a_device_that_is_not_there_is_named(emulator_module):
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxRetain of device 9: error 101"):
        emulator_module.guarded_calls([], 9)
    with pytest.raises(RuntimeError, match="no such CUDA device: -1"):
        emulator_module.guarded_calls([], -1)


@pytest.mark.parametrize(
    ("driver", "runtime", "large", "words"),
    [
        (0, 13000, True, "no CUDA driver is loaded"),
        (13000, 13000, True, ""),
        (13000, 13020, True, ""),  # within a major version an older driver runs newer modules
        (12090, 13000, True, "needs a driver for CUDA 13.0 or later"),
        (12000, 12080, True, "supports CUDA 12.0.*needs a driver for CUDA 12.1 or later"),  # arguments above 4 KB
        (12010, 12080, True, ""),
        (12000, 12000, False, ""),
        (11080, 12080, True, "needs a driver for CUDA 12.1 or later"),
        (13010, 12080, True, ""),  # newer drivers run older modules
    ],
)
def test_drivers_by_version(emulator_module, driver, runtime, large, words):
    import re

    problem = emulator_module.driver_problem(driver, runtime, large)
    assert bool(problem) == bool(words) and re.search(words, problem)
