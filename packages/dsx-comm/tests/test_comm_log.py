import logging
import time

import dsx_comm
import dsx_comm.errors
import pytest
import torch
from dsx_comm.bandwidth import gbps, size_text, trimmed_mean
from dsx_comm.config import CommsLoggerConfig
from dsx_testkit import run_ranks


def test_bandwidth_formulas():
    # 1e6 bytes in 1 ms are 8 Gbit/s
    assert gbps("broadcast", 10**6, 1.0, 4) == (8.0, 8.0)
    assert gbps("all_reduce", 10**6, 1.0, 4) == (16.0, 12.0)
    assert gbps("all_gather_into_tensor", 10**6, 1.0, 4) == (32.0, 24.0)
    assert gbps("reduce_scatter_tensor", 10**6, 2.0, 4) == (16.0, 12.0)
    assert gbps("all_to_all_single", 10**6, 1.0, 4) == (8.0, 6.0)
    assert gbps("compressed_all_reduce", 10**6, 1.0, 4) == (16.0, 12.0)
    assert gbps("quantized_all_gather", 10**6, 1.0, 4) == (32.0, 24.0)
    assert gbps("an_unknown_name", 10**6, 1.0, 1) == (8.0, 8.0)
    assert gbps("barrier", 0, 0.0, 2) == (0.0, 0.0)
    assert trimmed_mean([1000.0] + [5.0] * 8 + [-1000.0]) == 5.0
    assert trimmed_mean([]) == 0.0
    assert [size_text(n) for n in (0, 1023, 1536, 3 << 20)] == ["0 B", "1023 B", "1.5 KB", "3 MB"]


def test_the_section_is_strict():
    assert CommsLoggerConfig.from_dict({"enabled": False, "prof_ops": ["all_reduce"]}).prof_ops == ("all_reduce",)
    with pytest.raises(
        dsx_comm.errors.CommConfigError, match=r"comms_logger\.prof_op: unknown key; did you mean 'prof_ops'"
    ):
        CommsLoggerConfig.from_dict({"prof_op": []})
    with pytest.raises(dsx_comm.errors.CommConfigError, match=r"comms_logger\.enabled: got 1, expected true or false"):
        CommsLoggerConfig(enabled=1)
    with pytest.raises(dsx_comm.errors.CommConfigError, match=r"comms_logger\.prof_ops: got 'all_reduce'"):
        CommsLoggerConfig(prof_ops="all_reduce")


def test_a_misspelt_section_is_not_taken_for_a_configuration_without_one():
    with pytest.raises(
        dsx_comm.errors.CommConfigError, match=r"comms_logger\.prof_opps: unknown key; did you mean 'prof_ops'"
    ):
        dsx_comm.configure({"enabled": True, "prof_opps": ["all_reduce"]})
    dsx_comm.configure({"train_batch_size": 8})  # a configuration that has none


