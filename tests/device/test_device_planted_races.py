"""Each planted race is reported, and a report names the file from which the wait or the order was taken away.

A sample is in the ordinary suite. `tools/dev.py device` plants them all.
"""

from __future__ import annotations

import functools
import importlib

import pytest
from device_matrix import CASES
from device_runs import Results, start
from planted_races import RACES

AT_LEAST = 40
"""Single removals that must be reported."""


def assert_reported(name: str, found: tuple[Results, str], mode: str) -> None:
    """A report came, and one of the two stacks goes through the file that has the race (or one that it names)."""
    race, (results, output) = RACES[name], found
    ranks = results.get((f"race:{name}", mode), [])
    assert ranks, f"{name}: the program did not come to its end\n{output}"
    assert sum(rank["count"] for rank in ranks), f"{name}: no report\n{output}"
    stacks = [frame for rank in ranks for stack in rank["stacks"] for frame in stack]
    expected = race.named or (race.target.partition(":")[0].replace(".", "/") + ".py",)
    assert any(part in frame for frame in stacks for part in expected), (
        f"no stack goes through {expected}\n" + "\n".join(report for rank in ranks for report in rank["reports"])
    )


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", [name for name, race in RACES.items() if race.sample])
def test_a_sample_of_planted_races_is_reported(name: str, sampled) -> None:
    assert_reported(name, sampled(RACES[name].world), "slow-side")


@functools.cache
def planted(case: str, world: int) -> tuple[Results, str]:
    """All races of a case, and then the case without them, in one process per rank."""
    names = [f"race:{name}" for name, race in RACES.items() if (race.case, race.world) == (case, world)]
    return start([*names, case], world, "slow-side", limit_s=1500)


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(reason=race.known, strict=True)] if race.known else [])
        for name, race in RACES.items()
    ],
)
def test_every_planted_race_is_reported(name: str) -> None:
    assert_reported(name, planted(RACES[name].case, RACES[name].world), "slow-side")


@pytest.mark.simcuda
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("case", "world"), sorted({(race.case, race.world) for race in RACES.values()}))
def test_without_the_race_nothing_is_reported(case: str, world: int) -> None:
    results, output = planted(case, world)
    ranks = results.get((case, "slow-side"), [])
    assert len(ranks) == world, output
    assert [rank["error"] for rank in ranks] == [""] * world
    assert [rank["reports"] for rank in ranks] == [[]] * world


def test_the_table_is_whole_and_fits_the_code() -> None:
    assert sum(race.known is None for race in RACES.values()) >= AT_LEAST
    for name, race in RACES.items():
        assert race.world in CASES[race.case].worlds, name
        importlib.import_module(race.target.partition(":")[0])
        with race.plant():  # raises where the code has moved
            pass
