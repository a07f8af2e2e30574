"""1-bit Adam, 0/1 Adam and 1-bit LAMB on several ranks against float64 simulations of the published algorithms."""

import dsx_comm
import pytest
import torch
from dsx_comm.compressed import OneBitLayout
from dsx_comm.onebit.schedule import StepKind, ZeroOneClock, ZeroOnePolicy
from dsx_testkit import run_ranks

SHAPES = ((7, 5), (33,), (), (64, 3))
B1, B2, EPS = 0.9, 0.99, 1e-8


def gradient(step, rank, index):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SHAPES[index], generator=generator) * (0.1 + index)


def start():
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]


def losses(params, step, rank):
    """A loss whose gradients are known, whatever the parameters are."""
    return sum((p * gradient(step, rank, i)).sum() for i, p in enumerate(params))


class Wire:
    """The 1-bit all-reduce of `world` ranks in float64."""

    def __init__(self, lengths, world):
        self.layout, self.world = OneBitLayout.of(lengths, world), world
        self.reset()

    def reset(self):
        self.worker = [[torch.zeros(n).double() for n in self.layout.lengths] for _ in range(self.world)]
        self.server = [torch.zeros(n).double() for n in self.layout.lengths]

    def mean(self, per_rank):
        out = []
        for s, n in enumerate(self.layout.lengths):
            total = torch.zeros(n).double()
            for r in range(self.world):
                x = per_rank[r][s].reshape(-1) + self.worker[r][s]
                sent = x.square().mean().sqrt() * torch.where(x >= 0, 1.0, -1.0)
                self.worker[r][s] = x - sent
                total += sent / self.world
            got = torch.zeros(n).double()
            for r in range(self.world):
                a = min(max(r * self.layout.chunk - self.layout.offsets[s], 0), n)
                b = min(max((r + 1) * self.layout.chunk - self.layout.offsets[s], a), n)
                if a < b:
                    x = total[a:b] + self.server[s][a:b]
                    got[a:b] = x.square().mean().sqrt() * torch.where(x >= 0, 1.0, -1.0)
                    self.server[s][a:b] = x - got[a:b]
            out.append(got.view(per_rank[0][s].shape))
        return out


def run(rank, world, name, settings, steps, groups=False, betas=(B1, B2)):
    params = start()
    if groups:
        made = [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.3}]
    else:
        made = params
    optimizer = getattr(dsx_comm, name)(made, betas=betas, **settings)
    history, kinds = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses(params, step, rank).backward()
        optimizer.step()
        history.append([p.detach().clone() for p in params])
        kinds.append(optimizer.last_traffic.kind.value)
    extra = optimizer.get_lamb_coeffs() if name == "OneBitLamb" else None
    return history, kinds, extra


def compare(history, want, step, tolerance=2e-4):
    for index, (got, expected) in enumerate(zip(history[step], want)):
        torch.testing.assert_close(
            got.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"step {step}, parameter {index}: {m}"
        )


def doubles(step, world):
    return [[gradient(step, r, i).double() for i in range(len(SHAPES))] for r in range(world)]


def means(per_rank):
    return [torch.stack(x).mean(0) for x in zip(*per_rank)]


def test_a_variance_of_which_the_last_exact_steps_weigh_alike():
    """b2 = 0.5, so that its mean of two squares gives way to one of many: weights in v, and the correction of its
    bias.
    """
    world, steps, freeze, window, b2 = 2, 12, 8, 6, 0.5
    settings = {"freeze_step": freeze, "variance_window": window, "bias_correction": True, "lr": 0.2}
    ranks = run_ranks(run, world, "OneBitAdam", settings, steps, False, (B1, b2))
    p = [x.detach().double() for x in start()]
    m, v, rest = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p], 1.0
    wire = Wire([x.numel() for x in p], world)
    for step in range(steps):
        g = doubles(step, world)
        if step < freeze:
            k = step + 1 - (freeze - window)
            decay = max(b2, 1 - 1 / k) if k >= 1 else b2
            mean, rest = means(g), rest * decay
            m = [B1 * a + (1 - B1) * b for a, b in zip(m, mean)]
            v = [decay * a + (1 - decay) * b * b for a, b in zip(v, mean)]
        else:
            m = wire.mean([[B1 * a + (1 - B1) * b for a, b in zip(m, own)] for own in g])
        p = [x - 0.2 * a / (1 - B1 ** (step + 1)) / ((b / (1 - rest)).sqrt() + EPS) for x, a, b in zip(p, m, v)]
        for history, _, _ in ranks:
            compare(history, p, step)


