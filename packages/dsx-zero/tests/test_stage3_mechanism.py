"""The mechanism of stage 3 in one process: memory taken away after forward and given back before backward changes no
gradient.

The shards are whole (one rank), the gather is a copy on a lane that defers it and poisons what is freed: whatever reads
too early or too late gets NaN. The oracle is the same model without any of it, bit for bit.
"""

import copy

import pytest
import torch
from dsx_comm import RankSet
from dsx_comm.lanes import DeferringLane
from dsx_testkit import assert_close_named, tiny
from dsx_zero.gather.executor import GatherExecutor
from dsx_zero.gather.hooks import UnitHooks
from dsx_zero.gather.lifetime import GatherLifetime
from dsx_zero.order.backward import BackwardClock
from dsx_zero.order.executor import CollectiveExecutor
from dsx_zero.order.protocol import NullOrder
from dsx_zero.params.partitioned import PartitionedParameter, PartitionedParameterError
from dsx_zero.params.partitioned_unit import PartitionedUnit, UnitState
from dsx_zero.plan.units import find_parameters, plan_units
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Sharded:
    """A model as stage 3 gathers and frees it, on one rank; plain gradients."""

    def __init__(self, model: nn.Module, bucket_size: int = 1 << 20):
        self.model = model
        infos = find_parameters(model)
        self.units = [
            PartitionedUnit(plan)
            for plan in plan_units(model, infos, stage=3, ranks_of=lambda _: RankSet(), bucket_size=bucket_size)
        ]
        for unit in self.units:
            unit.adopt(model, {info.name: info for info in infos})
        self.gathers = 0
        gathers = GatherExecutor(self.units, transport=self, lane=DeferringLane())
        order = NullOrder(CollectiveExecutor(lambda unit: None, gathers))
        self.lifetime = GatherLifetime(self.units, executor=gathers, order=order, clock=BackwardClock(order))
        self.hooks = UnitHooks(model, self.units, self.lifetime)

    def start(self, out, source, group, label):
        self.gathers += 1
        out.copy_(source)

    def plain(self):
        return {
            name: parameter
            for unit in self.units
            for group in unit.groups
            for name, parameter in zip(group.layout.names, group.parameters)
        }

    def gradients(self):
        return {name: p.grad for name, p in self.plain().items() if p.grad is not None}

    def assert_freed(self):
        for unit in self.units:
            assert unit.state is UnitState.PARTITIONED
            assert not any(store.allocated for store in unit.storages if store.numel)
        assert all(isinstance(p, PartitionedParameter) for p in self.model.parameters())


def check(model, run, prepare=None, **sharding):
    """``run(model)`` returns a loss; gradients with and without the mechanism are the same bits."""
    oracle = copy.deepcopy(model)
    if prepare:
        prepare(oracle), prepare(model)
    for _ in range(2):
        run(oracle).backward()
    want = {n.replace("_orig_mod.", ""): p.grad for n, p in oracle.named_parameters() if p.grad is not None}
    sharded = Sharded(model, **sharding)
    sharded.assert_freed()
    for _ in range(2):
        run(model).backward()
        sharded.assert_freed()
    got = {n.replace("_orig_mod.", ""): g for n, g in sharded.gradients().items()}
    assert_close_named(got, want)
    return sharded


class Blocks(nn.Module):
    """Blocks in a ModuleList, called through ``call(block, x)``."""

    def __init__(self, make, depth=3, width=6, call=None):
        super().__init__()
        torch.manual_seed(3)
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(make(width) for _ in range(depth))
        self.out = nn.Linear(width, width)
        self.call = call or (lambda block, x: block(x))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.out(x)


