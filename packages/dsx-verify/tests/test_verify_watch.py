"""Hangs of programs that know nothing of dsx are explained: who is missing, who calls something else, and where."""

import json
import os
import pickle
import threading
import time

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_verify import AuditError, explain_dumps, read_dumps, watch, watching
from dsx_verify.flight import lateness


def waited_for(seen, seconds=15.0):
    end = time.monotonic() + seconds
    while seen.hang is None and time.monotonic() < end:
        time.sleep(0.05)
    return None if seen.hang is None else (seen.hang.kind, seen.hang.ranks, seen.hang.operation, seen.hang.text)


def hang(rank, world, fault, folder):
    from datetime import timedelta

    import torch.distributed as dist

    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    seen = watch(model, limit=0.5)
    store = dist.FileStore(folder, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    trained = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        trained(torch.ones(3, 4)).sum().backward()
    works = []
    if fault == "missing" and rank != 1:
        works.append(dist.all_reduce(torch.ones(7), async_op=True))
    loss = trained(torch.ones(3, 4)).sum() if fault == "backward" else None
    backward = threading.Thread(target=loss.backward) if loss is not None else None
    if backward is not None and rank == 0:
        backward.start()
    told = waited_for(seen)
    seen.close()
    if rank == 1:  # it comes after all, so that the others can end
        works += [] if backward else [dist.all_reduce(torch.ones(7), async_op=True)]
        backward.start() if backward else None
    backward.join() if backward else works[0].wait()
    return told


def pair(rank, world, folder):
    """Rank 0 waits in a group of two of three ranks; nobody has called anything in it before."""
    from datetime import timedelta

    import torch.distributed as dist

    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
    seen = watch(limit=0.5)
    store = dist.FileStore(folder, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    inner = dist.new_group([0, 1])
    dist.barrier()
    work = dist.all_reduce(torch.ones(7), group=inner, async_op=True) if rank == 0 else None
    told = waited_for(seen)
    seen.close()
    (work or dist.all_reduce(torch.ones(7), group=inner, async_op=True)).wait() if rank < 2 else None
    return told


def test_a_rank_outside_of_a_group_is_not_missed_in_it(tmp_path):
    told = run_ranks(pair, 3, str(tmp_path / "store"), backend=None, timeout=60)
    for kind, ranks, operation, text in told:
        assert (kind, ranks, operation) == ("missing", (1,), "all_reduce of [[7]]"), text


@pytest.mark.parametrize("fault", ["missing", "backward"])
def test_a_rank_that_does_not_come_is_named(fault, tmp_path):
    told = run_ranks(hang, 2, fault, str(tmp_path / "store"), backend=None, timeout=60)
    for kind, ranks, operation, text in told:
        assert kind == "missing" and ranks == (1,), text
        assert operation.startswith("all_reduce") and "test_verify_watch.py" in text
        if fault == "missing":
            assert operation == "all_reduce of [[7]]"


def entry(number, name, sizes, group=("0", "default_pg"), **more):
    frames = [{"filename": "/home/me/train.py", "line": 12, "name": "step"}]
    return {
        **{"process_group": group, "collective_seq_id": number, "profiling_name": f"nccl:{name}", "is_p2p": False},
        **{"input_sizes": sizes, "state": "scheduled", "pg_id": 0, "frames": frames, **more},
    }


def dump(*entries, done=0):
    status = {"0": {"last_completed_collective": done, "last_enqueued_collective": len(entries)}}
    return {"entries": list(entries), "pg_status": status, "pg_config": {"0": {"ranks": "[0, 1, 2]"}}}


def test_sizes_that_differ_are_named():
    right, wrong = entry(2, "broadcast", [[24084544]]), entry(2, "broadcast", [[64]])
    first = entry(1, "all_reduce", [[3]])
    found = explain_dumps({0: dump(first, right, done=1), 1: dump(first, wrong, done=1), 2: dump(first, right, done=1)})
    assert (found.kind, found.ranks, found.number) == ("other sizes", (1,), 2)
    assert "rank 1: broadcast of [[64]] at /home/me/train.py:12 in step" in found.text


def test_dtypes_that_differ_are_named():
    right, wrong = (entry(1, "all_reduce", [[8]], input_dtypes=[kind]) for kind in ("Float", "BFloat16"))
    found = explain_dumps({0: dump(right), 1: dump(wrong), 2: dump(right)})
    assert (found.kind, found.ranks) == ("other dtypes", (1,))
    assert "rank 1: all_reduce of [[8]] in BFloat16" in found.text


def test_a_rank_that_has_two_groups_calls_in_another_order_is_named():
    """Each rank has launched both; of one group a rank has not begun, and of the other one the two other ranks."""
    pair = ("1", "second group")
    first, second = entry(1, "all_reduce", [[9]]), entry(1, "all_reduce", [[9]], group=pair, pg_id=1)
    begun = [{**one, "state": "started"} for one in (first, second)]
    found = explain_dumps({0: dump(begun[0], second), 1: dump(first, begun[1]), 2: dump(begun[0], second)})
    assert (found.kind, found.ranks, found.group) == ("other order", (1,), "0")


def test_the_two_backends_of_a_group_number_their_calls_apart():
    told = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "input_sizes": [[3]], "is_p2p": False}
    done = {**told, "profiling_name": "gloo:barrier", "pg_id": "0", "state": "completed"}
    late = {**told, "profiling_name": "nccl:all_reduce", "pg_id": "nccl 0", "state": "started"}
    status = {"0": {"last_completed_collective": 1}, "nccl 0": {"last_completed_collective": 0}}
    there, away = ({"entries": entries, "pg_status": status} for entries in ([done, late], [done]))
    found = explain_dumps({0: there, 1: away}, world_size=2)
    assert found is None or found.kind == "missing"
    assert found is not None and "all_reduce" in found.operation


def test_the_recorders_of_both_backends_are_read(monkeypatch):
    """NCCL's exists in CUDA builds only; it numbers its groups from 0 on again."""

    def recorder(name, state):
        told = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "pg_status": {"0": {"state": state}}}
        return lambda entries, stacks, active: pickle.dumps({**told, "entries": [entry(1, name, [[3]])]})

    compiled = torch._C._distributed_c10d
    monkeypatch.setattr(compiled, "_dump_fr_trace", recorder("barrier", "gloo's"))
    monkeypatch.setattr(compiled, "_dump_nccl_trace", recorder("all_reduce", "nccl's"), raising=False)
    found = watching._dump(stacks=False)
    assert [(e["pg_id"], e["profiling_name"]) for e in found["entries"]] == [
        ("0", "nccl:barrier"),
        ("nccl 0", "nccl:all_reduce"),
    ]
    assert found["pg_status"] == {"0": {"state": "gloo's"}, "nccl 0": {"state": "nccl's"}}
    monkeypatch.delattr(compiled, "_dump_nccl_trace")
    assert len(watching._dump(stacks=False)["entries"]) == 1


