"""dsx on the simulated device: the CPU's losses, and no report, for every case of `device_matrix.py`.

The sample is in the ordinary suite, each case in one scheduling mode. `tools/dev.py device` runs all in all modes.
"""

from __future__ import annotations

import functools

import pytest
from device_matrix import CASES, MODES, ONE_AT_A_TIME, ONE_AT_A_TIME_SAMPLE, SAMPLE, WORLDS, dealt
from device_runs import check, on_the_cpu, start

SOON = (("DSX_SIMCUDA_HANG_S", "12"),)
"""A program that waits for ever ends soon."""


def cases(world: int, names: tuple[str, ...]) -> list[object]:
    """Names as parameters; known defects must fail, so that their mending shows."""
    return [
        pytest.param(
            world,
            name,
            marks=[pytest.mark.xfail(reason=CASES[name].known or "", strict=True)] if CASES[name].known else [],
        )
        for name in names
    ]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("world", "name"), [*cases(1, SAMPLE[1]), *cases(2, SAMPLE[2])])
def test_a_sample_of_dsx_on_the_simulated_device(world: int, name: str, sampled) -> None:
    check(name, world, dealt(SAMPLE[world].index(name)), sampled(world), on_the_cpu(SAMPLE[world], world))


ALL = [(world, case) for case in CASES.values() for world in WORLDS if world in case.worlds]
TOGETHER = 8
"""Cases that share processes where all run in all modes: starting torch takes longer than a case."""


@functools.cache
def in_all_modes(world: int, names: tuple[str, ...], modes: tuple[str, ...], options: tuple[tuple[str, str], ...] = ()):
    """What some cases gave. Where one stopped the processes, those behind it run in processes of their own."""
    results, output = start(names, world, ",".join(modes), options=options, limit_s=1500)
    apart = [name for name in names[1:] if len(results.get((name, modes[-1]), ())) < world]
    alone = {name: in_all_modes(world, (name,), modes, options)[name] for name in apart}
    return {name: alone.get(name, (results, output)) for name in names}


def companions(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The cases that share processes with one of `names`. A defect that is known runs alone: it may end them."""
    sound = tuple(n for n in names if not CASES[n].known)
    if name not in sound:
        return (name,)
    first = sound.index(name) // TOGETHER * TOGETHER
    return sound[first : first + TOGETHER]


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("world", "name"), [p for world, case in ALL for p in cases(world, (case.name,))])
def test_every_case_in_every_mode(world: int, name: str) -> None:
    names = companions(name, tuple(case.name for ranks, case in ALL if ranks == world))
    simulated = in_all_modes(world, names, MODES)[name]
    for mode in MODES:
        check(name, world, mode, simulated, on_the_cpu(names, world))


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", ONE_AT_A_TIME_SAMPLE[2])
def test_a_sample_with_one_collective_at_a_time_on_a_device(name: str, sampled) -> None:
    check(f"alone:{name}", 2, "slow-side", sampled(2), on_the_cpu(SAMPLE[2], 2))


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, all in ONE_AT_A_TIME.items() for name in all])
def test_one_collective_at_a_time_on_a_device(world: int, name: str) -> None:
    names = companions(name, ONE_AT_A_TIME[world])
    modes = ("slow-side", "eager")
    simulated = in_all_modes(world, tuple(f"alone:{n}" for n in names), modes, SOON)[f"alone:{name}"]
    for mode in modes:
        check(f"alone:{name}", world, mode, simulated, on_the_cpu(names, world))


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("world", "name"), [(2, "experts-at-stage-3"), (4, "slices-under-stage-3")])
def test_what_has_no_place_in_the_order_of_parameters_needs_an_order_of_launches(world: int, name: str) -> None:
    """Where NCCL is told not to order its groups, they are reported, and may stop each other."""
    off = (*SOON, ("NCCL_LAUNCH_ORDER_IMPLICIT", "0"))
    results, output = start([f"alone:{name}"], world, "slow-side", options=off, limit_s=360)
    reports = [report for ranks in results.values() for rank in ranks for report in rank["reports"]]
    assert any("collectives not ordered" in text for text in [*reports, output]), output


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_another_order_on_one_rank_is_named() -> None:
    """Rank 1 gathers nothing ahead: it begins a reduction where rank 0 gathers, and each waits for the other."""
    results, output = start(["swapped:stage3-fp32-device"], 2, "slow-side", options=SOON, limit_s=360)
    assert not results or all(rank["error"] for ranks in results.values() for rank in ranks), output
    assert "hang" in output and "all_gather_into_tensor" in output and "reduce_scatter_tensor" in output, output
