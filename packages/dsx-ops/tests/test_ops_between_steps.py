"""What changes between two steps of an optimizer is seen: bad gradients, states and parameters are named before
anything changes, and nothing is kept alive.
"""

import gc
import weakref

import dsx_ops
import pytest
import torch
from torch import nn

SIZES = ((3, 5), (257,), (1,), (0,), (40, 33))


def model_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def give_grads(params, step, in_place=False):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if in_place and p.grad is not None:
            p.grad.copy_(grad)
        else:
            p.grad = grad


def everything(optimizer, params):
    states = [t for p in params for k, t in sorted(optimizer.state[p].items()) if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *states)]


def same(first, second):
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def sparse(p):
    p.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], p.shape, check_invariants=True)


def shortened(p):
    p.grad.resize_(3)


def test_a_gradient_in_another_order_of_memory_is_right():
    ours, theirs = model_params(), model_params()
    a, b = dsx_ops.FusedAdam(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0)
    for step in range(6):
        give_grads(ours, step), give_grads(theirs, step)
        if step in (3, 4):
            for p in ours:
                p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad
        a.step(), b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("spoil", [sparse, shortened], ids=lambda f: f.__name__)
def test_a_bad_gradient_is_named_before_anything_changes(spoil):
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(3):
        give_grads(params, step, in_place=True)
        optimizer.step()
    before = everything(optimizer, params)
    spoil(params[4])
    with pytest.raises(dsx_ops.errors.TensorError, match="parameter 4 of group 0"):
        optimizer.step()
    same(before, everything(optimizer, params))
    params[4].grad = None
    give_grads(params, 3)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def test_a_parameter_that_is_no_longer_contiguous_is_named():
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(3):
        give_grads(params, step, in_place=True)
        optimizer.step()
    params[4].data = params[4].data.t()
    with pytest.raises(dsx_ops.errors.TensorError, match="parameter 4 of group 0"):
        optimizer.step()


def short_state(state):
    state["exp_avg"] = state["exp_avg"].flatten()[:-1].clone()


def state_shrunk_in_place(state):
    state["exp_avg"].resize_(3)


def state_turned_in_place(state):
    state["exp_avg_sq"].t_()


def state_of_integers(state):
    state["exp_avg"] = state["exp_avg"].int()


def state_elsewhere(state):
    state["exp_avg"] = state["exp_avg"].to("meta")


@pytest.mark.parametrize(
    "spoil",
    [short_state, state_shrunk_in_place, state_turned_in_place, state_of_integers, state_elsewhere],
    ids=lambda f: f.__name__,
)
def test_a_bad_state_is_named_before_anything_changes(spoil):
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(3):
        give_grads(params, step, in_place=True)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    spoil(optimizer.state[params[4]])
    with pytest.raises(dsx_ops.errors.TensorError, match="parameter 4 of group 0"):
        optimizer.step()
    same(before, [p.detach() for p in params])
    assert [optimizer.state[p]["step"] for p in params] == [3] * len(params)


def test_a_subclass_as_gradient_is_refused_in_a_later_step_too():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].inner)
            raise NotImplementedError(function)

    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(2):
        give_grads(params, step)
        optimizer.step()
    before = everything(optimizer, params)
    params[4].grad = Wrapper(torch.ones_like(params[4]))
    with pytest.raises(dsx_ops.errors.TensorError, match="parameter 4 of group 0"):
        optimizer.step()
    same(before, everything(optimizer, params))


def test_a_step_keeps_no_tensor_alive():
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(3):
        give_grads(params, step, in_place=True)
        optimizer.step()
    watched = [weakref.ref(optimizer.state[params[1]]["exp_avg"]), weakref.ref(params[1].grad)]
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    gc.collect()
    assert [w() for w in watched] == [None, None]
