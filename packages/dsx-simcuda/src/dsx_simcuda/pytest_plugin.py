"""The pytest plugin: `pytest --device simcuda` runs a suite on the simulated device and fails tests with reports.

Without the option it only registers its marker, and skips tests that carry it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .findings import Seen

MARKER = (
    "simcuda(mode=None, allow_reports=False): runs on the simulated CUDA device only (--device simcuda); `mode` is the"
    " scheduling mode of this test, and `allow_reports` lets it end with reports"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device simcuda` and the device's switches."""
    group = parser.getgroup("simcuda", "simulated CUDA device (dsx-simcuda)")
    # Another plugin may have an option of this name already; its value is read all the same.
    with contextlib.suppress(ValueError):
        group.addoption("--device", help="simcuda: run the tests on the simulated CUDA device")
    group.addoption("--simcuda-mode", help="scheduling mode: eager, random, lazy, slow-side, slow-default")
    group.addoption("--simcuda-seed", type=int, help="seed of the random delays")
    group.addoption("--simcuda-devices", type=int, help="devices per process (default 1)")
    group.addoption("--simcuda-report", metavar="FOLDER", help="write the reports of the session there (JSON and HTML)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Installs the device before any conftest or test imports torch."""
    options = early_config.known_args_namespace
    if options.device != "simcuda":
        return
    from .errors import SimcudaError
    from .installing import install

    try:
        install(mode=options.simcuda_mode, seed=options.simcuda_seed, devices=options.simcuda_devices)
    except (SimcudaError, ValueError) as error:
        raise pytest.UsageError(f"--device simcuda: {error}") from error


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line("markers", MARKER)


def _active(config: pytest.Config) -> bool:
    return config.getoption("--device") == "simcuda"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what needs the device where it is not there."""
    if _active(config):
        return
    for item in items:
        if item.get_closest_marker("simcuda"):
            item.add_marker(pytest.mark.skip(reason="needs the simulated device: pytest --device simcuda"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test during which reports came, unless its marker allows them."""
    if not _active(item.config):
        return (yield)
    from . import findings, installing

    marker = item.get_closest_marker("simcuda")
    asked: dict[str, Any] = dict(marker.kwargs) if marker else {}
    before = installing.get_option("mode")
    if asked.get("mode") is not None:
        installing.set_option("mode", asked["mode"])
    try:
        with findings.watch() as seen:
            try:
                result = yield
            finally:
                installing.synchronize()  # what is still in flight belongs to this test
    finally:
        installing.set_option("mode", before)
    if seen.reports and not asked.get("allow_reports"):
        pytest.fail(_failure(seen), pytrace=False)
    return result


def _failure(seen: Seen) -> str:
    shown = "\n".join(str(report) for report in seen.reports[:5])
    more = len(seen.reports) - 5
    return f"{len(seen.reports)} reports of the simulated device\n{shown}" + (
        f"\n... and {more} more" if more > 0 else ""
    )


@pytest.fixture
def simcuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The package `dsx_simcuda`, for a test on the simulated device; skips the test without `--device simcuda`."""
    if not _active(request.config):
        pytest.skip("needs the simulated device: pytest --device simcuda")
    import dsx_simcuda

    yield dsx_simcuda


@pytest.fixture
def host_waits(simcuda: Any) -> Iterator[Any]:
    """A function that returns the host's waits since the test began (`Counter` of `HostSync`)."""
    before = simcuda.host_syncs()
    yield lambda: simcuda.host_syncs() - before


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line about the device; the report files where they were asked for."""
    if not _active(config):
        return
    from . import findings, timeline

    folder = config.getoption("--simcuda-report")
    terminalreporter.write_line(f"simulated CUDA device: {len(findings.reports())} reports")
    if folder:
        terminalreporter.write_line(f"reports: {timeline.write(folder)}")