def records(rank, n):
    t, big = torch.ones(256), torch.ones(1 << 16)
    dsx_comm.configure({"comms_logger": {"enabled": False}})  # false means off
    dsx_comm.all_reduce(t)
    assert not dsx_comm.has_comm_data()
    dsx_comm.configure(enabled=True)
    for _ in range(5):
        dsx_comm.all_reduce(t)
    dsx_comm.all_reduce(big, async_op=True).wait()
    dsx_comm.reduce_scatter_tensor(torch.empty(256), torch.ones(256 * n), async_op=True).wait()
    pair = dsx_comm.new_group([0, 1])
    if rank < 2:
        dsx_comm.all_gather_into_tensor(torch.empty(512), t, pair)
    dsx_comm.monitored_barrier()  # names the log knows no formula for must not end the process
    dsx_comm.all_gather_object([None] * n, 1)
    dsx_comm.all_reduce(t, log_name="gradients")
    result = dsx_comm.log_summary(return_dict=True)
    assert result is not None and result["metadata"]["pending"] == 0
    assert result["metadata"]["world_size"] == n and result["metadata"]["rank"] == rank
    assert result["straggler_analysis"] is None
    row = result["summary"]["all_reduce"][1024]
    assert row["count"] == 5 and row["msg_size_str"] == "1 KB"
    assert set(result["summary"]["all_reduce"]) == {1024, 1 << 18}
    assert result["summary"]["gradients"][1024]["count"] == 1
    if rank < 2:  # the size of the group counts, not that of the world
        row = result["summary"]["all_gather_into_tensor"][1024]
        assert row["tput_avg_gbps"] == pytest.approx(2 * row["busbw_avg_gbps"])
    names = dsx_comm.get_logged_comm_ops()
    assert {"all_reduce", "reduce_scatter_tensor", "monitored_barrier", "all_gather_object", "gradients"} <= set(names)
    assert dsx_comm.get_comm_operation_count("all_reduce") == 6
    dsx_comm.reset_log()
    assert not dsx_comm.has_comm_data()
    dsx_comm.configure(enabled=False)
    dsx_comm.all_reduce(t)
    assert dsx_comm.get_comm_operation_count() == 0


def test_the_log_counts_what_it_is_told_to():
    run_ranks(records, 3)


def latencies(rank, n):
    dsx_comm.configure(enabled=True)
    t = torch.ones(4)
    for late in (False, True, False, False, False):
        if late:
            _let_the_first_rank_go_ahead(rank)
        dsx_comm.all_reduce(t)
        dsx_comm.barrier()
    samples = list(next(e for (name, _, _), e in _entries().items() if name == "all_reduce").samples)
    # each latency by itself: the long second call does not leak into those after it
    assert len(samples) == 5
    if rank == 0:
        assert samples[1] > 100 and min(samples[2:]) < samples[1]
    result = dsx_comm.log_summary(show_straggler=True, return_dict=True)
    return result["straggler_analysis"]["all_reduce"][16]


