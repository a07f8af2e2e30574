"""State that lives elsewhere: every placement gives the bits of the same stage with all of it on the device.

A tier of a user's own is one class (`Attic`): its bytes are counted, no view of them exists, and copies are jobs of a
lane.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Drawer:
    """A store in a dictionary: transfers happen when they are waited for, those of one name in order."""

    def __init__(self):
        self.tensors, self.under_way = {}, {}

    def __contains__(self, name):
        return name in self.tensors

    def put(self, name, tensor):
        self.finish(name)
        self.tensors.setdefault(name, torch.full_like(tensor, float("nan")))
        self.under_way[name] = Later(lambda: self.tensors[name].copy_(tensor))
        return self.under_way[name]

    def get(self, name, out=None):
        self.finish(name)
        return Later(lambda: out.copy_(self.tensors[name]))

    def finish(self, name):
        if name in self.under_way:
            self.under_way.pop(name).wait()


class Later:
    def __init__(self, job):
        self.job = job

    def wait(self):
        job, self.job = self.job, lambda: None
        job()


class AtticHome:
    """Memory that nobody sees; it notes what crosses its link."""

    tier = "attic"
    device = torch.device("cpu")

    def __init__(self, attic, numel, dtype):
        self.attic, self.numel, self.dtype = attic, numel, dtype
        self._kept = torch.zeros(numel, dtype=dtype)

    @property
    def nbytes(self):
        return self._kept.nbytes

    def view(self):
        return None

    def fetch(self, out, lane, *, start=0):
        self.attic.bytes_out += out.numel() * self.dtype.itemsize
        return lane.submit(lambda: void(out.copy_(self._kept[start : start + out.numel()])))

    def store(self, values, lane, *, start=0):
        self.attic.bytes_in += values.numel() * self.dtype.itemsize
        return lane.submit(lambda: void(self._kept[start : start + values.numel()].copy_(values)))


def void(_):
    return None


class Attic:
    name = "attic"

    def __init__(self):
        self.bytes_in = self.bytes_out = 0

    def home(self, name, numel, dtype, device, memory):
        return AtticHome(self, numel, dtype)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 40)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.last = nn.Linear(40, 3)
        self.first.bias.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x).float().square().mean()


def placements(where):
    from dsx_zero.homes.tiers import DeviceTier, DiskTier, HostTier, Placement

    device, host, attic, disk = DeviceTier(), HostTier(), Attic(), DiskTier(Drawer(), piece=100)
    return {
        "device": lambda: Placement(),
        "host optimizer": lambda: Placement(masters=host, gradients=host),
        "host all": lambda: Placement(host, host, host),
        "attic states": lambda: Placement(device, device, device, attic),
        "attic gradients": lambda: Placement(gradients=attic),
        "attic parameters": lambda: Placement(parameters=attic),
        "attic all": lambda: Placement(attic, attic, attic, attic),
        "disk optimizer": lambda: Placement(device, disk, host, disk),
        "disk all": lambda: Placement(disk, disk, disk, disk),
    }[where]()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2)


def trained(rank, world, stage, where, dtype, kind=adamw, lane="host", steps=4):
    """Everything there is to see of a training, and the bytes by class and by tier."""
    from dsx_comm.lanes import DeferringLane
    from dsx_zero import building

    with pytest.MonkeyPatch.context() as patch:
        if lane == "deferring":
            patch.setattr(building, "make_lane", lambda device: DeferringLane())
        placement = placements(where)
        config = {"stage": stage, "stage3_param_persistence_threshold": 45, "sub_group_size": 600}
        model, optimizer = dsx_zero.shard(Net(dtype), kind, config=config, placement=placement)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(steps):
        if step == 2:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            with dsx_zero.GatheredParameters(model.last.weight, modifier_rank=0):
                model.last.weight.data.mul_(0.5)
        with optimizer.no_sync():
            model(torch.randn(6, 12, generator=generator).to(dtype)).backward()
        for _ in range(2):  # a second reduction adds to what is in its home
            model(torch.randn(6, 12, generator=generator).to(dtype)).backward()
        found.append(dsx_zero.safe_get_full_grad("blocks.1.weight", optimizer=optimizer))
        if step == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        outcome = optimizer.step(max_norm=0.3)
        found.append(torch.tensor(outcome.grad_norm))
        optimizer.zero_grad()
    for name, _ in model.named_parameters():
        if name != "first.bias":
            found.append(dsx_zero.safe_get_full_fp32_param(name, optimizer=optimizer))
            found.append(dsx_zero.safe_get_full_optimizer_state(name, "exp_avg", optimizer=optimizer))
    with dsx_zero.GatheredParameters(model):
        found += [p.detach().clone() for p in model.parameters()]
    for part in optimizer.slices():
        found += [part.param.clone(), *(t for t in (part.master, *part.states.values()) if isinstance(t, torch.Tensor))]
    moved = getattr(placement.states, "bytes_in", 0), getattr(placement.states, "bytes_out", 0)
    return found, optimizer.state_bytes_by_tier(), moved


CASES = [
    *((stage, where) for stage in (1, 2) for where in ("host optimizer", "attic states", "disk optimizer")),
    (2, "attic gradients"),
    *((3, where) for where in
      ("host all", "attic states", "attic gradients", "attic parameters", "attic all", "disk all")),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "where"), CASES)
def test_the_same_bits_wherever_state_lives(stage, where, dtype):
    wanted = run_ranks(trained, 2, stage, "device", dtype)
    found = run_ranks(trained, 2, stage, where, dtype)
    for (want, _, _), (got, _, _) in zip(wanted, found, strict=True):
        assert len(want) == len(got)
        assert [torch.equal(a, b) for a, b in zip(got, want)] == [True] * len(want)


@pytest.mark.parametrize(("stage", "where"), [(2, "attic gradients"), (3, "attic all"), (3, "host all")])
def test_no_mistake_of_order_shows_on_a_lane_that_defers_and_poisons(stage, where):
    wanted = run_ranks(trained, 2, stage, "device", torch.bfloat16)
    found = run_ranks(trained, 2, stage, where, torch.bfloat16, adamw, "deferring")
    for (want, _, _), (got, _, _) in zip(wanted, found, strict=True):
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_with_a_kernel_that_steps_flat_buffers(stage):
    pytest.importorskip("dsx_ops")
    where = "attic all" if stage == 3 else "disk optimizer"
    (want, _, _), (got, _, _) = (
        run_ranks(trained, 1, stage, w, torch.bfloat16, fused, backend=None)[0] for w in ("device", where)
    )
    a, b = (dict(enumerate(t)) for t in (want, got))
    differ = [n for n in a if a[n].shape == b[n].shape and not torch.allclose(a[n].float(), b[n].float(), rtol=1e-5)]
    assert len(a) == len(b)
    assert not differ


def test_bytes_by_tier_and_over_the_link():
    steps = 3
    _, nbytes, (bytes_in, bytes_out) = run_ranks(trained, 2, 2, "attic states", torch.float32, adamw, "host", steps)[0]
    numel = nbytes["params"]["device"] // 4 // 2  # of a shard; its padding and the frozen bias have no states
    moments = nbytes["optimizer"]["attic"]
    assert 0.9 * 8 * numel <= moments <= 8 * numel
    assert nbytes["optimizer"].get("device", 0) < 100 * 8  # the counters of steps
    assert set(nbytes["params"]) == set(nbytes["grads"]) == {"device"}
    loaded = moments  # `load_state_dict` after the second step
    assert bytes_in == steps * moments + loaded
    assert bytes_out >= (steps - 1) * moments  # and what readers ask for


def test_gradients_on_a_tier_without_views_count_once():
    model, optimizer = dsx_zero.shard(
        Net(torch.float32), adamw, config={"stage": 2}, placement=placements("attic gradients")
    )
    model(torch.ones(2, 12)).backward()
    numel = sum(group.layout.shard_numel for unit in optimizer.runtime.units for group in unit.trainable)
    assert optimizer.state_bytes_by_tier()["grads"]["attic"] == 4 * numel


def by_config(rank, world, stage):
    """`offload_optimizer: cpu`, and `offload_param` at stage 3, as the configuration says it."""
    config = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        config["offload_param"] = {"device": "cpu"}
    model, optimizer = dsx_zero.shard(Net(torch.bfloat16), adamw, config=config)
    model(torch.ones(4, 12).bfloat16()).backward()
    optimizer.step()
    nbytes = optimizer.state_bytes_by_tier()
    host = [nbytes[kind].get("host", 0) for kind in ("params", "master", "grads", "optimizer")]
    return host, nbytes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_configuration_chooses(stage, world):
    for (params, master, grads, states), nbytes in run_ranks(by_config, world, stage):
        numel = master // 4
        assert numel > 0
        assert 7.9 * numel <= states + 8 * 64 * 2  # both moments; the padding has none
        assert set(nbytes["optimizer"]) == {"host"}
        assert (grads > 0) == (stage > 1)
        assert (params > 0) == (stage == 3)


def refused(rank, world):
    from dsx_zero.homes.tiers import HostTier, Placement

    for config, placement, text in (
        ({"stage": 0}, Placement(masters=HostTier()), "at stage 0; expected stage 1, 2 or 3"),
        ({"stage": 2}, Placement(parameters=HostTier()), "where they are whole; expected stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, None, "expected stage 1, 2 or 3"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, None, "expected stage 3"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, None, "there is no store on disk"),
    ):
        with pytest.raises(dsx_zero.ZeroConfigError, match=text):
            dsx_zero.shard(Net(torch.float32), adamw, config=config, placement=placement)


def test_what_a_stage_cannot_have_is_refused():
    refused(0, 1)
