"""`step_during_backward` where no memory holds the new parameters: masters and states on disk, and fp32 parameters in
host memory that are their own masters. The bits are those of the same stage without offload.
"""

from __future__ import annotations

import copy
import errno
import os
import signal
import threading
import time
from contextlib import contextmanager

import dsx_zero
import pytest
import torch
from dsx_testkit import RankError, run_ranks, tiny

pytest.importorskip("dsx_ops")

WIDTH = 24
BLOCK = WIDTH * WIDTH + WIDTH


class Store:
    """A store in memory. Transfers happen when they are waited for, and until then the target holds NaN. It takes one
    caller at a time, as `dsx_nvme.TensorStore` does.
    """

    def __init__(self):
        self.tensors, self.under_way, self.inside, self.threads = {}, {}, None, set()
        self.before_put = lambda name: None

    @contextmanager
    def alone(self):
        assert self.inside in (None, threading.get_ident()), "two threads call the store at the same time"
        outermost, self.inside = self.inside is None, threading.get_ident()
        self.threads.add(threading.current_thread().name)
        time.sleep(0.0002)  # another thread gets its turn here
        try:
            yield
        finally:
            if outermost:
                self.inside = None

    def __contains__(self, name):
        with self.alone():
            return name in self.tensors

    def put(self, name, tensor):
        with self.alone():
            self.before_put(name)
            self.finish(name)
            self.tensors.setdefault(name, torch.full_like(tensor, float("nan")))
            self.under_way[name] = Later(lambda: self.tensors[name].copy_(tensor))
            return self.under_way[name]

    def get(self, name, out=None):
        with self.alone():
            self.finish(name)
            out.fill_(float("nan"))
            return Later(lambda: out.copy_(self.tensors[name]))

    def delete(self, name):
        with self.alone():
            self.finish(name)
            del self.tensors[name]

    def finish(self, name):
        if name in self.under_way:
            self.under_way.pop(name).wait()


class Later:
    def __init__(self, job):
        self.job, self.lock = job, threading.Lock()

    def wait(self):
        with self.lock:
            job, self.job = self.job, lambda: None
            job()


NVME = {"device": "nvme"}
PLACES = {
    "device": {},
    "disk": {"offload_optimizer": NVME},
    "disk, host": {"offload_optimizer": NVME, "offload_param": {"device": "cpu"}},
    "disk, disk": {"offload_optimizer": NVME, "offload_param": NVME},  # gradients too; parameters up to `max_in_cpu`
    "host, host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def adam(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)


def built(stage, where, dtype=torch.float32, *, store=None, check=False, optimizer=adam, **section):
    places = {key: dict(place) for key, place in PLACES[where].items()}
    if section:
        places["offload_optimizer"] |= section
    config = {
        "stage": stage,
        "reduce_bucket_size": BLOCK,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 300,  # some units have several sub-groups
        **places,
    }
    precision = dsx_zero.Precision(check_overflow=check)
    model = tiny.Residual(WIDTH, aside=True, uneven=True, dtype=dtype)
    store = Store() if store is None else store
    return dsx_zero.shard(model, optimizer, config=config, precision=precision, store=store)


class Spans:
    """The sub-groups that the host steps on its own thread, and those of them that it stepped before backward came to
    the first block; backward waits there for the first of them.
    """

    def __init__(self, model, optimizer):
        self.seen, self.early, self.waits = [], [], False
        self.end = optimizer.control.listen(self.span)
        model.blocks[0].register_forward_hook(lambda module, args, out: self.watch(out))
        for parameter in optimizer.control.gradient_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: time.sleep(0.002) if self.waits else None)  # reductions go on

    def watch(self, out):
        if out.requires_grad:
            out.register_hook(self.arrived)

    def arrived(self, grad):
        end = time.monotonic() + (5.0 if self.waits else 0.0)
        while not self.seen and time.monotonic() < end:
            time.sleep(0.002)
        self.early = list(self.seen)

    @contextmanager
    def span(self, lane, what, size):
        yield
        if lane == "host step":
            assert threading.current_thread().name == "dsx-zero-step"
            self.seen.append(what)


def whole(model, optimizer):
    names = [name for name, p in model.named_parameters() if name != "blocks.2.bias"]
    found = [dsx_zero.safe_get_full_fp32_param(name, optimizer=optimizer) for name in names]
    for key in ("exp_avg", "exp_avg_sq"):
        found += [dsx_zero.safe_get_full_optimizer_state(name, key, optimizer=optimizer) for name in names]
    with dsx_zero.GatheredParameters(model):
        return found + [p.detach().clone() for p in model.parameters()]