def test_the_window_is_for_variances_that_will_be_frozen():
    plain, windowed = (
        run_ranks(run, 2, "OneBitAdam", {"freeze_step": 6, "compression": "off", **more}, 9, False, (B1, 0.5))
        for more in ({}, {"variance_window": 6})
    )
    for got, want in zip(windowed[0][0], plain[0][0]):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("world", "floor"), [(2, 0.0), (3, 0.0), (2, 0.9)])
def test_onebit_adam_is_the_published_algorithm(world, floor):
    steps, freeze, lrs, decay = 9, 4, [0.02, 0.02, 1e-3, 1e-3], [0.0, 0.0, 0.3, 0.3]
    ranks = run_ranks(run, world, "OneBitAdam", {"freeze_step": freeze, "variance_floor": floor}, steps, True)
    p = [x.detach().double() for x in start()]
    m, v = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p]
    wire = Wire([x.numel() for x in p], world)
    for step in range(steps):
        g = doubles(step, world)
        if step < freeze:
            mean = means(g)
            m = [B1 * a + (1 - B1) * b for a, b in zip(m, mean)]
            v = [B2 * a + (1 - B2) * b * b for a, b in zip(v, mean)]
        else:
            m = wire.mean([[B1 * a + (1 - B1) * b for a, b in zip(m, own)] for own in g])
        used = v if step < freeze else [b.clamp(min=float(b.mean()) * floor**2) for b in v]
        p = [x - lr * (a / (b.sqrt() + EPS) + wd * x) for x, a, b, lr, wd in zip(p, m, used, lrs, decay)]
        for history, kinds, _ in ranks:
            compare(history, p, step)
            assert kinds[step] == ("exact" if step < freeze else "one_bit")
            for got, first in zip(history[step], ranks[0][0][step]):
                assert torch.equal(got, first)


