"""Stage 3 on several ranks equals plain torch on one process over the same global batch."""

import copy

import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny

EXACT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
"""fp32: sums over ranks and micro-batches are taken in another order than the oracle's."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole(model):
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in model.named_parameters()
    }


MODELS = {
    "mlp": (lambda rank: tiny.MLP(), {}),
    "gpt": (lambda rank: tiny.TinyGPT(), {}),
    "tied": (lambda rank: tiny.Tied(), {}),
    "reused": (lambda rank: tiny.Reused(), {}),
    "frozen": (lambda rank: tiny.Frozen(), {}),
    "odd": (lambda rank: tiny.OddSizes(), {}),
    "groups": (lambda rank: tiny.TwoGroups(), {}),
    "mixed": (lambda rank: tiny.MixedDtypes(low=torch.float64), {}),
    "reentrant": (lambda rank: tiny.Checkpointed(reentrant=True), {}),
    "checkpointed": (lambda rank: tiny.Checkpointed(reentrant=False), {}),
    "persistent": (lambda rank: tiny.TinyGPT(), {"stage3_param_persistence_threshold": 100}),
    "reuse": (lambda rank: tiny.Checkpointed(reentrant=True), {"stage3_max_reuse_distance": 10**9}),
    "no_prefetch": (lambda rank: tiny.TinyGPT(), {"stage3_prefetch_bucket_size": 0}),
    "little_live": (lambda rank: tiny.TinyGPT(), {"stage3_max_live_parameters": 10}),
    "kept_gradients": (lambda rank: tiny.TinyGPT(), {"keep_full_gradients": True}),
}


def _optimizer(model):
    return (
        sgd(model.groups(0.05)) if hasattr(model, "groups") else sgd([p for p in model.parameters() if p.requires_grad])
    )


def _train(rank, world, name, accumulation, steps=3):
    from contextlib import nullcontext

    import dsx_zero

    make, settings = MODELS[name]
    model, oracle = make(rank), make(rank)
    reference = _optimizer(oracle)
    model, optimizer = dsx_zero.shard(model, _optimizer(model), stage=3, config={**EXACT, **settings})
    for step in range(steps):
        for micro in range(accumulation):
            batches = [model.example(4, seed=100 * step + 10 * micro + r) for r in range(world)]
            last = micro == accumulation - 1
            with optimizer.no_sync() if settings.get("keep_full_gradients") and not last else nullcontext():
                loss = model.loss(*batches[rank]) / accumulation
                loss.backward()
            (sum(oracle.loss(*batch) for batch in batches) / (world * accumulation)).backward()
        outcome = optimizer.step(max_norm=1.0)
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        torch.testing.assert_close(outcome.grad_norm, norm.item(), rtol=1e-4, atol=1e-6)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_close_named(whole(model), {n: p.detach() for n, p in oracle.named_parameters()}, **TOLERANCE)


@pytest.mark.parametrize("world", [2, 3])
def test_training_equals_one_process(world):
    def work(rank, world):
        for index, name in enumerate(MODELS):
            accumulation = 1 if (index + world) % 2 else 3  # each model sees both, at different world sizes
            try:
                _train(rank, world, name, accumulation)
            except AssertionError as error:
                raise AssertionError(f"{name}, accumulation {accumulation}: {error}") from error

    run_ranks(work, world, timeout=200)


def test_one_rank_equals_plain_training():
    def work(rank, world):
        for name in MODELS:
            _train(rank, world, name, 3, steps=2)

    run_ranks(work, 1, timeout=100)


def test_every_rank_skips_branches_at_random_without_hanging():
    def work(rank, world):
        import random

        import dsx_zero

        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.trunk = torch.nn.Linear(6, 6)
                self.branches = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

            def forward(self, x, used):
                x = torch.tanh(self.trunk(x))
                for index in used:
                    x = x + torch.tanh(self.branches[index](x))
                return x.square().mean()

        model, oracle = Branches(), Branches()
        reference = sgd(oracle.parameters())
        model, optimizer = dsx_zero.shard(model, sgd, stage=3, config=EXACT)
        rng = random.Random(5)
        for step in range(20):
            uniform = step < 5 or step % 4 == 0
            used = [[i for i in range(4) if uniform or rng.random() < 0.5] for _ in range(world)]
            if step % 7 == 6:
                used = [rng.sample(u, len(u)) for u in used]
            data = torch.randn(world, 3, 6, generator=torch.Generator().manual_seed(step))
            runs_backward = [uniform or rng.random() < 0.8 for _ in range(world)]
            loss = model(data[rank], used[rank])
            if runs_backward[rank]:
                loss.backward()
            for r in range(world):
                if runs_backward[r]:
                    (oracle(data[r], used[r]) / world).backward()
            for parameter in oracle.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_close_named(whole(model), {n: p.detach() for n, p in oracle.named_parameters()}, **TOLERANCE)

    run_ranks(work, 3, timeout=60)


def test_parameters_used_on_some_ranks_only():
    def work(rank, world):
        import dsx_zero

        model, oracle = tiny.Unused(rank), tiny.Unused(None)
        reference = sgd(oracle.parameters())
        model, optimizer = dsx_zero.shard(model, sgd, stage=3, config=EXACT)
        for step in range(4):
            batches = [model.example(4, seed=10 * step + r) for r in range(world)]
            model.loss(*batches[rank]).backward()
            oracle.loss(*(torch.cat(parts) for parts in zip(*batches))).backward()
            for parameter in oracle.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_close_named(whole(model), {n: p.detach() for n, p in oracle.named_parameters()}, **TOLERANCE)

    run_ranks(work, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_and_collectives_of_a_step(world):
    def work(rank, world):
        from contextlib import nullcontext

        import dsx_comm
        import dsx_zero

        found = []
        for accumulation, keep in ((1, False), (3, False), (3, True)):
            model = tiny.TinyGPT(width=32, layers=3)
            elements = sum(p.numel() for p in model.parameters())
            config = {**EXACT, "keep_full_gradients": keep}
            model, optimizer = dsx_zero.shard(model, sgd, stage=3, config=config)
            for step in range(4):
                with dsx_comm.count_traffic() as traffic:
                    for micro in range(accumulation):
                        with optimizer.no_sync() if keep and micro < accumulation - 1 else nullcontext():
                            model.loss(*model.example(2, seed=micro)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            sent = traffic.sent_bytes(op="all_gather_into_tensor") + traffic.sent_bytes(op="reduce_scatter_tensor")
            units = 4
            passes = accumulation * 2
            found.append(
                (
                    accumulation,
                    keep,
                    sent / (4 * elements * (world - 1) / world),
                    traffic.calls("all_gather_into_tensor"),
                )
            )
            assert traffic.calls("all_gather_into_tensor") <= passes * units + 1, found
            assert traffic.calls("reduce_scatter_tensor") == units * (1 if keep else accumulation), found
            assert traffic.sent_bytes() - sent <= 0.01 * sent
        return found

    for accumulation, keep, ratio, _ in run_ranks(work, world)[0]:
        expected = 2 * accumulation + 1 if keep else 3 * accumulation
        assert ratio == pytest.approx(expected, rel=0.01)


def test_evaluation_between_and_inside_steps():
    def work(rank, world):
        import dsx_zero

        model = tiny.TinyGPT()
        oracle = copy.deepcopy(model)
        model, optimizer = dsx_zero.shard(model, sgd, stage=3, config=EXACT)
        reference = sgd(oracle.parameters())
        for step in range(5):
            batch = model.example(2, seed=step)
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(batch[0]), oracle.eval()(batch[0]), **TOLERANCE)
            loss = model.train().loss(*batch)
            with torch.no_grad():
                torch.testing.assert_close(model(batch[0]), oracle(batch[0]), **TOLERANCE)
            loss.backward()
            oracle.loss(*batch).backward()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_close_named(whole(model), {n: p.detach() for n, p in oracle.named_parameters()}, **TOLERANCE)

    run_ranks(work, 2)


def test_low_precision_parameters_with_fp32_masters():
    def work(rank, world):
        import dsx_zero

        model = tiny.MLP().to(torch.bfloat16)
        oracle = {n: p.detach().float() for n, p in model.named_parameters()}
        model, optimizer = dsx_zero.shard(
            model, lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config=EXACT, precision=dsx_zero.Precision()
        )
        plain = tiny.MLP().to(torch.bfloat16)
        for step in range(3):
            x, y = plain.example(4, seed=step)
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(oracle[name])
            plain.zero_grad()
            plain.loss(x.bfloat16(), y).backward()
            model.loss(x.bfloat16(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in plain.named_parameters():
                oracle[name] -= 0.1 * parameter.grad.float()
        assert_close_named(whole(model), {n: v.bfloat16() for n, v in oracle.items()}, rtol=1e-2, atol=1e-3)

    run_ranks(work, 2)


def test_the_oracle_notices_a_gather_that_is_read_too_early():
    def work(rank, world):
        import dsx_zero.gather.lifetime as lifetime

        class Hasty(lifetime.GatherExecutor):
            def arrive(self, unit):
                target = self._units[unit]
                target.allocate()
                target.state = lifetime.UnitState.GATHERED  # without waiting for the gather
                target.swap_in()

        from dsx_comm.lanes import DeferringLane
        from dsx_zero import building
        from dsx_zero.gather import executor

        executor.GatherExecutor, building.make_lane = Hasty, lambda device: DeferringLane()
        try:
            _train(rank, world, "mlp", 1, steps=2)
        except AssertionError:
            return "noticed"
        return "missed"

    assert run_ranks(work, 2) == ["noticed"] * 2


def test_training_on_a_lane_that_defers_and_poisons():
    def work(rank, world):
        from dsx_comm.lanes import DeferringLane
        from dsx_zero import building

        building.make_lane = lambda device: DeferringLane()  # gathers and reductions
        for name in ("gpt", "reentrant", "reuse", "frozen", "tied"):
            _train(rank, world, name, 1)

    run_ranks(work, 2)
