"""Races to plant in dsx: each takes one wait, one event, one `record_stream` or one order away.

A race is an edit of one function: a piece of its source, which must be there exactly once, and what comes in its place.
So a race fails loudly when the code moves. The function keeps its file and lines, and reports name them.
`python -m pytest -m simcuda --device simcuda tests/device/test_device_planted_races.py` plants them all.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Race:
    """One removal.

    Attributes:
        target: "module:function" or "module:Class.method".
        old: what is taken away, once in the function's source.
        new: what comes in its place.
        case: the program of `device_matrix.py` that must show it.
        world: on how many ranks.
        named: parts of files of which one must be in a stack of the reports.
        sample: is it in the ordinary suite, too?
        delay_us: how late the streams of the mode are.
        known: why it is not reported; None: it must be.
    """

    target: str
    old: str
    new: str
    case: str
    world: int = 1
    named: tuple[str, ...] = ()
    sample: bool = False
    delay_us: int = 300
    known: str | None = None

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Inside the block the function has the race."""
        function = self._function()
        right = function.__code__
        function.__code__ = self._edited(function)
        try:
            yield
        finally:
            function.__code__ = right

    def _function(self) -> FunctionType:
        module, _, name = self.target.partition(":")
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return inspect.unwrap(found)

    def _edited(self, function: FunctionType) -> Any:
        lines, first = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        found = source.count(self.old)
        if found != 1:
            raise LookupError(f"{self.target}: {self.old!r} is there {found} times, expected once: the code has moved")
        tree = ast.parse(source.replace(self.old, self.new))
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise LookupError(f"{self.target} is no function")
        definition.decorator_list = []
        ast.increment_lineno(tree, first - 1)
        # the names of the module, and the flags of its `from __future__ import annotations`
        code = compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)
        made = next(c for c in code.co_consts if inspect.iscode(c) and c.co_name == definition.name)
        if made.co_freevars != function.__code__.co_freevars:
            raise LookupError(f"{self.target} uses names of an enclosing function, so it cannot be edited")
        return made


LANES, HOME, DISK = "dsx_comm.lanes", "dsx_zero.homes.home", "dsx_zero.homes.stored"
GATHER, PLACES, BEHIND = "dsx_zero.gather.executor", "dsx_activations.places", "dsx_checkpoint.behind"
CURRENT, ANY = "torch.cuda.current_stream(self._device)", "torch.cuda.current_stream()"
SEE, FROM_HOST = "lane.see_writes_so_far()", "stage2-fp32-optimizer-host"
PARAMETERS = "stage3-fp32-parameters-host"

