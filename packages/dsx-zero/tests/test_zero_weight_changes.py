"""`WeightMark`: the elements that changed since a mark, packed, and what a packet may cost."""

from __future__ import annotations

import math

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(300, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.to(torch.bfloat16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def built(stage, lr=1e-4):
    return dsx_zero.shard(
        Wide(), lambda p: torch.optim.Adam(p, lr=lr), config={"stage": stage, "stage3_param_persistence_threshold": 300}
    )


def whole(optimizer):
    return dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]


def gathered_packets(packet, world):
    found = [None] * world
    if world == 1:
        return [packet]
    torch.distributed.all_gather_object(found, packet)
    return found


def pushed(rank, world, stage, asleep):
    """A generator that only gets changes has the trainer's bits after each step."""
    model, optimizer = built(stage)
    mark, weights = dsx_zero.export.WeightMark(optimizer), whole(optimizer)
    assert not any(len(list(dsx_zero.export.unpack_changes(p))) for p in gathered_packets(mark.pack(), world))
    sent = []
    for step in range(3):
        tokens = torch.randint(0, 300, (5,), generator=torch.Generator().manual_seed(9 * step + rank))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in weights.items()}
        now = whole(optimizer)
        if asleep:
            optimizer.offload_states()
        packets = gathered_packets(mark.pack(), world)
        optimizer.reload_states()
        counts = [dsx_zero.export.apply_changes(packet, weights) for packet in packets]
        assert all(torch.equal(weights[name], now[name]) for name in now)
        different = [(before[n].view(torch.int16) != now[n].view(torch.int16)) for n in now]
        assert sum(counts) == sum(int(d.sum()) for d in different)  # nothing twice, nothing that did not change
        sent.append((sum(p.numel() for p in packets), 2 * sum(counts), sum(map(entropy, different))))
    return sent


def entropy(changed):
    """Bytes of the least description of these positions, if they are random."""
    share, numel = changed.float().mean().item(), changed.numel()
    return 0 if share in (0, 1) else -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * numel / 8


@pytest.mark.parametrize(("stage", "world", "asleep"), [(0, 2, False), (2, 2, True), (3, 1, False), (3, 3, True)])
def test_changes_of_all_ranks_make_the_trainers_bits(stage, world, asleep):
    for sent, values, least in run_ranks(pushed, world, stage, asleep)[0]:
        assert 0 < values < 2 * sum(p.numel() for p in Wide().parameters())
        assert sent <= 1.05 * (values + least) + 700 * world  # headers


def change(positions, among, dtype=torch.bfloat16):
    values = torch.randn(len(positions)).to(dtype)
    return dsx_zero.export.WeightChange("some.weight", (among,), (0,), (among,), 0, among, positions, values)


NUMEL = 200_000


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_positions_cost_at_most_five_percent_more_than_the_least_possible(share, dtype):
    changed = torch.rand(NUMEL, generator=torch.Generator().manual_seed(3)) < share
    positions = changed.nonzero().view(-1)
    packet = dsx_zero.export.pack_changes([change(positions, NUMEL, dtype)])
    assert packet.numel() - 100 <= 1.05 * (dtype.itemsize * len(positions) + entropy(changed))  # 100: the header
    (back,) = dsx_zero.export.unpack_changes(packet)
    assert torch.equal(back.positions, positions)


@pytest.mark.parametrize("rows", [[3], [0, 7, 8, 9, 199], list(range(0, 200, 2)), list(range(200))])
def test_whole_rows_cost_at_most_five_percent_more_than_their_values(rows):
    positions = torch.cat([torch.arange(1000) + 1000 * row for row in rows])
    packet = dsx_zero.export.pack_changes([change(positions, NUMEL)])
    assert packet.numel() <= 1.05 * 2 * len(positions) + 8
    target = torch.zeros(NUMEL, dtype=torch.bfloat16)
    assert dsx_zero.export.apply_changes(packet, {"some.weight": target}) == len(positions)
    assert int((target != 0).sum()) <= len(positions) and bool((target[positions] != 0).any())


@pytest.mark.parametrize("among", [1, 2, 8, 9, 17, 1000])
def test_every_code_gives_back_what_was_packed(among):
    source = torch.Generator().manual_seed(among)
    for share in (0.01, 0.1, 0.4, 0.6, 0.95, 1.1):
        positions = (torch.rand(among, generator=source) < share).nonzero().view(-1)
        if not len(positions):
            continue
        (back,) = dsx_zero.export.unpack_changes(dsx_zero.export.pack_changes([change(positions, among)]))
        target = torch.full((among,), 9.0)
        back.apply(target)
        assert torch.equal((target != 9).nonzero().view(-1), positions)


def test_a_box_of_a_tensor_is_written_into_its_place():
    values = torch.arange(4, dtype=torch.float32) + 1
    one = dsx_zero.export.WeightChange("w", (4, 5), (1, 2), (2, 3), 1, 6, torch.tensor([0, 1, 2, 4]), values)
    for target in (torch.zeros(4, 5), torch.zeros(5, 4).t()):
        one.apply(target)
        want = torch.zeros(4, 5)
        want[1, 3], want[1, 4], want[2, 2], want[2, 4] = 1, 2, 3, 4
        assert torch.equal(target, want)


def test_a_packet_that_is_none_is_refused_before_anything_is_written():
    packet = dsx_zero.export.pack_changes([change(torch.tensor([1, 5]), 9)])
    target = {"some.weight": torch.zeros(9)}
    for wrong in (packet[:-1], packet[:5], packet[3:], torch.zeros(64, dtype=torch.uint8)):
        with pytest.raises(dsx_zero.ZeroStateError, match=r"the packet of weight changes is damaged"):
            dsx_zero.export.apply_changes(wrong, target)
    with pytest.raises(dsx_zero.ZeroStateError, match="got no such tensor"):
        dsx_zero.export.apply_changes(packet, {})
    with pytest.raises(dsx_zero.ZeroStateError, match=r"got \(8,\), expected shape \(9,\)"):
        dsx_zero.export.apply_changes(packet, {"some.weight": torch.zeros(8)})
    assert not target["some.weight"].any()


def kept(rank, world):
    model, optimizer = built(2, lr=1e-2)
    mark = dsx_zero.export.WeightMark(optimizer, names=["blocks.0.weight"])
    model(torch.arange(4)).backward()
    optimizer.step()
    first, again = mark.pack(advance=False), mark.pack()
    assert torch.equal(first, again) and {c.name for c in dsx_zero.export.unpack_changes(first)} <= {"blocks.0.weight"}
    assert not list(mark.changes())


def test_a_mark_stays_where_it_is_told_to():
    run_ranks(kept, 1)
