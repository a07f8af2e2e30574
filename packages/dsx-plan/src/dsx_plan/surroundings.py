"""The context of a replay: no limit of address space, no log of a job that does not run, no kernels on addresses, the
attention of a device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from .ledger import DEVICE
from .recorder import Recorder

__all__ = ["DeviceAttention", "address_space", "kernels_recorded", "quiet"]


class DeviceAttention(TorchFunctionMode):
    """Attention is planned as the fused kernel that a device has for it, and not by the dispatch of the CPU.

    On a CPU, where a replay runs, only attention without dropout and with heads of one size is fused; otherwise PyTorch
    takes products of whole score matrices, in fp32. The kernels of devices take dropout, which costs them next to
    nothing. Where heads of values have another size than those of keys (MLA: 128 and 192) the smaller ones are filled
    up, as FlashAttention-2 is called by transformers; later kernels take both sizes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            if len(args) > _DROPOUT:
                args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
            kwargs.pop("dropout_p", None)
            if len(args) > 2 and args[0].shape[-1] != args[2].shape[-1]:
                return _filled_up(func, args, kwargs)
        return func(*args, **kwargs)


def _filled_up(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Attention with zeros beside the values or beside queries and keys, so that all heads have one size."""
    q, k, v, *rest = args
    size, wanted = v.shape[-1], max(q.shape[-1], v.shape[-1])
    kwargs.setdefault("scale", q.shape[-1] ** -0.5)
    q, k, v = (t if t.shape[-1] == wanted else pad(t, (0, wanted - t.shape[-1])) for t in (q, k, v))
    return func(q, k, v, *rest, **kwargs)[..., :size]


_DROPOUT = 4
"""Place of `dropout_p` among the arguments."""

_TALKING = ("dsx", "dsx_zero", "dsx_activations", "dsx_comm", "dsx_pipe", "dsx_moe", "dsx_ops")


@contextlib.contextmanager
def address_space() -> Iterator[None]:
    """Inside the block a limit of address space that this process may lift does not hold."""
    try:
        import resource
    except ImportError:  # there are no such limits on Windows
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and the engine's log in this thread: they speak of a job that does not run."""
    own = threading.get_ident()

    def is_news(record: logging.LogRecord) -> bool:
        return record.thread != own or record.name.partition(".")[0] not in _TALKING

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKING]
    loggers = [logging.getLogger(name) for name in {*names, *_TALKING}]
    before = [(log, log.level) for log in loggers]
    # A logger's filter does not see what comes from the loggers below it; a handler's does.
    handlers = {handler for log in (logging.root, *loggers) for handler in log.handlers}
    listening = [*loggers, *handlers, *([logging.lastResort] if logging.lastResort else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in listening:
            one.addFilter(is_news)
        try:
            yield
        finally:
            for one in listening:
                one.removeFilter(is_news)
            for log, level in before:
                log.setLevel(level)


def _scaled_bytes(recorder: Recorder, batch: Any) -> int:
    """Bytes of the scaled gradients that torch's fused kernels are given at one time (at most). A replay's norm has no
    value, so that its own factor says nothing.
    """
    from dsx_ops.backends import torch_cuda  # lazy import: only a replay needs it

    if not (recorder.kernels.copies_gradients and batch.slots and torch_cuda.fusable(batch)):
        return 0
    sizes = [s.grad.nbytes for s in batch.slots if recorder.ledger.tier_of(s.param) == DEVICE]
    return min(sum(sizes), max(torch_cuda.PIECE_BYTES, *sizes)) if sizes else 0


@contextlib.contextmanager
def kernels_recorded(recorder: Recorder) -> Iterator[None]:
    """Inside the block the optimizers of dsx_ops compute nothing in this thread: their kernels are handed addresses,
    which no dispatch mode sees.
    """
    import dsx_ops
    from dsx_ops import update

    lane = recorder.lane(torch.device("cpu"))

    def note(batch: Any) -> None:
        scaled = _scaled_bytes(recorder, batch)
        recorder.ledger.add_bytes(DEVICE, "workspace", scaled)
        recorder.ledger.add_bytes(DEVICE, "workspace", -scaled)
        for slot in batch.slots:
            given = [t for t in (slot.param, slot.grad, *slot.states, slot.low_bits) if t is not None]
            written = [slot.param, *slot.states]
            copy = slot.copy
            if copy is not None and recorder.crosses(copy, slot.param):
                # Where masters lie elsewhere the engine sends the copies by itself, beside the next masters' step.
                lane.see_writes_so_far()
                nbytes = copy.numel() * copy.element_size()
                recorder.late.append(lane.submit(lambda nbytes=nbytes: recorder.copied(1, nbytes)))
            elif copy is not None:
                written.append(copy)
            recorder.stepped([*given, *written], 12 * slot.param.numel())

    with update.handed_to(note), dsx_ops.reference_only():
        yield
