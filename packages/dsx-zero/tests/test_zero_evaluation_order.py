"""Stage 3: forwards without gradients follow a frozen order of their own and prefetch, beside that of training."""

from __future__ import annotations

import contextlib
import copy

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks

SETTINGS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
BLOCKS = 4


class Exits(torch.nn.Module):
    """Blocks, of which a forward may run the first few, or any others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, path: tuple[int, ...] = tuple(range(BLOCKS))) -> torch.Tensor:
        for index in path:
            x = torch.tanh(self.blocks[index](x))
        return x


class Watch:
    """Counts words between ranks, and notes gathers and the forwards of blocks in their order."""

    def __init__(self, model: Exits) -> None:
        from dsx_zero.gather.registry import stage3_of

        self.stage = stage3_of(model)
        assert self.stage is not None
        self.words, self.events = 0, []
        order = self.stage.order
        channel, executor = order._channel, order._executor
        post, run_gather = channel.post, executor.run_gather

        def counted(words):
            self.words += 1
            return post(words)

        def noted(unit):
            self.events.append(f"gather {unit}")
            run_gather(unit)

        channel.post, executor.run_gather = counted, noted
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self.events.append(f"forward {index}"))

    def take(self) -> tuple[int, list[str]]:
        found = self.words, self.events
        self.words, self.events = 0, []
        return found


def sharded(**more: object) -> tuple[Exits, Exits, dsx_zero.ZeroOptimizer, torch.optim.Optimizer]:
    plain = Exits()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = dsx_zero.shard(
        copy.deepcopy(plain), lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config={**SETTINGS, **more}
    )
    return model, plain, optimizer, reference


def train(model, plain, optimizer, reference):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for one, step in ((model, optimizer), (plain, reference)):
        one(x).square().mean().backward()
        step.step()
        step.zero_grad()


def look(model, plain, path=tuple(range(BLOCKS)), mode=torch.no_grad):
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    with mode():
        torch.testing.assert_close(model(x, path), plain(x, path), rtol=1e-5, atol=1e-6)


def evaluate_twice(rank, world, mode):
    models = sharded()
    train(*models)
    watch = Watch(models[0])
    for batch in range(2):
        look(*models[:2], mode=mode)
        assert watch.take()[0] == BLOCKS + 1, batch  # a word per unit, and one at the end
    for _ in range(2):
        train(*models)
        watch.take()
        for _ in range(3):
            look(*models[:2], mode=mode)
            words, events = watch.take()
            assert words == 2  # where the forward begins and ends, however many units there are
            assert events.index("gather 1") < events.index("forward 0")
            assert events.index("gather 3") < events.index("forward 2")
            assert [e for e in events if e.startswith("gather")] == [f"gather {i}" for i in range(BLOCKS)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_second_evaluation_asks_for_no_unit_and_prefetches(world):
    def work(rank, world):
        evaluate_twice(rank, world, torch.no_grad)
        evaluate_twice(rank, world, torch.inference_mode)

    run_ranks(work, world)


def switch_every_step(rank, world):
    models = sharded()
    watch = Watch(models[0])
    for step in range(6):
        train(*models)
        look(*models[:2])
        words, _ = watch.take()
        if step >= 3:
            # The forward's two words, the one that training begins after it, and the step's.
            assert words <= 4, (step, words)
    order = watch.stage.order
    assert order.schedule is not None and order.evaluation_schedule is not None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_and_evaluation_take_turns(world):
    run_ranks(switch_every_step, world)


def change_the_path(rank, world):
    models = sharded()
    order = Watch(models[0]).stage.order
    for _ in range(3):
        train(*models)
        look(*models[:2])
    training = order.schedule
    assert training is not None
    for path in ((0, 2), (0, 2), (0, 2), (3, 1, 0, 2), (3, 1, 0, 2), (3, 1, 0, 2)):
        look(*models[:2], path)
    assert str(order.evaluation_schedule) == "gather(3) gather(1) gather(0) gather(2) forward_end"
    train(*models)
    assert order.schedule is training


@pytest.mark.parametrize("world", [1, 2])
def test_a_changed_path_drops_only_its_own_order(world):
    run_ranks(change_the_path, world)


PATHS = {
    "fewer batches on rank 0": lambda rank: [tuple(range(BLOCKS))] * (1 + rank),
    "fewer blocks on rank 0": lambda rank: [tuple(range(2 if rank == 0 else BLOCKS))],
    "other order on rank 0": lambda rank: [(3, 2, 1, 0) if rank == 0 else tuple(range(BLOCKS))],
    "a block twice on rank 0": lambda rank: [(0, 1, 2, 3, 0) if rank == 0 else tuple(range(BLOCKS))],
    "nothing on rank 0, in its context": lambda rank: [tuple(range(BLOCKS))] * (2 * rank),
}


def evaluate_differently(rank, world):
    models = sharded()
    order = Watch(models[0]).stage.order
    for name, paths in PATHS.items():
        for _ in range(3):
            train(*models)
            look(*models[:2])
        assert order.evaluation_schedule is not None, name
        uneven = dsx_zero.uneven_forwards(models[0]) if "context" in name else contextlib.nullcontext()
        with uneven:
            for path in paths(rank):
                look(*models[:2], path)
        if "batches" not in name:
            # What scripts do after an evaluation. No rank may wait in here for one that still wants to be served.
            total = torch.ones(())
            dsx_comm.all_reduce(total)
            assert total.item() == world
        train(*models)
        look(*models[:2])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_evaluate_differently_go_on(world):
    run_ranks(evaluate_differently, world)


def two_models(rank, world):
    pairs = [sharded(), sharded()]
    watches = [Watch(pair[0]) for pair in pairs]
    for _ in range(3):
        for models in pairs:
            train(*models)
        for _ in range(2):
            for models in pairs:
                look(*models[:2])
    look(*pairs[1][:2], (1, 0))
    assert watches[0].stage.order.evaluation_schedule is not None
    assert watches[1].stage.order.evaluation_schedule is None
    for models in pairs:
        look(*models[:2])
        train(*models)


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_have_orders_of_their_own(world):
    run_ranks(two_models, world)


def fail_in_a_forward(rank, world):
    """An error in a forward, caught by the script on all ranks, and on one."""
    models = sharded()
    for _ in range(3):
        train(*models)
        look(*models[:2])
    for failing in (range(world), [0]):
        if rank in failing:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
                models[0](torch.zeros(2, 5), (0, 1))
        else:
            look(*models[:2])
        look(*models[:2])
        train(*models)
        look(*models[:2])


@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_that_fails_is_got_over(world):
    run_ranks(fail_in_a_forward, world)


def gathered_parameters(rank, world):
    """Whole parameters for a while: nothing is gathered twice for long, and the frozen order comes back."""
    models = sharded()
    watch = Watch(models[0])
    for _ in range(3):
        train(*models)
        look(*models[:2])
    with dsx_zero.GatheredParameters(list(models[0].parameters())):
        for _ in range(3):
            look(*models[:2])
        watch.take()
        look(*models[:2])
        assert not [event for event in watch.take()[1] if event.startswith("gather")]
    for _ in range(3):
        look(*models[:2])
    assert watch.stage.order.evaluation_schedule is not None
    train(*models)


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_of_gathered_parameters(world):
    run_ranks(gathered_parameters, world)


def leave_out(rank, world):
    model, plain, optimizer, reference = sharded(stage3_prefetch_bucket_size=0)
    watch = Watch(model)
    for _ in range(3):
        train(model, plain, optimizer, reference)
        look(model, plain)
    watch.take()
    look(model, plain, (0, 2))
    gathers = [event for event in watch.take()[1] if event.startswith("gather")]
    assert gathers == (["gather 0", "gather 2"] if world == 1 else ["gather 0", "gather 1", "gather 2", "gather 3"])
    train(model, plain, optimizer, reference)


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_alone_gathers_only_what_it_uses(world):
    run_ranks(leave_out, world)
