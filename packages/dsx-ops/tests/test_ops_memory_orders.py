"""Parameters, gradients and states in any order of memory: channels_last, transposed, strided, expanded. Results as
torch's.
"""

import copy
import itertools

import dsx_ops
import pytest
import torch
from dsx_ops import update
from dsx_ops.cuda import optimizers as cuda_optimizers
from torch import nn

SHAPE = (4, 3, 5, 2)
ORDERS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "rows of a wider one": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:3],
}
# (ours, torch's)
PAIRS = {
    "FusedAdam": (lambda p: dsx_ops.FusedAdam(p, lr=0.1, weight_decay=0.1),
                  lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    "CPUAdam": (lambda p: dsx_ops.CPUAdam(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
    "CPUAdagrad": (lambda p: dsx_ops.CPUAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "SGD": (lambda p: dsx_ops.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}  # fmt: skip
OTHERS = {
    "FusedLion": lambda p: dsx_ops.FusedLion(p, lr=0.1, weight_decay=0.1),
    "FusedLamb": lambda p: dsx_ops.FusedLamb(p, lr=0.1, weight_decay=0.1),
    "Adam8bit": lambda p: dsx_ops.Adam8bit(p, lr=0.1, weight_decay=0.1),
}


@pytest.fixture(params=["native", "reference", "cuda"])
def way(request, monkeypatch):
    if request.param == "native":
        yield
    elif request.param == "reference":
        with dsx_ops.reference_only():
            yield
    else:
        emulator = request.getfixturevalue("emulator")
        monkeypatch.setattr(update, "apply", lambda batch: cuda_optimizers.run(emulator, batch))
        monkeypatch.setattr(update, "lamb_update", lambda batch: cuda_optimizers.lamb_update(emulator, batch))
        monkeypatch.setattr(update, "lamb_apply", lambda batch, c: cuda_optimizers.lamb_apply(emulator, batch, c))
        monkeypatch.setattr(update, "_cuda_module", lambda tensors: emulator)
        yield


def values(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def train(make, order, grad_order, steps=3, **step):
    param = nn.Parameter(ORDERS[order](values(0)))
    optimizer = make([param])
    for i in range(steps):
        param.grad = ORDERS[grad_order](values(10 + i))
        optimizer.step(**step)
    return param, optimizer


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("order", ORDERS)
def test_as_torch_whatever_the_order(name, order, way):
    ours, theirs = PAIRS[name]
    wanted, _ = train(theirs, "contiguous", "contiguous")
    for grad_order in ORDERS:
        got, _ = train(ours, order, grad_order)
        assert got.stride() == ORDERS[order](values(0)).stride()
        torch.testing.assert_close(got.detach(), wanted.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_the_order_of_memory_changes_no_result(name, way):
    """8-bit states count their blocks row-major, whatever the strides; Lamb's norms differ by the order of a sum."""
    wanted, _ = train(OTHERS[name], "contiguous", "contiguous")
    for order, grad_order in itertools.product(ORDERS, ORDERS):
        got, _ = train(OTHERS[name], order, grad_order)
        if name == "FusedLamb":
            torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(got, wanted), (order, grad_order)


def test_equal_strides_make_no_copies(monkeypatch):
    """channels_last all the way: the kernel works on the tensors themselves."""
    seen = []
    ordinary = dsx_ops.FusedAdam._checked

    def watch(self, slot, group):
        found = ordinary(self, slot, group)
        seen.extend(found.copies)
        return found

    monkeypatch.setattr(dsx_ops.FusedAdam, "_checked", watch)
    param, optimizer = train(lambda p: dsx_ops.FusedAdam(p), "channels_last", "channels_last")
    assert not seen
    assert optimizer.state[param]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    train(lambda p: dsx_ops.FusedAdam(p), "every second", "contiguous")
    assert seen


def test_a_copy_in_another_order_is_filled(way):
    for order in ORDERS:
        out = ORDERS[order](torch.zeros(SHAPE, dtype=torch.bfloat16))
        param = nn.Parameter(values(0).to(memory_format=torch.channels_last))
        param.grad = values(1)
        dsx_ops.FusedAdam([param]).step(copy_out={param: out})
        assert torch.equal(out, param.detach().bfloat16())


def test_split_masters_in_channels_last(way):
    results = []
    for order in ("contiguous", "channels_last", "every second"):
        param = nn.Parameter(ORDERS[order](values(0).bfloat16()))
        optimizer = dsx_ops.FusedAdam([param], lr=0.1, split_master=True)
        for i in range(3):
            param.grad = values(10 + i).bfloat16()
            optimizer.step()
        results.append((param.detach().clone(), optimizer.state[param]["low_bits"].clone()))
    for got in results[1:]:
        assert torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1])


@pytest.mark.parametrize("name", [*PAIRS, *OTHERS])
@pytest.mark.parametrize(("first", "second"), [("contiguous", "channels_last"), ("channels_last", "contiguous")])
def test_a_state_dict_moves_between_orders(name, first, second):
    make = PAIRS[name][0] if name in PAIRS else OTHERS[name]
    param, optimizer = train(make, first, "contiguous")
    other = nn.Parameter(ORDERS[second](param.detach()))
    loaded = make([other])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((param, optimizer), (other, loaded)):
        p.grad = values(5)
        o.step()
    torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


def test_states_of_torch_for_channels_last_parameters_are_taken():
    param, theirs = train(PAIRS["FusedAdam"][1], "channels_last", "channels_last")
    other = nn.Parameter(param.detach().clone())
    ours = PAIRS["FusedAdam"][0]([other])
    ours.load_state_dict(theirs.state_dict())
    for p, o in ((param, theirs), (other, ours)):
        p.grad = values(5)
        o.step()
    torch.testing.assert_close(param, other, rtol=2e-6, atol=1e-6)


def test_a_transposed_parameter_trains_in_a_model():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4), nn.Linear(6, 4)
    ours.weight = nn.Parameter(theirs.weight.detach().clone().t().contiguous().t())
    ours.bias = nn.Parameter(theirs.bias.detach().clone())
    optimizers = (
        dsx_ops.FusedAdam(ours.parameters(), lr=0.1),
        torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0),
    )
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        for net, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            dsx_ops.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def test_a_conv_net_in_channels_last_trains_as_torch_does():
    def train_net(make):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
        optimizer = make(net.parameters())
        for step in range(3):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        return list(net.parameters())

    for a, b in zip(
        train_net(lambda p: dsx_ops.FusedAdam(p, lr=0.01)),
        train_net(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)),
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_expanded_gradients(way):
    for make, _ in PAIRS.values():
        results = []
        for grad in (torch.full((3, 4), 0.5), torch.tensor(0.5).expand(3, 4), torch.full((3, 1), 0.5).expand(3, 4)):
            param = nn.Parameter(torch.ones(3, 4))
            param.grad = grad
            make([param]).step()
            results.append(param.detach())
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("order", ORDERS)
def test_norms_scaling_and_clipping(order, way):
    grads = [ORDERS[order](values(i)) for i in range(2)]
    assert dsx_ops.norm(grads).norm == pytest.approx(
        float(torch.cat([g.flatten() for g in grads]).double().norm()), rel=1e-6
    )
    wanted = [g.clone() * 0.5 for g in grads]
    dsx_ops.scale_(grads, 0.5)
    for g, w in zip(grads, wanted):
        assert torch.equal(g, w)
    params = [nn.Parameter(torch.zeros(SHAPE)) for _ in grads]
    twins = [nn.Parameter(torch.zeros(SHAPE)) for _ in grads]
    for p, t, g in zip(params, twins, grads):
        p.grad, t.grad = g, g.clone()
    got, want = dsx_ops.clip_grad_norm_(params, 0.1), torch.nn.utils.clip_grad_norm_(twins, 0.1)
    torch.testing.assert_close(got.float(), want)
    for p, t in zip(params, twins):
        torch.testing.assert_close(p.grad, t.grad)


def test_clipping_an_expanded_gradient_scales_each_element_once(way):
    param = nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.ones(3, 1).expand(3, 4)
    total = dsx_ops.clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(total.float(), torch.tensor(12.0).sqrt())
    torch.testing.assert_close(param.grad, torch.full((3, 4), 12.0**-0.5), rtol=1e-5, atol=0)


def test_a_parameter_whose_elements_share_memory_is_refused_before_anything_is_written():
    good, shared = nn.Parameter(torch.ones(3)), torch.ones(3).expand(2, 3)
    good.grad = torch.ones(3)
    bad = nn.Parameter(shared)
    bad.grad = torch.ones(2, 3)
    optimizer = dsx_ops.FusedAdam([good, bad])
    with pytest.raises(
        dsx_ops.errors.TensorError, match="parameter 1 of group 0: elements of the parameter share memory"
    ):
        optimizer.step()
    assert torch.equal(good, torch.ones(3)) and not optimizer.state
    windows = torch.ones(6).as_strided((3, 3), (1, 1))
    with pytest.raises(dsx_ops.errors.TensorError, match="tensor 1: elements share memory"):
        dsx_ops.scale_([good.grad, windows], 2.0)
    assert torch.equal(good.grad, torch.ones(3))


def test_flat_buffers_cut_out_of_wider_ones(way):
    optimizer = dsx_ops.FusedAdam([nn.Parameter(torch.ones(1))], lr=0.1)
    results = []
    for flat in (torch.ones(6), torch.ones(6, 2)[:, 0]):
        state = optimizer.new_flat_state(flat)
        optimizer.step_flat(flat, torch.ones(6), state)
        results.append(flat)
    assert torch.equal(*results)