def test_zero_one_adam_is_the_published_algorithm():
    world, steps, lr, decay = 2, 30, 1e-2, 0.1
    policy = {"var_freeze_step": 10, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
    ranks = run_ranks(run, world, "ZeroOneAdam", {"lr": lr, "weight_decay": decay, **policy}, steps)
    p = [[x.detach().double() for x in start()] for _ in range(world)]
    m = [[torch.zeros_like(x) for x in p[0]] for _ in range(world)]
    v, u = [torch.zeros_like(x) for x in p[0]], [[torch.zeros_like(x) for x in p[0]] for _ in range(world)]
    wire, clock, lrs, seen = Wire([x.numel() for x in p[0]], world), ZeroOneClock(), 0.0, set()
    begin = [x.clone() for x in p[0]]
    for step in range(steps):
        g, kind = doubles(step, world), clock.advance(ZeroOnePolicy(**policy))
        seen.add(kind)
        if step == policy["var_freeze_step"]:
            wire.reset()
        if kind in (StepKind.EXACT, StepKind.ONE_BIT):
            mean = means(g) if kind is StepKind.EXACT else wire.mean(g)
            if kind is StepKind.EXACT:
                v = [B2 * a + (1 - B2) * b * b for a, b in zip(v, mean)]
            g = [mean] * world
        for r in range(world):
            m[r] = [B1 * a + (1 - B1) * b for a, b in zip(m[r], g[r])]
            delta = [a / (b.sqrt() + EPS) + decay * x for a, b, x in zip(m[r], v, p[r])]
            p[r] = [x - lr * d for x, d in zip(p[r], delta)]
            u[r] = [x - lr * d for x, d in zip(u[r], delta)]
        if kind in (StepKind.EXACT, StepKind.ONE_BIT):
            u = [[torch.zeros_like(x) for x in row] for row in u]
            begin = [x.clone() for x in p[0]]
        else:
            lrs += lr
        if kind is StepKind.SYNC:
            got = wire.mean([[x * (b.sqrt() + EPS) for x, b in zip(row, v)] for row in u])
            m = [[-x / lrs for x in got] for _ in range(world)]
            begin = [x + y / (b.sqrt() + EPS) for x, y, b in zip(begin, got, v)]
            p = [[x.clone() for x in begin] for _ in range(world)]
            u, lrs = [[torch.zeros_like(x) for x in row] for row in u], 0.0
        for r, (history, kinds, _) in enumerate(ranks):
            compare(history, p[r], step, 1e-3)
            assert kinds[step] == kind.value
        same = all(torch.equal(a, b) for a, b in zip(ranks[0][0][step], ranks[1][0][step]))
        assert same == (kind is not StepKind.LOCAL)  # the same bits whenever ranks have talked
    assert seen == set(StepKind)


def test_onebit_lamb_is_the_published_algorithm():
    world, steps, freeze, lr, decay = 2, 9, 4, 1e-2, 0.1
    limits = {
        "max_coeff": 5.0,
        "min_coeff": 0.05,
        "coeff_beta": 0.8,
        "factor_max": 2.0,
        "factor_min": 0.7,
        "factor_threshold": 0.05,
    }
    ranks = run_ranks(
        run, world, "OneBitLamb", {"lr": lr, "weight_decay": decay, "freeze_step": freeze, **limits}, steps
    )
    p = [x.detach().double() for x in start()]
    m, v = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p]
    mean_c, last, coefficients = [0.0] * len(p), [1.0] * len(p), []
    wire, fresh, scaling = Wire([sum(x.numel() for x in p)], world), [], []
    for step in range(steps):
        g, coefficients = doubles(step, world), []
        if step == freeze:
            rms = [x.square().mean().sqrt() for x in m]
            scaling = [sum(rms) / len(rms) / x for x in rms]
            fresh = [x.clone() for x in v]
        before = m
        if step < freeze:
            mean = means(g)
            m = [B1 * a + (1 - B1) * b for a, b in zip(m, mean)]
            v = [B2 * a + (1 - B2) * b * b for a, b in zip(v, mean)]
        else:
            rows = [[(B1 * a + (1 - B1) * b) * c for a, b, c in zip(m, own, scaling)] for own in g]
            (flat,) = wire.mean([[torch.cat([x.reshape(-1) for x in row])] for row in rows])
            m = [x.view(y.shape) / c for x, y, c in zip(flat.split([x.numel() for x in p]), p, scaling)]
            real = [(a - B1 * b) / (1 - B1) for a, b in zip(m, before)]
            fresh = [B2 * a + (1 - B2) * b * b for a, b in zip(fresh, real)]
        for i, x in enumerate(p):
            raw = m[i] / (v[i].sqrt() + EPS)
            update = raw + decay * x
            if step < freeze:
                c = float((x.norm() / update.norm()).clamp(limits["min_coeff"], limits["max_coeff"]))
                if c != 1:
                    mean_c[i] = 0.8 * mean_c[i] + 0.2 * c
            else:
                factor = float(((v[i].sqrt() + EPS) / (fresh[i].sqrt() + EPS)).max())
                share = min(1.0, float(raw.norm() / update.norm()))
                factor = min(max(factor * share + 1 - share, 0.7), 2.0)
                last[i] = factor = min(max(factor, last[i] * 0.95), last[i] * 1.05)
                c = mean_c[i] * factor
            coefficients.append(c)
            p[i] = x - lr * c * update
        for history, _, _ in ranks:
            compare(history, p, step, 1e-3)
    for _, _, got in ranks:
        assert got == pytest.approx(coefficients, rel=1e-3)


def warm(rank, world):
    """While nothing is frozen, with bias correction, it is AdamW on the mean gradient, from the first step on."""
    ours, theirs = start(), start()
    a = dsx_comm.OneBitAdam(ours, lr=0.01, weight_decay=0.1, freeze_step=100, bias_correction=True)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for step in range(6):
        a.zero_grad(), b.zero_grad()
        losses(ours, step, rank).backward()
        losses(theirs, step, rank).backward()
        for p in theirs:
            dsx_comm.all_reduce(p.grad, dsx_comm.ReduceOp.AVG)
        a.step(), b.step()
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_the_warm_up_is_adam_from_the_first_step_on(world):
    run_ranks(warm, world)


