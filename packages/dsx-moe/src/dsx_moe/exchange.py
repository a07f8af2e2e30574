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


class Transfer(Protocol):
    """Rows under way."""

    rows: torch.Tensor
    """What arrives, by sending rank; its content counts after `wait`."""

    def wait(self) -> None:
        """Return when the rows are there (on a device: when the current stream will see them)."""
        ...


class Exchange(Protocol):
    """Moves rows between the P ranks of a group; all its calls are collective."""

    @property
    def size(self) -> int:
        """P, the number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    def gather_counts(self, own: torch.Tensor) -> torch.Tensor:
        """int64 [n] of every rank, as [P, n] on the host."""
        ...

    def start(self, rows: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        """Begin to send `rows`, which are sorted by receiving rank, as `traffic` [P, P] says."""
        ...


class _Arriving:
    """Rows under way, with what has to be waited for and kept alive until then."""

    def __init__(self, rows: torch.Tensor, wait: Callable[[], Any], *kept: Any) -> None:
        self.rows, self._wait, self._kept = rows, wait, kept

    def wait(self) -> None:
        self._wait()
        self._kept = ()


class DirectExchange:
    """One all-to-all with exact splits.

    Args:
        group: a process group; None: all ranks.
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
        return _Arriving(arriving, work.wait, source)


class HierarchicalExchange(DirectExchange):
    """Two all-to-alls: inside the node, then between equal devices of the nodes.

    Both hops of a transfer go on beside the caller's computation: for host tensors on a thread, on CUDA on a stream.

    Args:
        hierarchy: from `dsx_comm.make_hierarchy`; no other code may use its groups.
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
        if rows.is_cuda:
            return self._start_on_stream(arriving, source, traffic)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsx-moe-hops")
        done: Future[None] = self._thread.submit(self._two_hops, arriving, source, traffic)
        return _Arriving(arriving, done.result, source)

    def _start_on_stream(self, arriving: torch.Tensor, source: torch.Tensor, traffic: torch.Tensor) -> Transfer:
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            self._two_hops(arriving, source, traffic)
        for tensor in (arriving, source):
            tensor.record_stream(self._stream)
        return _Arriving(arriving, lambda: torch.cuda.current_stream(source.device).wait_stream(self._stream), source)

    @torch.no_grad()
    def _two_hops(self, arriving: torch.Tensor, source: torch.Tensor, traffic: torch.Tensor) -> None:
        at = self.hierarchy
        # traffic as [from node, from device, to node, to device]
        grid = traffic.view(at.nodes, at.devices, at.nodes, at.devices)
        by_device = _reorder(source, grid[at.node, at.device])  # rows are sorted by (to node, to device)
        receive = grid[at.node, :, :, at.device]  # [from device, to node]
        met = source.new_empty(int(receive.sum()), *source.shape[1:])
        _hop(met, by_device, receive.sum(1), grid[at.node, at.device].sum(0), at.intra)
        by_node = _reorder(met, receive)
        _hop(arriving, by_node, grid[:, :, at.node, at.device].sum(1), receive.sum(0), at.inter)


def _hop(output: torch.Tensor, source: torch.Tensor, receive: torch.Tensor, send: torch.Tensor, group: Any) -> None:
    if group is None:  # one rank per node, or one node
        output.copy_(source)
    else:
        dsx_comm.all_to_all_single(output, source, receive.tolist(), send.tolist(), group=group)


def _reorder(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Sorts rows, which are blocks (i, j) of `sizes` [I, J] rows with i first, so that j is first."""
    if 1 in sizes.shape:
        return rows
    blocks = rows.split(sizes.reshape(-1).tolist())
    return torch.cat([blocks[i * sizes.shape[1] + j] for j in range(sizes.shape[1]) for i in range(sizes.shape[0])])


# - inside autograd


class Link:
    """One transfer of a graph and, in `adjoint`, the transfer of its gradients in the other direction."""

    def __init__(self, exchange: Exchange, traffic: torch.Tensor) -> None:
        self.exchange, self.traffic = exchange, traffic
        self.transfer: Transfer | None = None
        self._adjoint: Link | None = None

    @property
    def adjoint(self) -> Link:
        """The link of the gradients."""
        if self._adjoint is None:
            self._adjoint = Link(self.exchange, self.traffic.t())
            self._adjoint._adjoint = self
        return self._adjoint


def send_rows(rows: torch.Tensor, link: Link) -> torch.Tensor:
    """Begin a transfer. What comes back is a ticket for `receive_rows`: an empty tensor that ties the two together."""
    return _Send.apply(rows, link)  # type: ignore[no-any-return]


def receive_rows(ticket: torch.Tensor, link: Link) -> torch.Tensor:
    """Wait for the transfer that `send_rows` began on `link`, and return the rows.

    Raises:
        RuntimeError: the transfer was received before.
    """
    return _Receive.apply(ticket, link)  # type: ignore[no-any-return]


# The ticket has no elements, because autograd wants a gradient of the shape of its tensor: rows that arrive are other
# ones, and of another number, than the rows of the gradient that go back.


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
