"""The test kit's stand-ins for links, devices, nodes and streams do what they promise."""

import os
import time

import pytest
import torch
from dsx_testkit import (
    ArenaFullError,
    Crossing,
    DeviceArena,
    FakeCuda,
    Nodes,
    PacedLink,
    SleepingLinear,
    StreamMemory,
    count_calls,
    recorded_collectives,
    tiny,
)


def test_transfers_of_one_link_take_turns_and_arrive_in_order():
    link = PacedLink(1e6, latency_s=0.01)
    begin = time.perf_counter()
    first, second = link.start(20_000), link.start(20_000)
    assert not second.is_completed()
    second.wait()
    assert time.perf_counter() - begin >= 0.05 - 1e-3  # two times 20 ms on the wire and the latency
    assert first.is_completed() and second.is_completed()
    second.wait()
    assert (link.bytes, link.transfers) == (40_000, 2) and link.busy_s == pytest.approx(0.04)
    with pytest.raises(ValueError, match="above 0"):
        PacedLink(0)


def test_a_sleeping_layer_computes_as_a_linear_one():
    layer, x = SleepingLinear(3, 0.01), torch.randn(2, 3, requires_grad=True)
    begin = time.perf_counter()
    layer(x).sum().backward()
    assert time.perf_counter() - begin >= 0.03 - 1e-3
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, 3))


def test_the_arena_counts_what_lives_on_it_and_refuses_more_than_it_holds():
    arena = DeviceArena(capacity=1000)
    first = arena.empty(100)
    view = first[10:]
    second, _ = arena.to_device(torch.ones(50, dtype=torch.float64))
    assert (arena.in_use, arena.peak) == (800, 800) and torch.equal(second, torch.ones(50, dtype=torch.float64))
    with pytest.raises(ArenaFullError, match="400 bytes asked for, 800 of 1000 in use"):
        arena.empty((10, 10))
    del first
    assert arena.in_use == 800, "a view keeps the memory"
    del view
    assert (arena.in_use, arena.peak) == (400, 800)
    arena.reset_peak()
    out = torch.empty(50, dtype=torch.float64)
    arena.to_host(second, out).wait()
    assert torch.equal(out, second) and arena.peak == 400
    assert (arena.to_device_link.bytes, arena.to_host_link.bytes) == (400, 400)


def test_nodes_number_ranks_as_launchers_do(monkeypatch):
    nodes = Nodes(world=6, devices=2)
    assert nodes.count == 3 and list(nodes.ranks_of(1)) == [2, 3] and nodes.same_node(4, 5)
    monkeypatch.setenv("LOCAL_RANK", "9")
    with nodes.environment(3):
        assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]) == ("1", "2", "1")
    assert os.environ["LOCAL_RANK"] == "9"
    crossing = Crossing(nodes)
    crossing.send(2, range(6), 10)
    assert (crossing.inside, crossing.between) == (10, 40)
    with pytest.raises(ValueError, match="divisor"):
        Nodes(5, 2)


def test_calls_into_our_own_files_are_counted_and_no_others():
    with count_calls("dsx_testkit") as found:
        Nodes(4, 2).same_node(0, 1)
        torch.ones(3).sum()
    assert found.total == 4 and found.depth == 2  # __post_init__, same_node, and twice node_of below it
    assert "node_of" in found.table() and len(found.files) >= 1
    with count_calls("dsx_nothing") as none:
        tiny.__dict__.get("x")
    assert none.total == 0


def test_streams_and_events_note_the_order():
    with FakeCuda().installed() as cuda:
        side = torch.cuda.Stream(device=0, priority=-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            event = torch.cuda.Event()
            event.record()
        torch.cuda.current_stream().wait_event(event)
        torch.cuda.synchronize()
    assert cuda.log == [
        "stream 1 waits for default", "event 1 on stream 1", "default waits for event 1", "host waits for the device",
    ]  # fmt: skip
    assert torch.cuda.Event is not cuda.event


def test_recorded_collectives_move_nothing_and_note_their_waits():
    tensor = torch.ones(2)
    with recorded_collectives(completed=False) as works:
        work = torch.distributed.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed()
    assert [one.waits for one in works] == [[()]] and torch.equal(tensor, torch.ones(2))


def two_streams(how):
    """Reports of a program that uses memory on two streams, `how` it may."""
    with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
        side, x = torch.cuda.Stream(), torch.zeros(8, device="meta")
        if how == "waits":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[:4].add_(1)
            done = side.record_event()
        if how != "forgets to wait":
            torch.cuda.current_stream().wait_event(done)
        x[:4] * 2
    return memory.reports


def test_memory_that_two_streams_use_without_an_order_is_reported():
    assert two_streams("waits") == []
    early = two_streams("does not see what was written")
    assert any("aten.add_.Tensor on stream 1 is not ordered behind aten.zeros.default on default" in r for r in early)
    assert all(report.startswith("test_stand_ins.py:") for report in early)
    assert any(
        "aten.mul.Tensor on default is not ordered behind aten.add_" in r for r in two_streams("forgets to wait")
    )


def test_parts_of_memory_are_told_apart_and_reads_do_not_disturb_each_other():
    with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
        side, x = torch.cuda.Stream(), torch.zeros(8, device="meta")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[:4].add_(1)
            x[4:].sum()
        x[4:].sum()
    assert memory.reports == []


@pytest.mark.parametrize("how", ["dropped", "recorded", "waited for"])
def test_memory_goes_back_to_the_stream_that_allocated_it(how):
    with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
        side, x = torch.cuda.Stream(), torch.zeros(8, device="meta")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if how == "recorded":
            x.record_stream(side)
        del x
        if how == "waited for":
            torch.cuda.current_stream().wait_stream(side)
        torch.zeros(8, device="meta")
    assert len(memory.reports) == (how == "dropped")
    assert all("handed out again on default" in report for report in memory.reports)


def test_the_host_waits_for_copies_only_where_a_device_makes_it():
    def after(copy):
        with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
            x, host = torch.zeros(8, device="meta"), torch.ones(8)
            copy(host, x)
            host.add_(1)
        return memory.reports

    assert after(lambda host, x: host.copy_(x)) == []
    assert after(lambda host, x: (host.copy_(x, non_blocking=True), x.sum().item())) == []
    (late,) = after(lambda host, x: host.copy_(x, non_blocking=True))
    assert "aten.add_.Tensor on host is not ordered behind aten.copy_.default on default" in late
