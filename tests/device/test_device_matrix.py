"""dsx on the simulated device: the CPU's losses, and no report, for every case of `device_matrix.py`.

The sample is in the ordinary suite, each case in one scheduling mode. `tools/dev.py device` runs all in all modes.
"""

from __future__ import annotations

import pytest
from device_matrix import CASES, MODES, SAMPLE, WORLDS, dealt
from device_runs import check, on_the_cpu, start

ONE_AT_A_TIME = (("DSX_SIMCUDA_ONE_COLLECTIVE", "1"), ("DSX_SIMCUDA_HANG_S", "12"))


def cases(world: int, names: tuple[str, ...]) -> list[object]:
    """Names as parameters; known defects must fail, so that their mending shows."""
    return [
        pytest.param(
            world, name, marks=[pytest.mark.xfail(reason=CASES[name].known, strict=True)] if CASES[name].known else []
        )
        for name in names
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "name"), [*cases(1, SAMPLE[1]), *cases(2, SAMPLE[2])])
def test_a_sample_of_dsx_on_the_simulated_device(world: int, name: str, sampled) -> None:
    check(name, world, dealt(SAMPLE[world].index(name)), sampled(world), on_the_cpu(SAMPLE[world], world))


ALL = [(world, case) for case in CASES.values() for world in WORLDS if world in case.worlds]


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "name"), [p for world, case in ALL for p in cases(world, (case.name,))])
def test_every_case_in_every_mode(world: int, name: str) -> None:
    simulated = start([name], world, ",".join(MODES), limit_s=400)
    for mode in MODES:
        check(name, world, mode, simulated, on_the_cpu((name,), world))


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in SAMPLE[2] if not name.startswith("pipeline")])
def test_one_collective_at_a_time_on_a_device(name: str) -> None:
    simulated = start([name], 2, "slow-side", options=ONE_AT_A_TIME, limit_s=120)
    check(name, 2, "slow-side", simulated, on_the_cpu((name,), 2))
