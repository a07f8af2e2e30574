"""Python runs this at its start where the folder is on PYTHONPATH: with DSX_SIMCUDA=1, on the simulated device.

A `sitecustomize` of the user's own, further down the path, is run too.
"""

import os
import sys


def _users_own() -> None:
    """Runs the next sitecustomize on the path, which this one hides."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _simulate() -> None:
    """Installs the device; a program that would go on without it would test nothing, so that it ends here."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        from dsx_simcuda.startup import start

        start()
    except Exception as error:  # noqa: BLE001  whatever it is, the program must not run on the CPU silently
        sys.stderr.write(f"dsx-simcuda: the simulated device cannot be used: {error}\n")
        sys.stderr.flush()
        os._exit(2)


_users_own()
if os.environ.get("DSX_SIMCUDA") == "1":
    _simulate()
