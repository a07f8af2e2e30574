"""The accelerators this machine offers to the job, and which of them a worker may see.

``CUDA_VISIBLE_DEVICES`` may hold indices, GPU UUIDs or MIG UUIDs; they stay text from end to end. A machine without
accelerators has an empty list, and then processes are counted, not devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import ResourceError
from .resources import Slots


def visible_tokens(value: str | None) -> Slots | None:
    """The entries of a ``CUDA_VISIBLE_DEVICES`` value; None when it is not set; CUDA stops reading at ``-1``."""
    if value is None:
        return None
    tokens: list[str] = []
    for token in (part.strip() for part in value.split(",")):
        if not token or token == "-1":
            break
        tokens.append(token)
    return tuple(tokens)


def device_count(environ: Mapping[str, str]) -> int:
    """How many devices this process may use; 0 without asking when ``CUDA_VISIBLE_DEVICES`` allows none."""
    if visible_tokens(environ.get("CUDA_VISIBLE_DEVICES")) == ():
        return 0
    import torch  # lazy import: costs seconds, and `--help` and remote launches do not need it

    return torch.cuda.device_count()


def local_devices(environ: Mapping[str, str]) -> Slots:
    """The devices a job on this machine may use: ``CUDA_VISIBLE_DEVICES`` if set, else all, else none."""
    count = device_count(environ)
    if count == 0:
        return ()
    listed = visible_tokens(environ.get("CUDA_VISIBLE_DEVICES"))
    return listed if listed is not None else tuple(str(index) for index in range(count))


def devices_for(slots: Sequence[str], environ: Mapping[str, str], count: int) -> Slots | None:
    """What ``CUDA_VISIBLE_DEVICES`` a host gives its workers for the hostfile's ``slots``; None on a host without
    devices.

    Where the host's own environment already restricts the devices (a batch system, the user), slot ``i`` is the i-th of
    those.
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