def _let_the_first_rank_go_ahead(rank):
    """Rank 1 comes half a second after rank 0 has set out, however busy the machine is."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("set out", "1")
    else:
        store.wait(["set out"])
        time.sleep(0.5)


def _entries():
    from dsx_comm.log import LOG

    return LOG.entries()


def test_latencies_are_per_call_and_the_straggler_is_found():
    waiting, late = run_ranks(latencies, 2)
    assert waiting["comparable"] and late["comparable"]
    assert waiting["total_straggler_ms"] > 100  # rank 0 waited for rank 1
    assert late["total_straggler_ms"] < waiting["total_straggler_ms"]


def asynchronous(rank, n):
    dsx_comm.configure(enabled=True)
    out = torch.empty(10)
    small = torch.ones(3)
    began = time.perf_counter()
    handles = [
        dsx_comm.reduce_scatter_tensor(out, torch.ones(10 * n), async_op=True),
        dsx_comm.all_reduce(small, dsx_comm.ReduceOp.AVG, async_op=True),
        dsx_comm.all_reduce(torch.ones(5), async_op=True),
    ]
    while not all(handle.is_completed() for handle in handles):
        time.sleep(0.01)
    time.sleep(0.5)  # they have completed long before anybody waits
    waited = time.perf_counter() - began
    for handle in handles:
        handle.wait()
    latest = max(max(e.samples) for e in _entries().values())
    dsx_comm.barrier()
    return waited * 1e3, latest, out.tolist(), len(_entries())


def test_asynchronous_calls_are_timed_to_their_completion_without_blocking():
    for waited, latest, out, entries in run_ranks(asynchronous, 2):
        assert latest < waited - 250  # not to the wait
        assert out == [2.0] * 10 and entries == 4


def blocked(rank, n):
    import torch.distributed as dist

    dsx_comm.configure(enabled=True)
    dsx_comm.check_first_calls(0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        handle = dsx_comm.all_gather_into_tensor(torch.empty(2), torch.ones(1), async_op=True)
        assert not handle.is_completed()
        store.set("issued", "")  # rank 1 calls only now: a call that waited for it would never come here
    else:
        store.wait(["issued"])
        handle = dsx_comm.all_gather_into_tensor(torch.empty(2), torch.ones(1), async_op=True)
    handle.wait()


def test_logging_an_asynchronous_call_does_not_make_it_wait():
    run_ranks(blocked, 2)


def selected(rank, n):
    dsx_comm.configure(CommsLoggerConfig(enabled=True, prof_all=False, prof_ops=("barrier", "mine")))
    t = torch.ones(1)
    dsx_comm.all_reduce(t)
    dsx_comm.barrier()
    dsx_comm.all_reduce(t, log_name="mine")
    dsx_comm.broadcast(t, 0, prof=True)
    first = dsx_comm.get_logged_comm_ops()
    dsx_comm.reset_log()
    dsx_comm.configure(prof_all=True, debug=True)
    dsx_comm.all_reduce(t)
    dsx_comm.all_reduce(t, debug="named")
    return first, dsx_comm.get_logged_comm_ops()


def test_selection_by_name_and_the_callers_name():
    first, second = run_ranks(selected, 1)[0]
    assert first == ["barrier", "mine", "broadcast"]
    assert second == ["all_reduce | [Caller Func: selected]", "all_reduce | [Caller Func: named]"]


def verbose(rank, n):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx_comm").addHandler(handler)
    logging.getLogger("dsx_comm").setLevel(logging.INFO)
    dsx_comm.configure(enabled=True, verbose=True)
    dsx_comm.all_reduce(torch.ones(256))
    return lines


def test_verbose_logs_every_call():
    (line,) = run_ranks(verbose, 1)[0]
    assert line.startswith("comm op: all_reduce | time (ms): ") and "msg size: 1 KB" in line


def printed(rank, n):
    dsx_comm.configure(enabled=True)
    dsx_comm.all_reduce(torch.ones(256))
    dsx_comm.log_summary(show_straggler=True)


def test_rank_0_prints_the_table(capsys):
    run_ranks(printed, 2)
    text = capsys.readouterr().out
    assert text.count("Comm. Op") == 1
    head, name, row = text.splitlines()[:3]
    assert "busbw_avg (Gbps)" in head and "Total straggler(ms)" in head
    assert name == "all_reduce" and row.split()[:3] == ["1", "KB", "1"]


def test_the_section_nests_in_a_pydantic_model():
    pydantic = pytest.importorskip("pydantic")

    class Root(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")
        comms_logger: CommsLoggerConfig = pydantic.Field(default_factory=CommsLoggerConfig)

    root = Root.model_validate({"comms_logger": {"enabled": True, "prof_ops": ["barrier"]}})
    assert root.comms_logger == CommsLoggerConfig(enabled=True, prof_ops=("barrier",))
    with pytest.raises(pydantic.ValidationError, match="enabeld"):
        Root.model_validate({"comms_logger": {"enabeld": True}})


def many_logged(rank, n):
    dsx_comm.configure(enabled=True)
    for k in range(60):  # callbacks of the backend meet waits that hold the handle's lock
        t = torch.ones(50)
        handle = dsx_comm.all_reduce(t, dsx_comm.ReduceOp.AVG, async_op=True)
        if (k + rank) % 3 == 0:
            time.sleep(0.002)
        handle.wait()
        out = torch.empty(10)
        dsx_comm.reduce_scatter_tensor(out, torch.ones(10 * n), async_op=True).wait()
        assert (t == 1).all() and (out == n).all()
    dsx_comm.barrier()
    return dsx_comm.get_comm_operation_count("all_reduce")


def test_logged_asynchronous_calls_never_block_each_other():
    assert run_ranks(many_logged, 2, timeout=40) == [60, 60]