class MLPBlock(nn.Module):
    def __init__(self, width, inner=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner = inner

    def _inside(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = self.norm(x)
        if self.inner is None:
            return self._inside(x)
        return checkpoint(self._inside, x, use_reentrant=self.inner)


X = torch.linspace(-1, 1, 24).view(4, 6)


def loss(model):
    return model(X).square().mean()


MODELS = {
    "mlp": lambda: tiny.MLP(width=6),
    "tied": tiny.Tied,
    "tied_across_blocks": lambda: _tie_blocks(),
    "reused": tiny.Reused,
    "frozen": tiny.Frozen,
    "checkpointed_reentrant": lambda: tiny.Checkpointed(reentrant=True),
    "checkpointed": lambda: tiny.Checkpointed(reentrant=False),
}


def _tie_blocks():
    model = Blocks(MLPBlock)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model(name):
    check(MODELS[name](), loss)


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
def test_checkpoints_around_and_inside_a_unit(inner, outer):
    call = None if outer is None else lambda block, x: checkpoint(block, x, use_reentrant=outer)
    check(Blocks(lambda width: MLPBlock(width, inner), call=call), loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_segment_of_several_units(reentrant):
    class Segmented(Blocks):
        def forward(self, x):
            def segment(y):
                for block in self.blocks:
                    y = y + block(y)
                return y

            return self.out(checkpoint(segment, self.inp(x), use_reentrant=reentrant))

    check(Segmented(MLPBlock), loss)


def test_units_used_again_in_any_order():
    class Again(Blocks):
        def forward(self, x):
            x = self.inp(x)
            for i in (0, 1, 0, 2, 2, 1):
                x = self.blocks[i](x)
            return self.out(x)

    check(Again(MLPBlock), loss)


def test_a_unit_with_one_frozen_matrix_before_a_trainable_one_keeps_it_to_the_end():
    class Lora(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.frozen, self.low = nn.Linear(width, width), nn.Linear(width, width)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.low(torch.tanh(self.frozen(x)))

    check(Blocks(Lora), loss)


@pytest.mark.parametrize("how", ["child", "in_place"])
def test_compiled_blocks(how):
    torch._dynamo.reset()

    def compiled(model):
        for i, block in enumerate(model.blocks):
            if how == "child":
                model.blocks[i] = torch.compile(block, backend="aot_eager")
            else:
                block.compile(backend="aot_eager")

    check(Blocks(MLPBlock), loss, prepare=compiled)


def test_compiled_block_under_a_checkpoint():
    torch._dynamo.reset()

    def compiled(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="aot_eager")

    model = Blocks(MLPBlock, call=lambda block, x: checkpoint(block, x, use_reentrant=False))
    check(model, loss, prepare=compiled)


def test_autocast():
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model).float()

    check(Blocks(MLPBlock), run)


def test_two_losses_and_a_retained_graph():
    model = Blocks(MLPBlock)
    oracle = copy.deepcopy(model)
    sharded = Sharded(model)
    for net in (oracle, model):
        out = net(X)
        out.square().mean().backward(retain_graph=True)
        (out.sum() + net(X).abs().mean()).backward()
    sharded.assert_freed()
    assert_close_named(sharded.gradients(), {n: p.grad for n, p in oracle.named_parameters()})


def test_evaluation_without_gradients_frees_after_each_unit():
    model = Blocks(MLPBlock)
    oracle = copy.deepcopy(model).eval()
    sharded = Sharded(model.eval())
    alive = []
    handles = [
        m.register_forward_hook(lambda *_: alive.append(sum(u.state is UnitState.GATHERED for u in sharded.units)))
        for m in model.blocks
    ]
    with torch.no_grad():
        assert torch.equal(model(X), oracle(X))
    assert alive == [1, 1, 1]  # the root; the block has just been freed
    sharded.assert_freed()
    for handle in handles:
        handle.remove()


def test_a_stale_graph_raises_after_the_parameters_changed():
    model = Blocks(MLPBlock)
    sharded = Sharded(model)
    out = loss(model)
    sharded.lifetime.parameters_changed()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_failed_forward_leaves_nothing_behind():
    class Fails(Blocks):
        fail = True

        def forward(self, x):
            x = self.blocks[0](self.inp(x))
            if self.fail:
                raise ValueError("broken batch")
            return self.out(x)

    model = Fails(MLPBlock)
    sharded = Sharded(model)
    with pytest.raises(ValueError, match="broken batch"):
        model(X)
    sharded.assert_freed()
    model.fail = False
    loss(model).backward()
    sharded.assert_freed()
    assert torch.isfinite(model_gradient_sum(sharded))


def model_gradient_sum(sharded):
    return sum(g.sum() for g in sharded.gradients().values())


def test_reading_outside_a_use_names_the_parameter():
    model = Blocks(MLPBlock)
    Sharded(model)
    with pytest.raises(PartitionedParameterError, match=r"blocks\.1\.up\.weight.*full_tensor"):
        model.blocks[1].up.weight.sum()


def test_a_weight_read_from_another_module_is_gathered_for_it():
    class Borrows(Blocks):
        def forward(self, x):
            x = self.blocks[0](self.inp(x))
            return self.out(F.linear(x, self.blocks[1].up.weight)[:, :6])

    check(Borrows(MLPBlock), loss)


def test_a_loss_left_on_a_module_leads_into_its_backward():
    class Gated(MLPBlock):
        def forward(self, x):
            self.losses = [self.up(x).square().mean()]
            return super().forward(x)

    def run(model):
        model(X)
        return sum(block.losses[0] for block in model.blocks)

    check(Blocks(Gated), run)


def test_a_model_without_blocks_is_gathered_in_buckets_of_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 6)))
    sharded = check(model, loss, bucket_size=80)
    assert [unit.plan.users for unit in sharded.units] == [("0",), ("2",), ("3", "4.0")]


def test_live_memory_is_bounded_by_the_root_and_two_units():
    model = Blocks(MLPBlock, depth=6)
    sharded = Sharded(model)
    peak = 0

    def watch(*_):
        nonlocal peak
        peak = max(peak, sum(u.numel for u in sharded.units if any(s.allocated for s in u.storages)))

    for module in model.modules():
        module.register_forward_hook(watch)
    for parameter in sharded.plain().values():
        parameter.register_post_accumulate_grad_hook(watch)
    loss(model).backward()
    root = next(u.numel for u in sharded.units if not u.plan.module)
    block = max(u.numel for u in sharded.units if u.plan.module)
    assert 0 < peak <= root + 2 * block
    assert sharded.gathers == 2 * 6 + 2


def test_blocks_that_return_objects():
    """Key-value caches and the like: whatever an output is wrapped in leads back into its block."""

    class Cache:
        def __init__(self, hidden):
            self.layers, self.again = [{"hidden": hidden}], self

    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return Cache(torch.tanh(self.layer(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Wrapping() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x).layers[0]["hidden"]
            return x

    torch.manual_seed(0)
    plain = Net()
    sharded = Sharded(copy.deepcopy(plain))
    x = torch.randn(2, 6)
    plain(x).square().sum().backward()
    sharded.model(x).square().sum().backward()
    assert_close_named(sharded.gradients(), {n: p.grad for n, p in plain.named_parameters()})
    sharded.assert_freed()
