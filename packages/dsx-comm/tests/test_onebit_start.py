"""1-bit optimizers without an engine: ranks that start apart are told so, and gradients that are averaged already."""

import logging

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks
from torch.nn.parallel import DistributedDataParallel

NAMES = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def step(net, optimizer, rank, number=0):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def apart(rank, world, name):
    net = model(seed=rank)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = getattr(dsx_comm, name)(net.parameters(), lr=0.01)
    with pytest.raises(
        dsx_comm.CommError, match=r"4 of 6 differ \(the first is number 0, of shape \(3, 5\).*rank 1"
    ) as raised:
        step(net, optimizer, rank)
    assert all(map(torch.equal, before, net.parameters())) and not any(optimizer.state.values())
    for tensor in net.state_dict().values():  # as the text says
        dsx_comm.broadcast(tensor, 0)
    for number in range(3):
        step(net, optimizer, rank, number)
    return str(raised.value), [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_start_apart_all_get_the_error_and_its_remedy_works(name):
    (text, first), (other_text, second) = run_ranks(apart, 2, name)
    assert text == other_text
    assert all(map(torch.equal, first, second))


def one_bit_apart(rank, world):
    """One element of one parameter differs, in one bit."""
    net = model()
    if rank == 1:
        net[2].bias.data.view(torch.int32)[0] ^= 1
    with pytest.raises(dsx_comm.CommError, match=r"1 of 6 differ \(the first is number 5"):
        step(net, dsx_comm.OneBitAdam(net.parameters()), rank)


def test_one_bit_is_enough():
    run_ranks(one_bit_apart, 2)


def grown(rank, world):
    """Parameters that come later are compared when they come; those of before are not compared again."""
    net, late = model(), torch.nn.Linear(5, 1)
    optimizer = dsx_comm.ZeroOneAdam(net.parameters(), lr=0.01)
    step(net, optimizer, rank)
    with dsx_comm.count_traffic() as traffic:
        step(net, optimizer, rank, 1)
    assert traffic.calls("all_gather") == 0
    late.weight.data.fill_(float(rank))
    optimizer.add_param_group({"params": late.parameters()})
    with pytest.raises(dsx_comm.CommError, match="1 of 2 differ"):
        step(net, optimizer, rank, 2)


def test_parameters_that_come_later_are_compared_too():
    run_ranks(grown, 2)


def resumed(rank, world):
    """Between two exchanges ranks of 0/1 Adam differ on purpose, and go on from files of their own."""
    net = model()
    policy = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    optimizer = dsx_comm.ZeroOneAdam(net.parameters(), lr=0.1, **policy)
    for number in range(6):
        step(net, optimizer, rank, number)
    saved, weights = optimizer.state_dict(), net.state_dict()
    again = model()
    again.load_state_dict(weights)
    optimizer = dsx_comm.ZeroOneAdam(again.parameters(), lr=0.1, **policy)
    optimizer.load_state_dict(saved)
    step(again, optimizer, rank, 7)
    return weights["0.weight"]


def test_a_resume_between_two_exchanges_is_not_refused():
    first, second = run_ranks(resumed, 2)
    assert not torch.equal(first, second)


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings(rank, world, kind):
    heard = Heard()
    logging.getLogger("dsx_comm").addHandler(heard)
    net = DistributedDataParallel(model()) if kind == "ddp" else model()
    optimizer = dsx_comm.OneBitAdam(net.parameters(), lr=0.01)
    if kind == "no gradients":
        optimizer.step()
    for number in range(3):
        step(net, optimizer, 0 if kind == "same samples" else rank, number)
    return [text for text in heard.texts if "DSX253" in text]


@pytest.mark.parametrize("kind, count", [("ddp", 1), ("same samples", 1), ("alone", 0), ("no gradients", 0)])
def test_gradients_that_are_averaged_already_get_one_warning(kind, count):
    first, second = run_ranks(warnings, 2, kind)
    assert len(first) == count and second == []
    if count:
        assert "DistributedDataParallel has averaged them" in first[0] and "dsx explain DSX253" in first[0]
