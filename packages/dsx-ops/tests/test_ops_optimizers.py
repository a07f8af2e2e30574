"""The optimizers against torch's own, float64 formulas, and what users do with optimizers."""

import copy
import warnings

import dsx_ops
import pytest
import torch
from torch import nn

SIZES = ((3, 5), (257,), (1,), (0,), (40, 33))


def model_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def give_grads(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def run(optimizer, params, steps=10, scale=1.0, start=0, **kwargs):
    for step in range(start, start + steps):
        give_grads(params, step, scale)
        optimizer.step(**kwargs)


def close(ours, theirs, rtol=2e-6, atol=1e-7):
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


PAIRS = {
    "adamw": (
        lambda p: dsx_ops.FusedAdam(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    ),
    "adam_l2": (
        lambda p: dsx_ops.CPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "adagrad": (
        lambda p: dsx_ops.CPUAdagrad(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1),
    ),
    "sgd": (lambda p: dsx_ops.SGD(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
    "momentum": (
        lambda p: dsx_ops.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
    "nesterov": (
        lambda p: dsx_ops.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    ),
}


@pytest.fixture(params=[False, True], ids=["native", "reference"])
def either_path(request):
    if request.param:
        with dsx_ops.reference_only():
            yield
    elif not dsx_ops.native_status()["native"]:
        pytest.skip("needs the compiled module")
    else:
        yield


@pytest.mark.parametrize("name", PAIRS)
def test_same_numbers_as_torch(name, either_path):
    ours, theirs = model_params(), model_params()
    a, b = (make(p) for make, p in zip(PAIRS[name], (ours, theirs)))
    run(a, ours), run(b, theirs)
    close(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "adam_l2", "adagrad", "momentum"])
def test_state_dicts_go_both_ways(name):
    ours, theirs, straight = model_params(), model_params(), model_params()
    a, b, s = PAIRS[name][0](ours), PAIRS[name][1](theirs), PAIRS[name][1](straight)
    run(s, straight, 9)
    run(a, ours, 3)
    for p, q in zip(theirs, ours):
        p.data.copy_(q.data)
    b.load_state_dict(a.state_dict())
    run(b, theirs, 3, start=3)
    for p, q in zip(ours, theirs):
        p.data.copy_(q.data)
    a = PAIRS[name][0](ours)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    run(a, ours, 3, start=6)
    close(ours, straight)


def test_own_state_dict_continues_to_the_bit_with_fp32_states_of_bf16_parameters():
    straight, resumed = model_params(torch.bfloat16), model_params(torch.bfloat16)
    for options in ({"state_dtype": torch.float32}, {"split_master": True}):
        a, b = dsx_ops.FusedAdam(straight, **options), dsx_ops.FusedAdam(resumed, **options)
        run(a, straight, 3), run(b, resumed, 3)
        saved = copy.deepcopy(b.state_dict())
        b = dsx_ops.FusedAdam(resumed, **options)
        b.load_state_dict(saved)
        assert b.state[resumed[0]]["exp_avg"].dtype == torch.float32
        run(a, straight, 3, start=3), run(b, resumed, 3, start=3)
        assert all(torch.equal(p, q) for p, q in zip(straight, resumed))


def test_steps_are_counted_per_parameter():
    ours, theirs = model_params(), model_params()
    a, b = PAIRS["adamw"][0](ours), PAIRS["adamw"][1](theirs)
    for step in range(4):
        for params, optimizer in ((ours, a), (theirs, b)):
            give_grads(params, step)
            if step % 2:
                params[0].grad = None
            optimizer.step()
    assert a.state[ours[0]]["step"] == 2 and a.state[ours[1]]["step"] == 4
    close(ours, theirs)


def test_grad_scale_divides_and_leaves_the_gradients(either_path):
    ours, theirs = model_params(), model_params()
    a, b = PAIRS["adamw"][0](ours), PAIRS["adamw"][0](theirs)
    for step in range(3):
        give_grads(ours, step, scale=1024.0), give_grads(theirs, step)
        before = [p.grad.clone() for p in ours]
        a.step(grad_scale=torch.tensor(1024.0) if step else 1024.0)
        b.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


def test_tensor_lr_scheduler_closure_and_groups():
    ours, theirs = model_params(), model_params()
    a = dsx_ops.FusedAdam(
        [{"params": ours[:2], "weight_decay": 0.3}, {"params": ours[2:]}], lr=torch.tensor(1e-2), weight_decay=0.1
    )
    b = torch.optim.AdamW(
        [{"params": theirs[:2], "weight_decay": 0.3}, {"params": theirs[2:]}], lr=1e-2, weight_decay=0.1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sa, sb = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (a, b))
        for _ in range(5):
            losses = []
            for params, optimizer in ((ours, a), (theirs, b)):

                def closure(params=params, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = sum((p**2).sum() for p in params)
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
            assert torch.allclose(*losses)
            sa.step(), sb.step()
    assert float(a.param_groups[0]["lr"]) == pytest.approx(b.param_groups[0]["lr"])
    close(ours, theirs)


def test_lion_against_float64(either_path):
    params = model_params()
    exact = [p.detach().double() for p in params]
    moments = [torch.zeros_like(p) for p in exact]
    optimizer = dsx_ops.FusedLion(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        give_grads(params, step)
        optimizer.step()
        for i, p in enumerate(params):
            g = p.grad.double()
            c = 0.9 * moments[i] + 0.1 * g
            exact[i] = exact[i] * (1 - 1e-2 * 0.1) - 1e-2 * c.sign()
            moments[i] = 0.95 * moments[i] + 0.05 * g
    close(params, [e.float() for e in exact], atol=1e-6)


def lamb_float64(params, grads_of, steps, inside, lr=1e-2, wd=0.1, eps=1e-6, low=0.01, high=10.0):
    """Lamb in float64; returns parameters and the last ratios."""
    ps = [p.detach().double() for p in params]
    ms, vs, ratios = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps], []
    for t in range(1, steps + 1):
        ratios = []
        for i, g in enumerate(grads_of(t - 1)):
            ms[i] = 0.9 * ms[i] + 0.1 * g
            vs[i] = 0.999 * vs[i] + 0.001 * g * g
            u = ms[i] / ((vs[i] + eps).sqrt() if inside else vs[i].sqrt() + eps) + wd * ps[i]
            pn, un = ps[i].norm().item(), u.norm().item()
            ratios.append(min(max(pn / un, low), high) if pn and un else 1.0)
            ps[i] = ps[i] - lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * ratios[-1] * u
    return ps, ratios


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_lamb_against_float64(inside, clip, either_path):
    params = model_params()
    params[1].data.zero_()  # ratio 1 while the norm is 0

    def grads_of(step):
        give_grads(params, step)
        grads = [p.grad.double() for p in params]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        return [g * min(1.0, clip / norm.item()) for g in grads] if clip else grads

    expected, ratios = lamb_float64(params, grads_of, 4, inside)
    optimizer = dsx_ops.FusedLamb(
        params, lr=1e-2, eps=1e-6, eps_inside_sqrt=inside, weight_decay=0.1, max_grad_norm=clip
    )
    run(optimizer, params, 4)
    close(params, [e.float() for e in expected], rtol=1e-5, atol=1e-6)
    assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-4)


def test_lamb_clips_each_group_by_its_own_limit(either_path):
    limits = (0.5, 0.0, 0.2)
    params = model_params()
    groups = [{"params": params[at::3], "max_grad_norm": limit} for at, limit in enumerate(limits)]

    def grads_of(step):
        give_grads(params, step)
        norm = torch.cat([p.grad.double().flatten() for p in params]).norm().item()  # of all groups
        factors = [min(1.0, limit / norm) if limit else 1.0 for limit in limits]
        return [p.grad.double() * factors[i % 3] for i, p in enumerate(params)]

    expected, _ = lamb_float64(params, grads_of, 4, False)
    run(dsx_ops.FusedLamb(groups, lr=1e-2, eps=1e-6, weight_decay=0.1), params, 4)
    close(params, [e.float() for e in expected], rtol=1e-5, atol=1e-6)


def test_lamb_on_shards_equals_lamb_on_wholes():
    """Two 'ranks' hold halves of each tensor; the reducer adds their squares."""
    wholes = model_params()
    whole = dsx_ops.FusedLamb(wholes, lr=1e-2, weight_decay=0.1)
    halves = [[nn.Parameter(h.clone()) for h in p.detach().flatten().tensor_split(2)] for p in wholes]
    ranks = [[h[r] for h in halves] for r in (0, 1)]
    posted = {}

    def reducer(rank):
        def reduce(params, squares):
            assert [id(p) for p in params] == [id(p) for p in ranks[rank]]
            posted[rank] = squares
            return posted.get("sum", squares)

        return reduce

    shards = [dsx_ops.FusedLamb(ranks[r], lr=1e-2, weight_decay=0.1, norm_reducer=reducer(r)) for r in (0, 1)]
    for step in range(3):
        give_grads(wholes, step)
        for w, h in zip(wholes, halves):
            for part, grad in zip(h, w.grad.flatten().tensor_split(2)):
                part.grad = grad.clone()
        whole.step()
        # First round: only to learn the squares; states are put back before the real one.
        kept = [copy.deepcopy((s.state_dict(), [p.detach().clone() for p in ps])) for s, ps in zip(shards, ranks)]
        posted.clear()
        for s in shards:
            s.step()
        for s, ps, (state, values) in zip(shards, ranks, kept):
            if step:
                s.load_state_dict(state)
            else:
                s.state.clear()
            for p, v in zip(ps, values):
                p.data.copy_(v)
        posted["sum"] = posted[0] + posted[1]
        for s in shards:
            s.step()
    close([torch.cat([a.detach(), b.detach()]) for a, b in halves], [w.detach().flatten() for w in wholes])


def test_lamb_reducer_is_called_without_gradients():
    calls = []
    optimizer = dsx_ops.FusedLamb(
        model_params(), norm_reducer=lambda params, squares: calls.append(tuple(squares.shape)) or squares
    )
    optimizer.step()
    assert calls == [(0, 2)] and optimizer.get_lamb_coeffs() == []


@pytest.mark.parametrize("seed", range(3))
def test_split_master_is_exactly_the_fp32_master(seed, either_path):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(5000, generator=generator).bfloat16()
    weight, master = nn.Parameter(start.clone()), nn.Parameter(start.float())
    split = dsx_ops.FusedAdam([weight], lr=1e-3, weight_decay=0.1, split_master=True)
    plain = dsx_ops.FusedAdam([master], lr=1e-3, weight_decay=0.1)
    for _ in range(20):
        grad = torch.randn(5000, generator=generator).bfloat16()
        weight.grad, master.grad = grad, grad.float()
        split.step(), plain.step()
        low = split.state[weight]["low_bits"]
        bits = (weight.detach().view(torch.int16).int() << 16) + low.int()
        assert torch.equal(bits.view(torch.float32), master.detach())
    # The weight is a nearest bf16 number to the master.
    nearest = master.detach().bfloat16().double()
    exact = master.detach().double()
    assert torch.equal((weight.detach().double() - exact).abs(), (nearest - exact).abs())
    differs = weight.detach() != master.detach().bfloat16()
    assert differs.float().mean() < 1e-3  # only exact ties


def test_split_master_survives_extremes(either_path):
    values = torch.tensor([3.38e38, -3.38e38, float("inf"), 0.0, 1e-40, float("nan"), 1.00390625, 1.01171875])
    weight, master = nn.Parameter(values.bfloat16()), nn.Parameter(values.bfloat16().float())
    a = dsx_ops.FusedAdam([weight], lr=1e-3, split_master=True)
    b = dsx_ops.FusedAdam([master], lr=1e-3)
    for _ in range(3):
        weight.grad = torch.full((8,), 0.37, dtype=torch.bfloat16)
        master.grad = weight.grad.float()
        a.step(), b.step()
    bits = (weight.detach().view(torch.int16).int() << 16) + a.state[weight]["low_bits"].int()
    assert torch.equal(bits.view(torch.float32).nan_to_num(7.0), master.detach().nan_to_num(7.0))
    assert weight.detach().isnan().equal(master.detach().isnan())


def test_nan_and_inf_gradients_reach_only_their_elements():
    p, q = (nn.Parameter(torch.ones(40)) for _ in range(2))
    p.grad, q.grad = torch.ones(40), torch.ones(40)
    q.grad[7], q.grad[33] = float("nan"), float("inf")
    for x in (p, q):
        dsx_ops.FusedAdam([x], lr=0.1).step()
    hurt = torch.zeros(40, dtype=torch.bool)
    hurt[7] = hurt[33] = True
    assert torch.equal(p[~hurt], q[~hurt]) and q[hurt].isnan().all()


def bad_inputs():
    base = lambda: nn.Parameter(torch.ones(4, 4))  # noqa: E731
    p = base()
    p.grad = torch.ones(4, 4).to_sparse()
    yield "sparse", p, "sparse"
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    p.grad = torch.ones(4, 4, dtype=torch.float64)
    yield "float64", p, "float64"
    p = nn.Parameter(torch.ones(4).expand(4, 4))
    p.grad = torch.ones(4, 4)
    yield "expanded parameter", p, "share memory"


@pytest.mark.parametrize("case", list(bad_inputs()), ids=lambda c: c[0])
def test_bad_tensors_are_refused_before_anything_changes(case):
    _, bad, text = case
    good = nn.Parameter(torch.ones(3))
    good.grad = torch.ones(3)
    optimizer = dsx_ops.FusedAdam([good, bad], lr=0.1)
    with pytest.raises(dsx_ops.errors.TensorError, match=text):
        optimizer.step()
    assert torch.equal(good, torch.ones(3)) and not optimizer.state


def test_flat_step_refuses_what_does_not_fit():
    optimizer = dsx_ops.CPUAdam([torch.zeros(1)])
    p = torch.ones(8)
    state = optimizer.new_flat_state(p)
    for grad, out, text in (
        (torch.ones(7), None, "8"),
        (torch.ones(8), torch.ones(7), "7"),
        (torch.ones(8, dtype=torch.int32), None, "int32"),
        (torch.ones(8, device="meta"), None, "meta"),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=text):
            optimizer.step_flat(p, grad, state, copy_out=out)
    assert torch.equal(p, torch.ones(8)) and state["step"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: dsx_ops.FusedAdam(p, lr=-1),
        lambda p: dsx_ops.FusedAdam(p, lr=float("nan")),
        lambda p: dsx_ops.FusedAdam(p, betas=(0.9, 1.0)),
        lambda p: dsx_ops.FusedAdam(p, eps=-1e-8),
        lambda p: dsx_ops.FusedAdam(p, amsgrad=True),
        lambda p: dsx_ops.CPUAdagrad(p, weight_decay=-1),
        lambda p: dsx_ops.FusedLamb(p, max_coeff=0.001),
        lambda p: dsx_ops.SGD(p, nesterov=True),
        lambda p: dsx_ops.FusedAdam([{"params": p, "lr": -3}]),
        lambda p: dsx_ops.FusedAdam(p, state_dtype=torch.int8),
    ],
)
def test_bad_numbers_are_refused(make):
    with pytest.raises(dsx_ops.errors.HyperparameterError, match=r"expected|not available"):
        make([nn.Parameter(torch.ones(2))])


def test_grad_scale_must_be_positive():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(dsx_ops.errors.HyperparameterError, match="grad_scale"):
            dsx_ops.FusedAdam([p]).step(grad_scale=scale)
    assert torch.equal(p, torch.ones(2))


def test_known_names_and_truth_as_torch_optimizers():
    assert dsx_ops.DeepSpeedCPUAdam is dsx_ops.CPUAdam
    assert dsx_ops.DeepSpeedCPUAdagrad is dsx_ops.CPUAdagrad and dsx_ops.DeepSpeedCPULion is dsx_ops.CPULion
    p = [nn.Parameter(torch.ones(2))]
    for kind in (dsx_ops.FusedAdam, dsx_ops.CPUAdam, dsx_ops.CPUAdagrad, dsx_ops.CPULion, dsx_ops.FusedLamb,
                 dsx_ops.FusedLion, dsx_ops.Adam8bit, dsx_ops.SGD):  # fmt: skip
        assert isinstance(kind(p), torch.optim.Optimizer)
