"""Parameters that are DTensors, as FSDP2 makes them: the shards are updated, whole-tensor rules and other wrappers
refused.
"""

import dsx_ops
import pytest
import torch
from dsx_testkit import run_ranks


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))


MAKERS = {
    "FusedAdam": (lambda ps: dsx_ops.FusedAdam(ps, lr=1e-2, weight_decay=0.1),
                  lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1)),
    "SGD": (lambda ps: dsx_ops.SGD(ps, lr=1e-1, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9)),
    "FusedLion": (lambda ps: dsx_ops.FusedLion(ps, lr=1e-3), None),
}  # fmt: skip


def under_fsdp(rank, n, name):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (n,))
    make, oracle = MAKERS[name]
    ours, plain = fully_shard(model(), mesh=mesh), model()
    a = make(ours.parameters())
    b = (oracle or make)(plain.parameters())

    def train(net, optimizer, steps):
        for step in range(steps):
            x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    train(ours, a, 3), train(plain, b, 3)
    # distributed checkpoints find the states as shards of whole tensors, and give them back
    saved = get_optimizer_state_dict(ours, a)
    moment = a.state_names[0]
    assert isinstance(saved["state"]["0.weight"][moment], DTensor)
    a = make(ours.parameters())
    set_optimizer_state_dict(ours, a, saved)
    train(ours, a, 3), train(plain, b, 3)
    for p, q in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_fsdp2_trains_as_one_process_does(name):
    run_ranks(under_fsdp, 2, name)


def refused(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (n,)))
    net(torch.ones(2, 7)).sum().backward()
    before = [p.full_tensor().clone() for p in net.parameters()]
    for make in (dsx_ops.FusedLamb, dsx_ops.Adam8bit):
        optimizer = make(net.parameters())
        with pytest.raises(dsx_ops.errors.TensorError, match="parameter 0 of group 0: got a DTensor"):
            optimizer.step()
        assert not optimizer.state
    for function in (dsx_ops.norm, dsx_ops.update.squared_norms, lambda g: dsx_ops.scale_(g, 2.0)):
        with pytest.raises(dsx_ops.errors.TensorError, match="tensor 0 is a DTensor"):
            function([p.grad for p in net.parameters()])
    with pytest.raises(dsx_ops.errors.TensorError, match="clip with torch"):
        dsx_ops.clip_grad_norm_(net.parameters(), 1.0)
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(net.parameters(), before))


def test_what_needs_whole_tensors_is_refused():
    run_ranks(refused, 2)


def test_other_wrappers_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    param = torch.nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))
    param.grad = TwoTensor(torch.ones(4), torch.ones(4))
    with pytest.raises(dsx_ops.errors.TensorError, match="no memory of its own"):
        dsx_ops.FusedAdam([param]).step()