def apart(rank, world):
    """A group that is never frozen is Adam for ever, beside compressed ones; masked and untouched elements stay."""
    ours, theirs = start(), start()
    mask = torch.ones(33)
    mask[20:] = 0
    a = dsx_comm.OneBitAdam(
        [{"params": [ours[0]], "non_freeze": True}, {"params": [ours[1]], "exp_avg_mask": mask}, {"params": ours[2:]}],
        lr=0.01, freeze_step=3,
    )  # fmt: skip
    b = dsx_comm.OneBitAdam([theirs[0]], lr=0.01, freeze_step=10_000)
    untouched = ours[3].detach().clone()[:, 1]
    for step in range(8):
        a.zero_grad(), b.zero_grad()
        losses(ours, step, rank).backward()
        ours[3].grad[:, 1] = 0
        masked_before = ours[1].detach().clone()
        (theirs[0] * gradient(step, rank, 0)).sum().backward()
        a.step(), b.step()
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1][20:], masked_before[20:]) == (step >= 3)
    assert torch.equal(ours[3][:, 1], untouched)  # never had a gradient: no noise divided by eps
    assert ours[3].isfinite().all() and ours[3].abs().max() < 20


def test_groups_that_are_never_frozen_masks_and_untouched_elements():
    run_ranks(apart, 2)


def masked(rank, world, name, flat):
    """A mask that is flattened, as BERT's scripts do, says the same as one in the parameter's shape."""
    ours, theirs = start(), start()
    mask = torch.ones(64, 3)
    mask[40:, 1] = 0
    given = torch.flatten(mask) if flat else [mask]
    settings = {"var_freeze_step": 2} if name == "ZeroOneAdam" else {"freeze_step": 2}
    optimizers = []
    for params, one in ((ours, mask), (theirs, given)):
        groups = [{"params": params[:3]}, {"params": params[3:], "exp_avg_mask": one}]
        optimizers.append(getattr(dsx_comm, name)(groups, lr=0.01, **settings))
    for step in range(6):
        for optimizer, params in zip(optimizers, (ours, theirs)):
            optimizer.zero_grad()
            losses(params, step, rank).backward()
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    assert not optimizers[1].state[theirs[3]]["exp_avg"][40:, 1].any()


@pytest.mark.parametrize(
    ("name", "flat"), [("OneBitAdam", True), ("OneBitLamb", True), ("ZeroOneAdam", True), ("OneBitAdam", False)]
)
def test_a_flattened_mask(name, flat):
    run_ranks(masked, 2, name, flat)


def ends(rank, world):
    params = start()
    optimizer = dsx_comm.ZeroOneAdam(
        params, var_freeze_step=2, local_step_scaler=1, local_step_clipper=8, gradient_dtype=torch.bfloat16
    )
    different = 0
    for step in range(14):
        optimizer.zero_grad()
        losses(params, step, rank).backward()
        optimizer.step()
        everyone = [torch.empty_like(params[0]) for _ in range(world)]
        dsx_comm.all_gather(everyone, params[0].detach())
        different += not torch.equal(everyone[0], everyone[1])
        if step == 10:
            optimizer.synchronize()
            dsx_comm.all_gather(everyone, params[0].detach())
            assert torch.equal(everyone[0], everyone[1])
            moments = [torch.empty_like(params[3]) for _ in range(world)]
            dsx_comm.all_gather(moments, optimizer.state[params[3]]["exp_avg"])
            assert torch.equal(moments[0], moments[1])
            values = [p.detach().clone() for p in params]
            optimizer.synchronize()  # nothing more to do
            assert all(torch.equal(x, y) for x, y in zip(params, values))
    assert different > 3


def test_synchronize_ends_a_window_of_local_steps():
    run_ranks(ends, 2)


def alone(rank, world):
    """One rank: nothing is sent and nothing is lost; the momentum moves in every step."""
    params, plain = [torch.nn.Parameter(torch.ones(4))], torch.ones(4)
    optimizer = dsx_comm.ZeroOneAdam(params, lr=0.1, var_freeze_step=100, var_update_scaler=1)
    m, v = torch.zeros(4), torch.zeros(4)
    clock, policy = ZeroOneClock(), ZeroOnePolicy(100, 1)
    for step in range(6):
        g = torch.arange(4.0) + step + 1
        params[0].grad = g.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        if clock.advance(policy) is StepKind.EXACT:
            v = 0.999 * v + 0.001 * g * g
        plain = plain - 0.1 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(params[0].detach(), plain)
    assert optimizer.last_traffic.sent == 0 and optimizer.error_bytes() == 0