def equal(some, others):
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)] == [True] * len(some)


def trained(rank, world, stage, where, dtype, announces, steps=6, micro=2):
    store = Store()
    model, optimizer = built(stage, where, dtype, store=store)
    spans = Spans(model, optimizer)
    said, norms, early, bytes_waiting = [], [], [], []
    for step in range(steps):
        model.uses_aside = "all" if step >= 1 else "no"
        if step == 4:
            model.blocks[3].bias.requires_grad_(False)
        for part in range(micro):
            spans.seen, spans.early, spans.waits = [], [], False
            if part == micro - 1 and announces:
                said.append(optimizer.step_during_backward(grad_scale=2.0))
                spans.waits = said[-1] and not (rank and stage == 1)
            (model(model.batch(rank, 10 * step + part)) * (2.0 / micro)).backward()
        with dsx_zero.GatheredParameters(model):  # until the step everyone sees the old values
            before = [p.detach().clone() for p in model.parameters()]
        norms.append(optimizer.step(grad_scale=2.0).grad_norm)
        early.append(spans.early)
        bytes_waiting.append(optimizer.state_bytes_by_tier()["params"].get("host", 0))
        optimizer.zero_grad()
        if step == 3:  # states go out and come back
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before += whole(model, optimizer)
        norms += [float(t.double().sum()) for t in before]
    return whole(model, optimizer), norms, said, early, store.threads, bytes_waiting


SAMPLE = {
    (1, 2, "disk", torch.bfloat16),
    (3, 2, "disk, host", torch.bfloat16),
    (3, 2, "disk, disk", torch.float32),
    (3, 2, "host, host", torch.float32),
}
MATRIX = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case)))
    for stage, places in ((1, ["disk"]), (2, ["disk"]), (3, list(PLACES)[1:]))
    for where in places
    for world in (1, 2, 3)
    for dtype in (torch.float32, torch.bfloat16)
    for case in [(stage, world, where, dtype)]
]


@pytest.mark.parametrize(("stage", "world", "where", "dtype"), MATRIX)
def test_the_bits_of_the_same_stage_without_offload(stage, world, where, dtype):
    wanted = run_ranks(trained, world, stage, "device", dtype, False)
    found = run_ranks(trained, world, stage, where, dtype, True)
    stepped = False
    for (want, norms, *_), (got, same_norms, said, early, threads, waiting) in zip(wanted, found, strict=True):
        assert equal(got, want)
        # One rank without offload steps whole tensors, as at stage 0, and sums squares in another order.
        assert norms == (same_norms if world > 1 or stage == 3 else pytest.approx(same_norms, rel=1e-6))
        assert said == [False, False, True, True, True, True]  # two trials
        stepped |= any(early[2:])
        assert ("dsx-zero-step" in threads) == where.startswith("disk")
        assert len(set(waiting)) == 1  # nothing is left behind after a step
    assert stepped  # a sub-group was stepped while backward still ran


def needs_norm_first(rank, world, where):
    """Clipping and the check for overflow: every step runs after backward, and an overflow changes nothing."""
    found = []
    for place in ("device", where):
        model, optimizer = built(2, place, torch.bfloat16, check=True)
        for step in range(6):
            assert not optimizer.step_during_backward()
            factor = float("inf") if step == 4 and rank == 1 else 1.0
            (model(model.batch(rank, step)) * factor).backward()
            before = whole(model, optimizer) if step == 4 else None
            assert optimizer.step(max_norm=0.05).overflow == (step == 4)
            assert before is None or equal(before, whole(model, optimizer))
            optimizer.zero_grad()
        found.append(whole(model, optimizer))
        optimizer.release()
    assert equal(*found)


def test_clipping_and_overflow_stay_exact():
    run_ranks(needs_norm_first, 2, "disk")


def within_room(rank, world, room, units):
    model, optimizer = built(2, "disk", max_in_cpu=room)
    spans = Spans(model, optimizer)
    early = []
    for step in range(4):
        spans.seen = []
        said = optimizer.step_during_backward()
        model.uses_aside = "all"
        model(model.batch(rank, step)).backward()
        assert said == (step >= 2 and units > 0)
        waiting = optimizer.state_bytes_by_tier()["params"].get("host", 0)
        assert waiting <= 4 * room
        early.append((len(spans.seen), waiting))
        optimizer.step()
        optimizer.zero_grad()
    assert early[:2] == [(0, 0)] * 2
    assert (early[3][1] > 0) == (units > 0)
    plain, reference = built(2, "device")
    for step in range(4):
        plain.uses_aside = "all"
        plain(plain.batch(rank, step)).backward()
        reference.step()
        reference.zero_grad()
    assert equal(whole(model, optimizer), whole(plain, reference))


