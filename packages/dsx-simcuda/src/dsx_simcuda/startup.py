"""Start of a process under `python -m dsx_simcuda`: the device at its start, the reports at its end.

Loading torch takes seconds, and most processes of a job never use it (pip, git hooks, resource trackers). So the device
is installed when the process first imports torch.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType

from . import installing, native
from .errors import SimcudaError
from .findings import host_syncs, printed_elsewhere, reports
from .timeline import write

REPORTS_FOUND = 86  # the exit status of a program that is right but for its reports


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """At the first import of torch: loads the native library before it, and installs the rest behind it.

    A program may look for torch without importing it (transformers does), so the finder stays until torch has run.
    """

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        place = sys.meta_path.index(self)
        del sys.meta_path[place]
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            create, run = loader.create_module, loader.exec_module

            def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
                _or_end(installing.load, devices=_devices())
                return create(spec)

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                _or_end(installing.take_over)
                atexit.register(_finish, os.getpid())

            loader.create_module = create_module  # type: ignore[method-assign]
            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def start() -> None:
    """Waits for torch; called at the start of Python."""
    sys.meta_path.insert(0, _BeforeTorch())


def _devices() -> int | None:
    """As many devices as torchrun has ranks here, since its programs call set_device(LOCAL_RANK)."""
    if "DSX_SIMCUDA_DEVICES" in os.environ:
        return None
    return min(8, max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _or_end(step: Callable[..., object], **options: object) -> None:
    """Does a step of the installation; a program that would go on without it would test nothing."""
    try:
        step(**options)
    except (SimcudaError, ValueError) as error:
        sys.stderr.write(f"dsx-simcuda: the simulated device cannot be used: {error}\n")
        sys.stderr.flush()
        os._exit(2)


def _finish(pid: int) -> None:
    """At the end: waits for the device, says what was found, and changes the exit status if something was."""
    if os.getpid() != pid:  # a forked child that did not run its own program
        return
    said = []
    launches, waits = native.lib.sim_launches(), native.lib.sim_host_sync_count()
    installing.synchronize()
    failed = native.lib.sim_unraised_error().decode()
    if failed:
        said.append(f"an operation failed, and no wait of the program has raised it: {failed}")
    found = reports()
    for report in printed_elsewhere():
        sys.stderr.write(f"{report}\n")
    if found:
        kinds = ", ".join(f"{times} x {kind}" for kind, times in Counter(r.kind for r in found).most_common())
        said.append(f"{len(found)} reports: {kinds}")
    if launches and not waits and not found:
        sys.stderr.write(
            f"dsx-simcuda: the program launched {launches} operations and never waited for the device, so that it has"
            " seen no result and no error of them; read one (loss.item()), or call torch.cuda.synchronize()\n"
        )
    folder = os.environ.get("DSX_SIMCUDA_REPORT")
    if folder:
        sys.stderr.write(f"dsx-simcuda: {host_syncs().total()} waits of the host; details: {write(folder)}\n")
    for line in said:
        sys.stderr.write(f"dsx-simcuda: {line}\n")
    if said:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(REPORTS_FOUND)