def test_another_collective_is_named_before_a_missing_rank():
    first = entry(1, "all_reduce", [[3]])
    one, other = entry(2, "all_gather", [[3]]), entry(2, "reduce_scatter", [[3]])
    found = explain_dumps({0: dump(first, one, done=1), 1: dump(first, other, done=1), 2: dump(first, done=1)})
    assert found.kind == "other collective" and len(found.ranks) == 1


def test_a_rank_without_a_dump_did_not_answer_and_equal_calls_are_slow():
    first, second = entry(1, "all_reduce", [[3]]), entry(2, "all_reduce", [[4]])
    both = dump(first, second, done=1)
    found = explain_dumps({0: both, 1: both}, world_size=3)
    assert found.kind == "missing" and found.ranks == (2,) and "rank 2: did not answer" in found.text
    assert explain_dumps({0: both, 1: both, 2: both}).kind == "slow"
    done = dump(first, second, done=2)
    assert explain_dumps({0: done, 1: done, 2: done}) is None


def test_a_rank_that_waits_in_another_group_is_shown():
    pair = ("1", "tensor parallel")
    world = entry(1, "all_reduce", [[3]])
    inner = entry(1, "all_gather", [[5]], group=pair, pg_id=1)
    found = explain_dumps({0: dump(world), 1: dump(inner), 2: dump(world)}, {1: "/home/me/moe.py:3 in route"})
    assert found.kind == "missing" and "/home/me/moe.py:3 in route" in found.text


def test_dumps_are_read_from_files_and_code_in_them_is_refused(tmp_path):
    first = entry(1, "all_reduce", [[3]])
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(dump(first)))
    (tmp_path / "trace_rank_1.json").write_text(json.dumps(dump()))
    found = read_dumps(sorted(tmp_path.iterdir()))
    assert explain_dumps(found).ranks == (1, 2)
    (tmp_path / "trace_rank_2").write_bytes(pickle.dumps(os.system))
    with pytest.raises(AuditError, match="no dump of torch's flight recorder"):
        read_dumps([tmp_path / "trace_rank_2"])
    with pytest.raises(AuditError, match="name that ends with the rank"):
        read_dumps([tmp_path / "trace"])


def test_the_rank_that_is_always_late_is_found():
    def at(late):
        return dump(*(entry(n, "all_reduce", [[3]], time_created_ns=int(1e9 * n + late * 1e6)) for n in range(1, 6)))

    assert lateness({0: at(0), 1: at(40), 2: at(1)}) == {0: 0.0, 1: 40.0, 2: 1.0}


def too_late(rank, world):
    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
    with pytest.raises(AuditError, match="before init_process_group"):
        watch()
    with pytest.raises(AuditError, match="above 0"):
        watch(limit=0)


def test_a_watch_that_would_see_nothing_is_refused():
    run_ranks(too_late, 1)
