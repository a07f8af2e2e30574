"""The random states of this rank: Python's, NumPy's, torch's on the host and on every CUDA device it sees, and the
named streams of model parallelism (`dsx.checkpointing.get_cuda_rng_tracker`).

    state = random_states()        # plain values and tensors, as checkpoints hold them
    restore_random_states(state)

These are the default generators. To save your own generators, register an object that holds them
(`engine.register_for_checkpointing`). NumPy's generator is left out if NumPy was not imported.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from dsx_activations import get_cuda_rng_tracker
from dsx_core.device import Device, accelerator_kind

__all__ = ["RandomStates", "random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """The states of the generators of this process."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        keys = torch.from_numpy(keys.astype("int64"))
        found["numpy"] = {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "gauss": gauss}
    device = Device.in_use()
    if device is not None:
        found[device.kind] = [Device(device.kind, index).random_state().cpu() for index in range(Device.count())]
    streams = get_cuda_rng_tracker().get_states()
    if streams:
        found["streams"] = streams
    return found


def restore_random_states(state: dict[str, Any]) -> None:
    """Set the generators to the states in `state`.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: `state` is not a result of `random_states`. Generators that were
            restored before the error keep their new state.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # lazy import: only where the run that was saved used it

        saved = state["numpy"]
        keys = saved["keys"].numpy().astype("uint32")
        numpy.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "streams" in state:
        get_cuda_rng_tracker().set_states(state["streams"])
    kind = accelerator_kind() or ""
    for index, value in enumerate(state.get(kind, [])[: Device.count()]):
        Device(kind, index).set_random_state(value)


class RandomStates:
    """The generators as an object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """See `random_states`."""
        return random_states()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `restore_random_states`."""
        restore_random_states(state)
