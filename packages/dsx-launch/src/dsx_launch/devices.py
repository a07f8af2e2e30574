"""The accelerators that this machine offers to a job, and those that a worker may use.

``CUDA_VISIBLE_DEVICES`` may contain indices, GPU UUIDs or MIG UUIDs, so devices are always strings. A machine without
accelerators has an empty list; then processes are counted instead of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import ResourceError
from .resources import Slots


def visible_tokens(value: str | None) -> Slots | None:
    """The entries of a ``CUDA_VISIBLE_DEVICES`` value, up to ``-1``, where CUDA stops reading; None if it is not
    set.
    """
    if value is None:
        return None
    tokens: list[str] = []
    for token in (part.strip() for part in value.split(",")):
        if not token or token == "-1":
            break
        tokens.append(token)
    return tuple(tokens)


def device_count(environ: Mapping[str, str]) -> int:
    """The number of devices of this process; 0, without importing torch, if ``CUDA_VISIBLE_DEVICES`` allows none."""
    if visible_tokens(environ.get("CUDA_VISIBLE_DEVICES")) == ():
        return 0
    import torch  # lazy import: costs seconds, and `--help` and remote launches do not need it

    return torch.cuda.device_count()


def local_devices(environ: Mapping[str, str]) -> Slots:
    """The devices that a job on this machine may use: those of ``CUDA_VISIBLE_DEVICES`` if it is set, otherwise all."""
    count = device_count(environ)
    if count == 0:
        return ()
    listed = visible_tokens(environ.get("CUDA_VISIBLE_DEVICES"))
    return listed if listed is not None else tuple(str(index) for index in range(count))


def devices_for(slots: Sequence[str], environ: Mapping[str, str], count: int) -> Slots | None:
    """The ``CUDA_VISIBLE_DEVICES`` for the workers of a host, from the hostfile's ``slots``; None on a host without
    devices.

    If the host's own environment already restricts the devices (by a batch system or the user), slot ``i`` is the i-th
    of these.
    """
    if count == 0:
        return None
    listed = visible_tokens(environ.get("CUDA_VISIBLE_DEVICES"))
    if listed is None:
        return tuple(slots)
    chosen: list[str] = []
    for slot in slots:
        if slot in listed and not slot.isdecimal():
            chosen.append(slot)
        elif slot.isdecimal() and int(slot) < len(listed):
            chosen.append(listed[int(slot)])
        else:
            raise ResourceError(
                f"slot {slot} is asked for, but CUDA_VISIBLE_DEVICES={','.join(listed)} on this host has {len(listed)}"
                " device(s); lower slots= in the hostfile or unset the variable"
            )
    return tuple(chosen)
