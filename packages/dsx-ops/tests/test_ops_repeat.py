"""Steps that go over kept tables of addresses: the same bits as steps that begin again, whatever happens between them,
and the same errors.
"""

import copy
import gc
import weakref

import dsx_ops
import pytest
import torch
from dsx_ops import native
from dsx_ops.backends import native_cpu
from torch import nn

SIZES = ((3, 5), (257,), (1,), (0,), (40, 33))

KINDS = {
    "adam": (torch.float32, lambda p: dsx_ops.FusedAdam(p, lr=1e-2, weight_decay=0.1)),
    "split": (torch.bfloat16, lambda p: dsx_ops.FusedAdam(p, lr=1e-2, split_master=True)),
    "8 bits": (torch.bfloat16, lambda p: dsx_ops.Adam8bit(p, lr=1e-2)),
    "momentum": (torch.float32, lambda p: dsx_ops.SGD(p, lr=1e-2, momentum=0.9, dampening=0.2)),
    "sgd": (torch.float32, lambda p: dsx_ops.SGD(p, lr=1e-2)),
    "lamb": (torch.float32, lambda p: dsx_ops.FusedLamb(p, lr=1e-2)),
}


@pytest.fixture(autouse=True)
def with_native_code():
    if native.module() is None:
        pytest.skip("needs the compiled module")


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


def pair(kind="adam"):
    """Two equal optimizers; the second forgets its tables before every step."""
    dtype, make = KINDS[kind]
    found = []
    for _ in range(2):
        params = model_params(dtype)
        found.append((params, make(params)))
    forgetful = found[1][1]
    forgetful.register_step_pre_hook(lambda *_: setattr(forgetful, "_repeat", None))
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_steps_that_begin_again(kind, in_place):
    both = pair(kind)
    for step in range(5):
        for params, optimizer in both:
            give_grads(params, step, in_place)
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.step(grad_scale=1.0 + step)
    same(*(everything(o, p) for p, o in both))
    assert [both[0][1].state[p]["step"] for p in both[0][0]] == [5] * len(SIZES)


def test_addresses_are_collected_anew_only_when_something_else_changed(monkeypatch):
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params)
    tables = []
    ordinary = native_cpu.update_table
    monkeypatch.setattr(native_cpu, "update_table", lambda batch: tables.append(1) or ordinary(batch))
    for step in range(4):
        give_grads(params, step)
        optimizer.step()
    first = len(tables)
    params[0].grad = None
    optimizer.step()
    assert first < len(tables)
    assert first == 1  # by the first step; those that repeat it fill the table that is kept


def moved_parameters(params, optimizer):
    for p in params:
        p.data = p.data.clone()


def moved_states(params, optimizer):
    for p in params:
        optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"].data.clone()


def replaced_states(params, optimizer):
    for p in params:
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].clone()


def states_in_bf16(params, optimizer):
    for p in params:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][name] = optimizer.state[p][name].bfloat16()


def loaded(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def without_one_gradient(params, optimizer):
    params[1].grad = None


def gradients_in_bf16(params, optimizer):
    for p in params:
        grad, p.grad = p.grad, None
        p.data, kept = p.data.bfloat16(), p.data
        p.grad = grad.bfloat16()
        p.data = kept


def another_group(params, optimizer):
    params.append(nn.Parameter(torch.ones(7)))
    params[-1].grad = torch.ones(7)
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})


def another_count(params, optimizer):
    optimizer.state[params[0]]["step"] += 10


def transposed_parameter(params, optimizer):
    params[4].data = params[4].data.t().contiguous().t().contiguous()


def reordered_states(params, optimizer):
    optimizer.state[params[0]] = optimizer.state.pop(params[0])


def other_state_dicts(params, optimizer):
    for p in params:
        optimizer.state[p] = {k: optimizer.state[p][k] for k in ("exp_avg_sq", "step", "exp_avg")}


def forgotten_state(params, optimizer):
    del optimizer.state[params[4]]


CHANGES = [
    reordered_states, other_state_dicts, forgotten_state,
    moved_parameters, moved_states, replaced_states, states_in_bf16, loaded, without_one_gradient, gradients_in_bf16,
    another_group, another_count, transposed_parameter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_changes_between_two_steps_counts(change, in_place):
    both = pair()
    for step in range(6):
        for params, optimizer in both:
            give_grads(params, step, in_place)
            if step == 3:
                change(params, optimizer)
            optimizer.step()
    same(*(everything(o, p) for p, o in both))


def sparse(p):
    p.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], p.shape, check_invariants=True)


def shortened(p):
    p.grad.resize_(3)


def test_a_gradient_in_another_order_of_memory_ends_the_repetition_and_is_right():
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
    with pytest.raises(dsx_ops.TensorError, match="parameter 4 of group 0"):
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
    with pytest.raises(dsx_ops.TensorError, match="parameter 4 of group 0"):
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
    with pytest.raises(dsx_ops.TensorError, match="parameter 4 of group 0"):
        optimizer.step()
    same(before, [p.detach() for p in params])
    assert [optimizer.state[p]["step"] for p in params] == [3] * len(params)


def test_tensors_without_the_c_functions_of_dlpack_take_the_ordinary_way(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    params = model_params()
    optimizer = dsx_ops.FusedAdam(params, lr=1e-2)
    for step in range(3):
        give_grads(params, step)
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [3] * len(params)


def test_a_subclass_as_gradient_is_refused_in_a_repeated_step_too():
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
    with pytest.raises(dsx_ops.TensorError, match="parameter 4 of group 0"):
        optimizer.step()
    same(before, everything(optimizer, params))


def test_tables_keep_no_tensor_alive():
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
