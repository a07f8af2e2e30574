"""Watches a replayed rank: every operator, message, copy and wait becomes an entry of a `Trace`, every storage one of a
`Ledger`.

What lies in host memory by the engine's placement is marked, so that copies between it and the
device are seen although both are ordinary memory here. For a device with streams the tensor that stands for host memory
also says that it lies elsewhere (`HostMemory.device`): the engine then stages what it fetches, as on that device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from dsx_comm import RehearsalObserver
from dsx_comm.composed import staging
from dsx_comm.rehearsal import RehearsedMessage
from dsx_monitor.flops.rules import rule_for

from . import trace as entries
from .communicators import GroupUse
from .fake import is_small
from .kernels import UNFUSED, Fusion, Kernels, dtype_in, is_causal
from .ledger import DEVICE, HOST, Ledger
from .owners import who_asked
from .trace import COPY, MARK, MESSAGE, OPERATOR, PHASE, RATES, RECOMPUTED, WAIT_MARK, WAIT_MESSAGE, Message, Trace

if TYPE_CHECKING:
    from dsx_pipe.runtime.rehearsed import RehearsedMail

__all__ = ["HostMemory", "Recorder"]

_RATE = {name: number for number, name in enumerate(RATES)}
_DTYPES = {
    torch.float32: _RATE["float32"],
    torch.bfloat16: _RATE["bfloat16"],
    torch.float16: _RATE["float16"],
    torch.float64: _RATE["float64"],
    torch.float8_e4m3fn: _RATE["float8"],
    torch.float8_e5m2: _RATE["float8"],
    torch.float4_e2m1fn_x2: _RATE["float4"],
}
_SCALED = frozenset({"_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"})
"""Products with the rate of what they multiply, and not of their results: FP8, and MX formats with their scales."""
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FREE = frozenset({*_EMPTY, "_local_scalar_dense", "is_same_size", "set_", "resize_"})
"""Operators that launch nothing."""
_FUSED_ATTENTION = "_scaled_dot_product_"
"""The prefix of the names of fused attention."""
_KERNELS = frozenset({"dsx_ops::quantize", "dsx_ops::dequantize_out"})
"""Kernels of ours that take the time of the bytes that they read and write."""
_PARTIAL = frozenset(["embedding", "index_select", "gather", "index"])
"""Operators that read as much of their first argument as they return."""
_ASKED = frozenset({*_EMPTY, "zeros", "zeros_like", "new_zeros", "ones", "full", "clone", "_to_copy"})
"""Operators by which the engine takes memory."""
_SMALL_MESSAGE = 1 << 16


class HostMemory(torch.Tensor):
    """Host memory of a rank whose device is another one. Results of operators on it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that is planned for. It is not that of the parameters (see the module)."""
        return torch.device("cpu", 0)


class Recorder(RehearsalObserver):
    """Records a replayed rank: its operators, messages, copies and waits as a `Trace`, its storages in a `Ledger`.

    Args:
        ranks_per_host: neighbouring ranks on one host.
        streams: copies and messages run beside the computation, as on a device with streams.
        mail: what ranks send to each other, where they are not alike.
        kernels: that compute, where they are not those of the operators.
    """

    def __init__(
        self, *, ranks_per_host: int, streams: bool, mail: RehearsedMail | None = None, kernels: Kernels | None = None
    ) -> None:  # fmt: skip
        self.trace = Trace()
        self.ledger = Ledger(lambda: len(self.trace))
        self.kernels = kernels or Kernels()
        self._fusion = Fusion(self.trace, self.ledger)
        self.phase = "build"
        self.unknown: Counter[str] = Counter()
        """Operators of which nobody has said what they cost, with how often they ran."""
        self.late: list[Any] = []
        """Tickets of what is to be over when the step ends."""
        self.communicators: dict[int, GroupUse] = {}
        """Process groups over which tensors went, and not only a few words: NCCL has a communicator for each."""
        self.mail = mail
        self._ranks_per_host, self._streams = ranks_per_host, streams
        self._rules: dict[int, Any] = {}
        self._seen: list[Any] = []
        self._lane = 0
        self._silent = False
        self._staged: dict[int, tuple[int, int]] = {}
        self._hosts: dict[int, tuple[int, int]] = {}

    def _add(self, lane: int, kind: int, number: int, extra: int = 0, rate: int = 0) -> None:
        if lane == entries.COMPUTE:
            self._fusion.end()
        self.trace.add(lane, kind, number, extra, rate)

    # - phases and lanes

    def begin(self, phase: str) -> None:
        """Begin a phase, to which the following entries belong: "forward", "backward", "step", "build"."""
        self.phase = phase
        if phase not in self.trace.phases:
            self.trace.phases.append(phase)
        self._add(0, PHASE, self.trace.phases.index(phase))

    def lane(self, device: torch.device) -> _Lane:
        """A new lane beside the computation (`dsx_comm.lanes.lanes_from`)."""
        self.trace.lanes += 1
        return _Lane(self, self.trace.lanes - 1)

    def mark(self, lane: int | None = None) -> int:
        """Note a place of a lane (default: the running one), to be waited for."""
        self.trace.marks += 1
        self._add(self._lane if lane is None else lane, MARK, self.trace.marks)
        return self.trace.marks

    def wait_mark(self, mark: int, lane: int | None = None) -> None:
        """Let a lane go on only behind a mark."""
        self._add(self._lane if lane is None else lane, WAIT_MARK, mark)

    def copied(self, direction: int, nbytes: int) -> None:
        """Bytes move between tiers."""
        self._add(self._lane, COPY, direction, nbytes)

    # - operators (`OperatorWatch`)

    def ran(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, view: bool) -> None:
        """See `OperatorWatch.ran`."""
        if view or self._silent:
            return
        known = self._rules.get(id(func))
        if known is None:
            known = self._rules[id(func)] = (func._overloadpacket.__name__, rule_for(func))
            self._seen.append(func)
        name, rule = known
        if name in _FREE:
            return
        if name == "copy_" and self.crosses(args[0], args[1]):
            self.copied(0 if self.ledger.tier_of(args[0]) == HOST else 1, _nbytes(args[0]))
            return
        flops, products = self._arithmetic(rule, func, args, kwargs, result)
        nbytes = _nbytes(result)
        nbytes += nbytes if name in _PARTIAL else _nbytes(args)
        rate = 0
        if self._on_host(args, result):
            rate = _RATE["host"]
        elif products:
            found = [args[0]] if name in _SCALED else [*_tensors(result), *_tensors(args)]
            rate = _DTYPES.get(dtype_in(found) or torch.float32, 0)
            if name.startswith(_FUSED_ATTENTION):
                rate += entries.ATTENTION + entries.CAUSAL * is_causal(func, args, kwargs)
            elif self.kernels.in_fp8(name, _tensors(args)):
                rate, nbytes = _RATE["float8"], nbytes + self.kernels.casts(_nbytes(args))
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            rate += RECOMPUTED  # inside a backward, where autograd itself records nothing
        fits = self.kernels.fused and self._lane == entries.COMPUTE and self.phase != "step"
        if fits and not products and rate % RECOMPUTED == 0 and name not in UNFUSED:
            self._fusion.take(_tensors((args, *kwargs.values())), _tensors(result), flops, rate)
            return
        self._add(self._lane, OPERATOR, flops, nbytes, rate)

    def stepped(self, tensors: Sequence[torch.Tensor], flops: int) -> None:
        """An optimizer's kernel has gone once over these tensors."""
        rate = _RATE["host"] if tensors and self.ledger.tier_of(tensors[0]) == HOST else 0
        self._add(self._lane, OPERATOR, flops, _nbytes(tensors), rate)

    def _arithmetic(self, rule: Any, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
        """Operations, and those of matrix products among them."""
        if rule is not None and not isinstance(rule, str):
            try:
                return rule(args, kwargs, result)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                rule = None  # a form that its rule does not know
        name = func._overloadpacket._qualified_op_name
        if rule is None and name not in _KERNELS:
            self.unknown[name] += 1
        return 0, 0

    def crosses(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Would a copy of one to the other leave the device, or come to it?"""
        return self._streams and self.ledger.tier_of(target) != self.ledger.tier_of(source)

    def settle(self) -> None:
        """Wait for what was begun for later, and end a run of fused operators."""
        self._fusion.end()
        late, self.late = self.late, []
        for ticket in late:
            ticket.wait()

    def _on_host(self, args: Any, result: Any) -> bool:
        first = next(_tensors(args), None)
        first = next(_tensors(result), None) if first is None else first
        return first is not None and self.ledger.tier_of(first) == HOST

    def made(self, tensor: torch.Tensor, func: Any, args: Sequence[Any]) -> torch.Tensor:
        """See `OperatorWatch.made`."""
        storage = tensor.untyped_storage()
        if self.ledger.knows(storage):
            return tensor
        kind, tier = "activations" if self.phase == "forward" else "workspace", DEVICE
        if func._overloadpacket.__name__ in _ASKED:
            asked, on_host = who_asked()
            kind, tier = asked or kind, HOST if on_host else tier
        first = next(_tensors(args), None)
        if tier == DEVICE and first is not None:
            tier = self.ledger.tier_of(first)
        self.ledger.add(storage, kind, tier)
        if tier == HOST and self._streams and not any(True for _ in _tensors(args)):
            return tensor.as_subclass(HostMemory)
        return tensor

    # - messages (`RehearsalObserver`)

    def has_values(self, tensor: torch.Tensor) -> bool:
        """See `RehearsalObserver.has_values`. What equal ranks would compute is no work of this rank."""
        self._silent = True
        return is_small(tensor)

    def received(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """See `RehearsalObserver.received`."""
        if self.mail is None or not self.mail.take(tensor, source, tag):
            super().received(tensor, source, tag)

    def sent(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """See `RehearsalObserver.sent`."""
        if self.mail is not None:
            self.mail.note(tensor, destination, tag)

    def issued(self, message: RehearsedMessage) -> int:
        """See `RehearsalObserver.issued`."""
        self._silent = False
        self.trace.messages.append(self._message(message))
        if max(message.sent, message.received) > _SMALL_MESSAGE:
            self._note_use(message)
        number = len(self.trace.messages) - 1
        self._add(self._lane, MESSAGE, number)
        self._stage(number, message)
        return number

    def _note_use(self, message: RehearsedMessage) -> None:
        use = self.communicators.setdefault(message.group, GroupUse(len(message.ranks)))
        if message.op in ("send", "recv"):
            use.peers.add(message.peer)
        elif message.op == "all_to_all":  # NCCL sends it as messages between each two
            use.peers.update(rank for rank in message.ranks if rank != message.rank)
        else:
            use.collective = True

    def _stage(self, number: int, message: RehearsedMessage) -> None:
        """On a CPU reductions take memory of their own until they are waited for."""
        if self._streams:
            return
        arriving, at_end = staging(message.op, message.received, message.element, len(message.ranks))
        if arriving or at_end:
            self._staged[number] = arriving, at_end
            self.ledger.add_bytes(DEVICE, "messages", arriving)

    def waited(self, token: int) -> None:
        """See `RehearsalObserver.waited`."""
        self._add(self._lane, WAIT_MESSAGE, token)
        arriving, at_end = self._staged.pop(token, (0, 0))
        self.ledger.add_bytes(DEVICE, "messages", at_end)
        self.ledger.add_bytes(DEVICE, "messages", -arriving - at_end)

    def _places(self, message: RehearsedMessage) -> tuple[int, int]:
        """Hosts of a group, and its ranks on this one. A group is looked at once: it may have thousands of ranks."""
        found = self._hosts.get(message.group)
        if found is None:
            hosts = [rank // self._ranks_per_host for rank in message.ranks]
            found = len(set(hosts)), hosts.count(message.rank // self._ranks_per_host)
            self._hosts[message.group] = found
        return found

    def _message(self, message: RehearsedMessage) -> Message:
        per_host, ranks = self._ranks_per_host, message.ranks
        here = message.rank // per_host
        hosts, neighbours = self._places(message) if message.peer < 0 else (1, 1)
        if message.op in ("send", "recv"):
            ranks = (message.rank, message.peer)
            outside = float(message.peer // per_host != here)
            hosts = 1 + int(outside)
        elif hosts == 1:
            outside = 0.0
        elif message.op == "all_to_all":
            outside = (len(ranks) - neighbours) / (len(ranks) - 1)
        else:  # a ring: of the ranks of a host one sends to the next host
            outside = 1.0 / neighbours
        size = max(message.sent, message.received)
        return Message(
            message.op, message.sent * (1.0 - outside), message.sent * outside, len(ranks), hosts,
            size <= _SMALL_MESSAGE, message.peer, message.op != "recv",
        )  # fmt: skip


class _Lane:
    """A `dsx_comm.lanes.Lane` that records. Jobs are handed to the device in the order of the program, as on CUDA."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        self._last_use: int | None = None

    def submit(self, job: Any, *, see_writes_so_far: bool = False) -> _Ticket:
        """See `Lane.submit`."""
        if see_writes_so_far:
            self.see_writes_so_far()
        recorder = self._recorder
        before, recorder._lane = recorder._lane, self._number
        try:
            if self._last_use is not None:
                recorder.wait_mark(self._last_use)
                self._last_use = None
            pending = job()
            if pending is not None:
                pending.wait()
            return _Ticket(recorder, recorder.mark())
        finally:
            recorder._lane = before

    def see_writes_so_far(self) -> None:
        """See `Lane.see_writes_so_far`."""
        self._recorder.wait_mark(self._recorder.mark(), self._number)

    def free_after_use(self, buffer: Any) -> None:
        """See `Lane.free_after_use`."""
        self._last_use = self._recorder.mark()
        buffer.free()


class _Ticket:
    """A job of a lane."""

    def __init__(self, recorder: Recorder, mark: int) -> None:
        self._recorder, self.number, self._waited = recorder, mark, False

    def is_completed(self) -> bool:
        """Only what was waited for is known to be done."""
        return self._waited

    def wait(self) -> None:
        """See `Ticket.wait`."""
        self._waited = True
        self._recorder.wait_mark(self.number)

    synchronize = wait


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0
