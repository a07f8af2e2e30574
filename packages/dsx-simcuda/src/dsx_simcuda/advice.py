"""Words for reports: the sentence, the way to mend it, and the name of the tensor where it can be found."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from . import frames
from .operation import Operation

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce ", "gather", "scatter")
_SENTENCES = {
    "read before write": "{later} reads what {earlier} writes, and nothing makes it wait",
    "write after read": "{later} overwrites what {earlier} reads, and nothing makes it wait",
    "write after write": "{later} overwrites what {earlier} writes, and nothing makes it wait",
    "freed while in use": "memory is handed out again while {earlier} may still use it",
    "collectives not ordered": "{later} and {earlier} are of two communicators, and neither waits for the other: where"
    " the device has room for one, ranks that begin with different ones wait for each other for ever",
    "host access too early": "{later} memory that {earlier} uses, and the host has not waited for it",
}


def sentence(kind: str, later: Operation, earlier: Operation) -> str:
    """The report in one sentence."""
    return _SENTENCES[kind].format(later=later.name, earlier=earlier.name)


def _is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def fix(kind: str, raw_kind: str, later: Operation, earlier: Operation | None) -> str:
    """The advice: a change of the program, in one line."""
    if kind == "wrong device's stream":
        return "the later stream waits for a stream of another device: use torch.cuda.current_stream(tensor.device)"
    if kind == "collectives in different order":
        return "let all ranks call the same collectives of a group in the same order, with the same sizes and types"
    if kind == "collectives not ordered":
        return "let the stream of the later one wait for the earlier one's work, or use one communicator for both"
    if kind == "rank lost":
        return "look at the first rank that failed; its own message comes before this one"
    if kind == "misuse" or earlier is None:
        return ""
    if kind == "host access too early":
        return "wait before the host touches it: event.synchronize() with an event recorded after the copy"
    if _is_collective(earlier.name):
        return f"call wait() of the work that `{earlier.name}` returned, on the stream that uses the memory next"
    if raw_kind == "freed while in use":
        return f"tensor.record_stream(the stream of {earlier.name}) before the tensor is freed, or free it after a wait"
    if earlier.name == "new memory":
        return "the memory was allocated on another stream: let this one wait for it (wait_stream) before its first use"
    return "before the later line: later_stream.wait_stream(earlier_stream), or wait for an event recorded there"


# ---------------------------------------------------------------- names of tensors
_named: dict[str, Any] = {}


def name_tensors(named: Any, prefix: str = "") -> None:
    """Gives tensors names for reports: a module (its parameters and buffers), or a mapping from names to tensors."""
    if hasattr(named, "named_parameters"):
        items = [*named.named_parameters(), *named.named_buffers()]
    else:
        items = list(named.items())
    for name, tensor in items:
        _named[prefix + name] = weakref.ref(tensor)


def _holds(tensor: Any, address: int) -> bool:
    """Whether a plain tensor's storage holds the address; asks for nothing that runs an operator."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        return begin <= address < begin + storage.nbytes()
    except RuntimeError:  # a tensor without a storage
        return False


def _describe(name: str, tensor: Any) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name!r} ({kind}, {'x'.join(map(str, tensor.shape)) or 'scalar'})"


def tensor_name(address: int) -> str:
    """The name of the tensor that lies at an address: a name that was given, or a variable of the user's functions."""
    if not address:
        return ""
    for name, reference in list(_named.items()):
        tensor = reference()
        if tensor is None:
            del _named[name]
        elif _holds(tensor, address):
            return _describe(name, tensor)
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if frames.Frame(code.co_filename, frame.f_lineno, code.co_name).is_users:
            for name, value in list(frame.f_locals.items()):
                if _holds(value, address):
                    return _describe(name, value)
        frame = frame.f_back
    return ""
