"""The modules beside the tests are programs, too: they import each other by name."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--device simcuda` the sample carries the marker, too: `-m simcuda` is then all there is."""
    if config.getoption("--device", default=None) == "simcuda":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker("simcuda")


@pytest.fixture(scope="session")
def sampled():
    """A function that gives what the sample gave on so many ranks. One process per rank runs all of it: the cases, each
    in the mode that is dealt to it, some with one collective at a time on a device, and then the planted races.
    """
    from device_matrix import ONE_AT_A_TIME_SAMPLE, SAMPLE
    from device_runs import start
    from planted_races import RACES

    found = {}

    def give(world: int):
        if world not in found:
            races = [f"race:{name}" for name, race in RACES.items() if race.sample and race.world == world]
            alone = [f"alone:{name}" for name in ONE_AT_A_TIME_SAMPLE[world]]
            names = [*SAMPLE[world], *alone, *races]
            results, output = start(names, world, limit_s=1500)
            # A planted race may read a label that is not there yet, and end the process as a device would. Those behind
            # it run again: the mode of each case is in its name or its place, so only races are started here.
            behind = [name for name in races if len(results.get((name, "slow-side"), ())) < world]
            if behind:
                again, said = start(behind, world, limit_s=1500)
                results, output = {**results, **again}, output + said
            found[world] = results, output
        return found[world]

    return give