def test_one_rank_moves_its_momentum_in_every_step():
    run_ranks(alone, 1)
    alone(0, 1)  # without any process group


def ugly(rank, world):
    half = [torch.nn.Parameter(torch.randn(6, 4).to(torch.bfloat16)), torch.nn.Parameter(torch.randn(3))]
    unused = torch.nn.Parameter(torch.ones(5))
    empty = torch.nn.Parameter(torch.empty(0, 3))
    optimizer = dsx_comm.OneBitAdam([*half, unused, empty], lr=0.01, freeze_step=2)
    for _ in range(5):

        def closure():
            optimizer.zero_grad()
            loss = (half[0].float().square().sum() + half[1].square().sum()) * (rank + 1)
            loss.backward()
            return loss.detach()

        assert optimizer.step(closure) > 0
    assert torch.equal(unused, torch.ones(5)) and half[0].dtype == torch.bfloat16
    assert optimizer.state[half[0]]["exp_avg"].dtype == torch.float32
    late = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(dsx_comm.CommError, match=r"1 of 5 parameters \(the first of shape \(3,\)\) have no state"):
        optimizer.step()
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    other = dsx_comm.OneBitLamb(sparse.parameters(), freeze_step=1)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="sparse gradient; build its module with sparse=False"):
        other.step()


def test_16_bit_unused_empty_late_and_sparse_parameters():
    run_ranks(ugly, 2)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("OneBitAdam", {"freeze_step": 0}, "freeze_step: got 0, expected a whole number of at least 1"),
        (
            "OneBitLamb",
            {"freeze_step": 9, "variance_window": 10},
            "variance_window: got 10, expected .* freeze_step, 9",
        ),
        ("OneBitAdam", {"variance_window": 0.5}, "variance_window: got 0.5, expected a whole number from 0"),
        ("OneBitAdam", {"max_grad_norm": 1.0}, r"param_groups\[0\].max_grad_norm: got 1.0, expected 0"),
        ("OneBitLamb", {"amsgrad": True}, "amsgrad: got True"),
        ("OneBitAdam", {"betas": (0.9, 1.0)}, r"betas: got \(0.9, 1.0\), expected two numbers"),
        ("OneBitAdam", {"lr": -1.0}, "lr: got -1.0"),
        ("ZeroOneAdam", {"var_update_scaler": 0}, "var_update_scaler: got 0, expected a whole number"),
        ("ZeroOneAdam", {"comm_backend_name": "mpl"}, "comm_backend_name: got 'mpl', expected one of nccl, mpi"),
        ("OneBitLamb", {"compression": True}, 'compression: got True, expected "on" or "off"'),
        ("OneBitAdam", {"scale": "max"}, "scale: got 'max'"),
        ("ZeroOneAdam", {"variance_floor": 2}, "variance_floor: got 2, expected a number from 0 to 1"),
    ],
)
def test_arguments_that_cannot_be(name, settings, text):
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=text):
        getattr(dsx_comm, name)([torch.nn.Parameter(torch.ones(2))], **settings)


def test_groups_that_cannot_be():
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="only OneBitAdam has groups that are never frozen"):
        dsx_comm.ZeroOneAdam([{"params": [p], "non_freeze": True}])
    with pytest.raises(
        dsx_comm.errors.CommArgumentError, match=r"exp_avg_mask: got shape \(3,\) for a parameter of shape \(2,\)"
    ):
        dsx_comm.OneBitAdam([{"params": [p], "exp_avg_mask": torch.ones(3)}])
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    for wrong in (torch.ones(5), torch.ones(6, 1), torch.ones(3, 2)):
        with pytest.raises(
            dsx_comm.errors.CommArgumentError, match=r"broadcasts to it, or \(6,\), the parameter flattened"
        ):
            dsx_comm.OneBitAdam([{"params": [matrix], "exp_avg_mask": wrong}])
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="exp_avg_mask: got float, expected a tensor"):
        dsx_comm.OneBitAdam([{"params": [matrix], "exp_avg_mask": 1.0}])
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"parameter of torch\.complex64, expected"):
        dsx_comm.OneBitAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
