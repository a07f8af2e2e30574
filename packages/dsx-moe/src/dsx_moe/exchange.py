"""Sends rows between the ranks of an expert-parallel group: directly, or in two hops, inside the node and between
nodes.

An `Exchange` sends exactly as many rows as a matrix `traffic[s][d]` says (rows from rank s to rank d), and returns a
`Transfer` at once: its `rows` are filled when `wait()` has returned. `send_rows` begins such a transfer inside
autograd and `receive_rows` ends it. Each is the derivative of the other, so gradients are sent back in the same way,
while other chunks are computed, and derivatives of any order exist.

Direct: one all-to-all. Two hops (`HierarchicalExchange`): with D ranks per node, rows for device d of any node first go
to device d of the own node, over the fast links, and then to their node, in one message per node instead of D.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import dsx_comm
import torch
from dsx_core.device import Device


class Transfer(Protocol):
    """A transfer of rows that was begun."""

    rows: torch.Tensor
    """The received rows, sorted by sending rank. They are valid after `wait`."""

    def wait(self) -> None:
        """Wait until the rows have arrived. On a device the current stream waits, and the host does not."""
        ...


class Exchange(Protocol):
    """Sends rows between the P ranks of a group. `gather_counts` and `start` are collective."""

    @property
    def size(self) -> int:
        """P, the number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        ...

    def gather_counts(self, own: torch.Tensor) -> torch.Tensor:
        """Gather int64 [n] of every rank as [P, n] on the host."""
        ...

    def start(self, rows: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        """Begin to send `rows`, sorted by receiving rank. `traffic` [P, P] has the number of rows of each pair."""
        ...


class _PendingTransfer:
    """A transfer with its wait function, and with the tensors that must stay alive until it is complete."""

    def __init__(self, rows: torch.Tensor, wait: Callable[[], Any], *kept: Any) -> None:
        self.rows, self._wait, self._kept_alive = rows, wait, kept

    def wait(self) -> None:
        self._wait()
        self._kept_alive = ()


class DirectExchange:
    """One all-to-all with exact splits.

    Args:
        group: process group; None: all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = dsx_comm.get_world_size(group)
        self.rank = dsx_comm.get_rank(group)

    def __deepcopy__(self, memo: Any) -> DirectExchange:
        return self  # copies of a layer communicate over the same group

    def gather_counts(self, own: torch.Tensor) -> torch.Tensor:
        """See `Exchange`."""
        gathered = own.new_empty(self.size * own.numel())
        dsx_comm.all_gather_into_tensor(gathered, own.contiguous(), group=self.group)
        return gathered.view(self.size, -1).cpu()

    def start(self, rows: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        """See `Exchange`."""
        send, receive = traffic[self.rank].tolist(), traffic[:, self.rank].tolist()
        arriving = rows.new_empty(sum(receive), *rows.shape[1:])
        source = rows.contiguous()
        work = dsx_comm.all_to_all_single(arriving, source, receive, send, group=self.group, async_op=True)
        return _PendingTransfer(arriving, work.wait, source)


class HierarchicalExchange(DirectExchange):
    """Two all-to-alls: inside the node, then between equal devices of the nodes.

    Both hops of a transfer overlap with the caller's computation. They run on a thread for host tensors, and on a
    stream on a device.

    Args:
        hierarchy: groups of ranks inside the node and between nodes (`dsx_comm.make_hierarchy`). No other code may use
            them, because transfers run on a thread of their own.
    """

    def __init__(self, hierarchy: dsx_comm.Hierarchy) -> None:
        super().__init__(hierarchy.group)
        self.hierarchy = hierarchy
        self._thread: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def start(self, rows: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        """See `Exchange`."""
        arriving = rows.new_empty(int(traffic[:, self.rank].sum()), *rows.shape[1:])
        source = rows.contiguous().detach()
        if Device.of(rows).is_accelerator:
            return self._start_on_stream(arriving, source, traffic)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsx-moe-hops")
        done: Future[None] = self._thread.submit(self._two_hops, arriving, source, traffic)
        return _PendingTransfer(arriving, done.result, source)

    def _start_on_stream(self, arriving: torch.Tensor, source: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        device = Device.of(source)
        stream: Any = self._stream or device.new_stream()
        self._stream = stream
        ready = device.event()
        with device.on(stream):
            device.wait_for(ready)
            self._two_hops(arriving, source, traffic)
        for tensor in (arriving, source):
            tensor.record_stream(stream)
        return _PendingTransfer(arriving, lambda: device.wait_for_stream(stream), source)

    @torch.no_grad()
    def _two_hops(self, arriving: torch.Tensor, source: torch.Tensor, traffic: torch.Tensor) -> None:
        at = self.hierarchy
        # traffic as [from node, from device, to node, to device]
        grid = traffic.view(at.nodes, at.devices, at.nodes, at.devices)
        by_device = _reorder(source, grid[at.node, at.device])  # rows are sorted by (to node, to device)
        receive = grid[at.node, :, :, at.device]  # [from device, to node]
        after_first_hop = source.new_empty(int(receive.sum()), *source.shape[1:])
        _hop(after_first_hop, by_device, receive.sum(1), grid[at.node, at.device].sum(0), at.intra)
        by_node = _reorder(after_first_hop, receive)
        _hop(arriving, by_node, grid[:, :, at.node, at.device].sum(1), receive.sum(0), at.inter)


def _hop(output: torch.Tensor, source: torch.Tensor, receive: torch.Tensor, send: torch.Tensor, group: Any) -> None:
    if group is None:  # there is one rank per node, or only one node, so this hop sends nothing
        output.copy_(source)
    else:
        dsx_comm.all_to_all_single(output, source, receive.tolist(), send.tolist(), group=group)


def _reorder(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Sort blocks of rows. The blocks (i, j) have `sizes[i, j]` rows; they come sorted by i and leave sorted by j."""
    if 1 in sizes.shape:
        return rows
    blocks = rows.split(sizes.reshape(-1).tolist())
    return torch.cat([blocks[i * sizes.shape[1] + j] for j in range(sizes.shape[1]) for i in range(sizes.shape[0])])


# - inside autograd


class Link:
    """One transfer in autograd's graph. `adjoint` is the transfer of its gradients in the other direction."""

    def __init__(self, exchange: Exchange, traffic: torch.Tensor) -> None:
        self.exchange, self.traffic = exchange, traffic
        self.transfer: Transfer | None = None
        self._adjoint: Link | None = None

    @property
    def adjoint(self) -> Link:
        """The link that transfers the gradients."""
        if self._adjoint is None:
            self._adjoint = Link(self.exchange, self.traffic.t())
            self._adjoint._adjoint = self
        return self._adjoint


def send_rows(rows: torch.Tensor, link: Link) -> torch.Tensor:
    """Begin a transfer. Returns a ticket for `receive_rows`: an empty tensor that links the two in autograd's graph."""
    return _Send.apply(rows, link)  # type: ignore[no-any-return]


def receive_rows(ticket: torch.Tensor, link: Link) -> torch.Tensor:
    """Wait for the transfer that `send_rows` began on `link`, and return the rows.

    Raises:
        RuntimeError: the transfer was received before.
    """
    return _Receive.apply(ticket, link)  # type: ignore[no-any-return]


# The ticket has no elements, because autograd requires that a gradient has the shape of its tensor. The number of rows
# that arrive differs from the number of rows that were sent, so neither could be the gradient of the other.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link = link
        link.transfer = link.exchange.start(rows, link.traffic)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return _Receive.apply(grad, ctx.link.adjoint), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link = link
        transfer, link.transfer = link.transfer, None
        if transfer is None:
            raise RuntimeError("receive_rows: no transfer is under way on this link; send_rows begins one")
        transfer.wait()
        return transfer.rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return _Send.apply(grad, ctx.link.adjoint), None