@pytest.mark.parametrize(("room", "units"), [(0, 0), (BLOCK, 1), pytest.param(10**9, 7, marks=pytest.mark.slow)])
def test_new_values_wait_only_where_they_have_room(room, units):
    run_ranks(within_room, 2, room, units)


def full(rank, world, where, folder):
    """A disk without room on one rank, on the thread: every rank raises the same, and a checkpoint is the way out."""
    store = Store()
    model, optimizer = built(3, where, store=store)
    saved = None
    for step in range(4):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())

            def no_room(name):
                if rank == 1 and threading.current_thread().name == "dsx-zero-step":
                    raise OSError(errno.ENOSPC, "No space left on device", name)

            store.before_put = no_room
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        if step < 3:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(dsx_zero.ZeroStateError, match=r"rank 1: .*No space left on device") as raised:
        optimizer.step()
    text = str(raised.value)
    store.before_put = lambda name: None
    with pytest.raises(dsx_zero.ZeroStateError, match="call step"):
        optimizer.state_dict()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    for step in range(3, 6):
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain, reference = built(3, "device")
    for step in range(6):
        plain(plain.batch(rank, step)).backward()
        reference.step()
        reference.zero_grad()
    assert equal(whole(model, optimizer), whole(plain, reference))
    return text


@pytest.mark.parametrize("where", [pytest.param("disk", marks=pytest.mark.slow), "disk, disk"])
def test_a_full_disk_is_the_same_error_on_all_ranks(where, tmp_path):
    first, second = run_ranks(full, 2, where, str(tmp_path))
    assert first == second


def edit(model, optimizer):
    with dsx_zero.GatheredParameters(model.blocks[3].weight, modifier_rank=0):
        model.blocks[3].weight.data.mul_(0.5)


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)


def set_gradient(model, optimizer):
    p = model.blocks[5].weight
    dsx_zero.safe_set_full_grad(p, torch.ones(p.shape))


CHANGES = [edit, clip, set_gradient]


def changed(rank, world, where, number):
    model, optimizer = built(3, where)
    for step in range(3):
        early = optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        if not early:
            optimizer.step()
            optimizer.zero_grad()
    CHANGES[number](model, optimizer)
    with pytest.raises(dsx_zero.ZeroStateError, match="were written between backward and step"):
        optimizer.step()
    optimizer.release()


FEW = {("disk, host", 0), ("disk, disk", 1), ("host, host", 0)}


@pytest.mark.parametrize(
    ("where", "number"),
    [
        pytest.param(where, number, marks=() if (where, number) in FEW else pytest.mark.slow)
        for where in ("disk, host", "disk, disk", "host, host")
        for number in range(len(CHANGES))
    ],
)
def test_a_change_between_backward_and_step_raises(where, number):
    run_ranks(changed, 2, where, number)


def killed(rank, world, folder):
    """Rank 1 is killed on the thread, in the middle of storing a unit."""
    nvme = pytest.importorskip("dsx_nvme")
    store = nvme.TensorStore(os.path.join(folder, f"swap{rank}"))
    puts = []
    put = store.put

    def stops(name, tensor):
        ticket = put(name, tensor)
        if threading.current_thread().name == "dsx-zero-step":
            puts.append(name)
            if rank == 1 and len(puts) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        return ticket

    model, optimizer = built(3, "disk, host", torch.bfloat16, store=store)
    for step in range(4):
        if step == 3:
            torch.save(optimizer.state_dict(), os.path.join(folder, f"saved{rank}"))
            torch.distributed.barrier()
            store.put = stops
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(rank, world, folder, where):
    store = None
    if where != "device":
        store = pytest.importorskip("dsx_nvme").TensorStore(os.path.join(folder, f"again{rank}"), keep=False)
    model, optimizer = built(3, where, torch.bfloat16, store=store)
    first = 0
    if where != "device":
        optimizer.load_state_dict(torch.load(os.path.join(folder, f"saved{rank}"), weights_only=False))
        first = 3
    for step in range(first, 7):
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, optimizer)


def test_a_rank_that_is_killed_while_it_stores_leaves_the_last_checkpoint_good(tmp_path):
    pytest.importorskip("dsx_nvme")
    with pytest.raises(RankError):
        run_ranks(killed, 2, str(tmp_path))
    found = run_ranks(resumed, 2, str(tmp_path), "disk, host")
    wanted = run_ranks(resumed, 2, str(tmp_path), "device")
    assert all(equal(got, want) for got, want in zip(found, wanted, strict=True))