RACES: dict[str, Race] = {
    # lanes
    "lane-forgets-last-uses": Race(
        f"{LANES}:CudaLane.submit", "self._stream.wait_event(last_use)", "pass", "little-live"
    ),
    "lane-forgets-collective": Race(f"{LANES}:CudaLane.submit", "pending.wait()", "pass", "stage3-fp32-device", 2),
    "lane-ignores-see-writes": Race(
        f"{LANES}:CudaLane.submit", "self.see_writes_so_far()", "pass", "stage2-fp32-device", 2
    ),
    "lane-records-nothing": Race(f"{LANES}:CudaLane.submit", "event.record(self._stream)", "pass", "little-live"),
    "lane-sees-no-writes": Race(
        f"{LANES}:CudaLane.see_writes_so_far", f"self._stream.wait_stream({CURRENT})", "pass", PARAMETERS, sample=True
    ),
    "ticket-waits-for-nothing": Race(
        f"{LANES}:_CudaTicket.wait", f"{CURRENT}.wait_event(self._event)", "pass", "little-live", sample=True
    ),
    "host-waits-for-nothing": Race(
        f"{LANES}:_CudaTicket.synchronize",
        "self._event.synchronize()",
        "pass",
        FROM_HOST,
        sample=True,
        delay_us=10_000,  # a loaded machine lets the host come to the pages when a copy of 300 us is over
    ),
    "freed-without-event": Race(
        f"{LANES}:CudaLane.free_after_use", "self._last_uses[stream] = event", "pass", "little-live", sample=True
    ),
    "freed-event-not-recorded": Race(f"{LANES}:CudaLane.free_after_use", "event.record(stream)", "pass", "little-live"),
    "ticket-of-current-device": Race(
        f"{LANES}:_CudaTicket.wait", "current_stream(self._device)", "current_stream()", "second-device"
    ),
    "writes-of-current-device": Race(
        f"{LANES}:CudaLane.see_writes_so_far", "current_stream(self._device)", "current_stream()", "second-device"
    ),
    "uses-of-current-device": Race(
        f"{LANES}:CudaLane.free_after_use", "current_stream(self._device)", "current_stream()", "second-device"
    ),
    # homes
    "store-before-written": Race(f"{HOME}:_InMemory.store", SEE, "pass", FROM_HOST, sample=True),
    "add-before-reduced": Race(f"{HOME}:accumulate", SEE, "pass", "accumulation-on-host"),
    "disk-store-before-written": Race(f"{DISK}:StoredHome.store", SEE, "pass", "stage3-fp32-disk"),
    "staged-on-callers-stream": Race(
        f"{HOME}:fetching",
        'return lambda: _copied(view, device, lane, f"from {home.tier}")',
        'made = [_copied(view, device, lane, f"from {home.tier}")]; return made.pop',
        PARAMETERS,
        sample=True,
    ),
    # gathers
    "gather-never-awaited": Race(
        f"{GATHER}:GatherExecutor.arrive", "ticket.wait()", "pass", "little-live", sample=True
    ),
    "gathered-freed-at-once": Race(
        f"{GATHER}:GatherExecutor.free", "self._lane.free_after_use(store)", "store.free()", "little-live"
    ),
    "gathers-miss-the-step": Race(
        f"{GATHER}:GatherExecutor.shards_changed", "self._lane.see_writes_so_far()", "pass", "little-live"
    ),
    "gathered-on-callers-memory": Race(
        f"{GATHER}:GatherExecutor._submit_gather",
        "jobs.append(",
        "store.allocate(); jobs.append(",
        "little-live",
    ),
    "publishing-never-awaited": Race(
        "dsx_zero.gather.publishing:Gathering.finish", "work.wait()", "pass", "stage2-fp32-device", 2
    ),
    # gradients
    "reduced-before-written": Race(
        "dsx_zero.grads.reductions:Reducer._submit",
        "see_writes_so_far=True",
        "see_writes_so_far=False",
        "stage2-fp32-device",
        2,
        sample=True,
    ),
    "reduction-never-awaited": Race(
        "dsx_zero.grads.buffers:GroupGradients.finish", "pending.ticket.wait()", "pass", "stage2-fp32-device", 2
    ),
    "staging-freed-in-flight": Race(
        "dsx_zero.grads.leaving:Leaving.wait",
        "ticket.wait()",
        "pass",
        "accumulation-on-host",
    ),
    "carried-before-reduced": Race(
        "dsx_zero.homes.ring:Ring._fill", "self._device.wait_for(ready)", "pass", "accumulation-pageable", sample=True
    ),
    "added-before-arrived": Race(
        "dsx_zero.homes.ring:_land", "arrived.synchronize()", "pass", "accumulation-pageable", sample=True
    ),
    # the step
    "published-before-written": Race(
        "dsx_zero.step.runner:StepRunner._publish", "self._failure.run(ticket.wait, None)", "pass", FROM_HOST
    ),
    "norm-read-early": Race(
        "dsx_zero.step.nonfinite:_send", "if event is None or event.query() else None", "", "stage2-fp32-device"
    ),
    # transports and steps on a stream
    "messages-not-awaited": Race("dsx_zero.transports.protocol:Then.wait", "found.wait()", "pass", "hybrid-of-four", 4),
    "steps-before-written": Race(
        "dsx_comm.step_lane:_DeviceSteps.do",
        "stream.wait_stream(cuda.current_stream(device))",
        "pass",
        "quantised",
        2,
        sample=True,
    ),
    "steps-not-recorded": Race("dsx_comm.step_lane:_DeviceSteps.do", "event.record(stream)", "pass", "quantised", 2),
    "steps-not-awaited": Race(
        "dsx_comm.step_lane:_Enqueued.wait",
        "self._cuda.current_stream(self._device).wait_event(self._event)",
        "pass",
        "quantised",
        2,
    ),
    # activation checkpointing
    "activation-leaves-early": Race(f"{PLACES}:HostCopy.__init__", SEE, "pass", "activations-on-host"),
    "activation-dropped-in-flight": Race(
        f"{PLACES}:HostCopy.let_go", "self._leaving.wait()", "pass", "activations-on-host"
    ),
    "activation-back-too-soon": Race(
        f"{PLACES}:HostCopy.start", "self._lane.see_writes_so_far()", "pass", "activations-on-host"
    ),
    "activation-not-awaited": Race(
        f"{PLACES}:HostCopy.take", "ticket.wait()", "pass", "activations-on-host", sample=True
    ),
    # checkpoints behind training, states that move
    "save-copies-early": Race(
        f"{BEHIND}:_copy_from",
        "device.wait_for(ready)",
        "pass",
        "saved-behind-at-stage-2",
    ),
    "training-overtakes-save": Race(
        f"{BEHIND}:_copy_from",
        "device.wait_for_stream(stream)",
        "pass",
        "saved-behind-at-stage-2",
        delay_us=10_000,  # not in the sample: on a loaded machine the copy is over before training goes on
    ),
    "save-end-not-recorded": Race(
        f"{BEHIND}:_copy_from", "stream.record_event()", "torch.Event(device.torch_device)", "saved-behind-at-stage-2"
    ),
    "save-written-early": Race(f"{BEHIND}:_copy_on_device", "end.synchronize()", "pass", "saved-behind-at-stage-2"),
    "states-leave-on-a-stream": Race(
        "dsx_zero.state.moving:_Stash.__init__",
        "self._host.copy_(data, non_blocking=non_blocking)",
        "with torch.cuda.stream(torch.cuda.Stream()): self._host.copy_(data, non_blocking=True)",
        "states-moved-out",
    ),
    "states-come-back-on-a-stream": Race(
        "dsx_zero.state.moving:_Stash.bring_back",
        "self._bytes().copy_(self._host, non_blocking=non_blocking)",
        "with torch.cuda.stream(torch.cuda.Stream()): self._bytes().copy_(self._host, non_blocking=True)",
        "states-moved-out",
    ),
    # memory that another stream still uses
    "moved-state-not-recorded": Race(
        "dsx_zero.state.moving:_Stash.__init__",
        "data.record_stream(stream)",
        "pass",
        "states-moved-out-aside",
    ),
    "moved-state-back-too-soon": Race(
        "dsx_zero.state.moving:_Stash.bring_back",
        "Device.of(self._device).wait_for(self._left)",
        "pass",
        "states-moved-out-aside",
    ),
    "saved-value-not-recorded": Race(f"{BEHIND}:_copy_from", "value.record_stream(stream)", "pass", "copies-let-go"),
    "steps-tensor-not-recorded": Race(
        "dsx_comm.step_lane:_DeviceSteps.do", "tensor.record_stream(stream)", "pass", "steps-let-go", 2
    ),
    "hops-tensor-not-recorded": Race(
        "dsx_moe.exchange:HierarchicalExchange._start_on_stream",
        "tensor.record_stream(stream)",
        "pass",
        "hops-let-go",
        2,
    ),
    # experts, pipelines, slices
    "tokens-not-awaited": Race(
        "dsx_moe.exchange:DirectExchange.start", "work.wait", "lambda: None", "experts-with-capacity", 2, sample=True
    ),
    "hops-start-early": Race(
        "dsx_moe.exchange:HierarchicalExchange._start_on_stream",
        "device.wait_for(ready)",
        "pass",
        "experts-two-hops",
        4,
    ),
    "message-not-awaited": Race(
        "dsx_pipe.runtime.messages:Mailbox._receive_payload", "handle.wait()", "pass", "pipeline-1f1b", 2, sample=True
    ),
    "slices-not-awaited": Race(
        "dsx_pipe.tensor.linear:_Overlapped.backward", "pending.wait()", "pass", "tensor-slices", 2
    ),
    "transfer-not-awaited": Race(
        "dsx_moe.exchange:_PendingTransfer.wait", "self._wait()", "pass", "experts-dropless", 2
    ),
    "hops-not-awaited": Race(
        "dsx_moe.exchange:HierarchicalExchange._start_on_stream",
        "lambda: device.wait_for_stream(stream)",
        "lambda: None",
        "experts-two-hops",
        4,
    ),
}

SWAPPED = Race("dsx_zero.order.ahead:gathers_ahead", "if need is None:", "if True:", "stage3-fp32-device", 2)
"""Planted on one rank only: it gathers nothing ahead, so that its order differs from that of the others."""
