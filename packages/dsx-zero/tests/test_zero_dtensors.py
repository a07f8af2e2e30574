"""Models whose parameters are DTensors of torch's tensor parallelism, sharded over the data-parallel ranks.

The oracles are the same model in one plain process, and FSDP2 on the same mesh.
"""

import copy
import tempfile

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, LENGTH, STEPS, CLIP = 8, 12, 4, 3, 0.05
STAGES = (0, 1, 2, 3)
CONFIGS = {stage: {} for stage in STAGES} | {3: {"stage3_param_persistence_threshold": 0}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model: embedding, blocks, norm, head."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(index, step):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(WORDS, (2, LENGTH + 1), generator=generator)


def loss_of(model, index, step):
    tokens = data(index, step)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def parallelized(mesh, tied=False, frozen=()):
    """Embedding by rows, norms over parts of the sequence, linear layers by columns and rows, as torchtitan does it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = Net(tied)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan[f"blocks.{index}"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),),
                                                     use_local_output=True)  # fmt: skip
        plan[f"blocks.{index}.norm"] = SequenceParallel()
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def meshes(data_ranks, tensor_ranks):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("dp", "tp"))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


def one_process(ranks, tied=False, frozen=(), steps=STEPS):
    """Losses by step and rank, norms, parameters and first moments at the end."""
    model = Net(tied)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for step in range(steps):
        each = [loss_of(model, index, step) for index in range(ranks)]
        (sum(each) / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    moments = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters() if p.requires_grad}
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}, moments


def train(model, optimizer, index, steps=range(STEPS)):
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, index, step)
        loss.backward()
        norms.append(optimizer.step(max_norm=CLIP).grad_norm)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def sharded(rank, world, data_ranks, tied, frozen):
    import dsx_zero

    mesh, found = meshes(data_ranks, world // data_ranks), {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"], tied, frozen), adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage]
        )
        losses = train(model, optimizer, mesh["dp"].get_local_rank())
        state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        masters = {n: dsx_zero.safe_get_full_fp32_param(n, optimizer=optimizer) for n in names}
        moments = {n: dsx_zero.safe_get_full_optimizer_state(n, "exp_avg", optimizer=optimizer) for n in names}
        found[stage] = *losses, state["model"], masters, moments
        optimizer.release()
    return found


@pytest.mark.parametrize(
    ("ranks", "data_ranks", "tied", "frozen"),
    [(4, 2, False, ()), (2, 1, False, ()), (2, 2, True, ()), (4, 2, True, ("blocks.0.up.weight", "norm.weight"))],
    ids=["2x2", "1x2", "2x1-tied", "2x2-tied-frozen"],
)
def test_a_tensor_parallel_model_trains_with_the_numbers_of_one_process(ranks, data_ranks, tied, frozen):
    losses, norms, values, moments = one_process(data_ranks, tied, frozen)
    for rank, found in enumerate(run_ranks(sharded, ranks, data_ranks, tied, frozen, timeout=180)):
        index = rank // (ranks // data_ranks)
        for stage, (got_losses, got_norms, model, masters, got_moments) in found.items():
            expected = [each[index] for each in losses]
            torch.testing.assert_close(got_losses, expected, rtol=0, atol=1e-6, msg=f"stage {stage}: losses")
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=1e-6, msg=f"stage {stage}: norms")
            for name, value in values.items():
                torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5, msg=f"stage {stage}: {name}")
            assert masters.keys() == moments.keys()
            for name in masters:
                torch.testing.assert_close(masters[name], values[name], rtol=0, atol=1e-5)
                torch.testing.assert_close(got_moments[name], moments[name], rtol=0, atol=1e-6)


# The same mesh under FSDP2 --------------------------------------------------------------------------------------------


def by_fsdp2(mesh):
    from torch.distributed.fsdp import fully_shard

    model = parallelized(mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, adamw(model.parameters())


def both(rank, world):
    """Losses without clipping, bit for bit, and the norms of the first gradients."""
    import dsx_zero

    mesh, found = meshes(2, 2), {}
    index = mesh["dp"].get_local_rank()
    model, optimizer = by_fsdp2(mesh)
    losses, first = [], None
    for step in range(STEPS):
        loss = loss_of(model, index, step)
        loss.backward()
        if first is None:
            first = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"]), adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage]
        )
        found[stage] = []
        for step in range(STEPS):
            loss = loss_of(model, index, step)
            loss.backward()
            outcome = optimizer.step()
            optimizer.zero_grad()
            found[stage].append((loss.item(), outcome.grad_norm))
        optimizer.release()
    return losses, first, found


def test_losses_are_those_of_fsdp2_on_the_same_mesh_bit_for_bit():
    for losses, norm, found in run_ranks(both, 4, timeout=180):
        for stage, steps in found.items():
            assert [loss for loss, _ in steps] == losses, f"stage {stage}"
            assert steps[0][1] == pytest.approx(norm, rel=1e-6), f"stage {stage}"


def shared(found):
    import torch.distributed as dist

    dist.broadcast_object_list(found)
    return found[0]


def through_folders(rank, world):
    """Saved by FSDP2 and loaded by each stage, and the other way round; three more steps each."""
    import dsx_zero
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = meshes(2, 2)
    index, found = mesh["dp"].get_local_rank(), {}

    def steps(model, optimizer):
        losses = []
        for step in range(5, 8):
            loss = loss_of(model, index, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(model, optimizer):
        path = shared([tempfile.mkdtemp()])
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
        return path

    def load(model, optimizer, path):
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    model, optimizer = by_fsdp2(mesh)
    steps(model, optimizer)
    path = save(model, optimizer)
    expected = steps(model, optimizer)
    for stage in STAGES:
        fresh = parallelized(mesh["tp"])
        with torch.no_grad():
            for p in fresh.parameters():
                p.mul_(0.5)
        model, optimizer = dsx_zero.shard(fresh, adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage])
        load(model, optimizer, path)
        here = save(model, optimizer)
        losses = steps(model, optimizer)
        optimizer.release()
        other = by_fsdp2(mesh)
        load(*other, here)
        found[stage] = losses, steps(*other)
    return expected, found


def test_folders_of_torchs_checkpoints_go_both_ways_with_fsdp2():
    for expected, found in run_ranks(through_folders, 4, timeout=240):
        for stage, (loaded, back) in found.items():
            torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-6, msg=f"stage {stage}: from FSDP2")
            torch.testing.assert_close(back, expected, rtol=0, atol=1e-6, msg=f"stage {stage}: back to FSDP2")


# State dicts ----------------------------------------------------------------------------------------------------------


def dicts(rank, world):
    """`model.state_dict()`, torch's functions and `load_state_dict` at each stage."""
    import dsx_zero
    from torch.distributed.checkpoint import state_dict as by_torch
    from torch.distributed.tensor import DTensor

    mesh, found = meshes(2, 1 if world == 2 else 2), {}
    whole_options = by_torch.StateDictOptions(full_state_dict=True)
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"]), adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage]
        )
        train(model, optimizer, mesh["dp"].get_local_rank())
        weights = by_torch.get_model_state_dict(model, options=whole_options)
        states = by_torch.get_optimizer_state_dict(model, optimizer, options=whole_options)
        kept = copy.deepcopy((weights, states))
        kept = shared([kept])  # with `full_state_dict` torch gives them to rank 0 alone where it moves them to the host
        plain = {name: value for name, value in model.state_dict().items()}
        if stage < 3:
            assert all(isinstance(value, DTensor) for value in plain.values()), [type(v) for v in plain.values()]
        train(model, optimizer, 0, range(9, 11))
        model.load_state_dict({name: value for name, value in kept[0].items()})
        by_torch.set_optimizer_state_dict(model, optimizer, copy.deepcopy(kept[1]), options=whole_options)
        losses, _ = train(model, optimizer, mesh["dp"].get_local_rank(), range(5, 7))
        once = losses
        by_torch.set_model_state_dict(model, kept[0], options=whole_options)
        by_torch.set_optimizer_state_dict(model, optimizer, copy.deepcopy(kept[1]), options=whole_options)
        twice, _ = train(model, optimizer, mesh["dp"].get_local_rank(), range(5, 7))
        found[stage] = kept, once, twice
        optimizer.release()
    return found


def test_state_dicts_have_global_tensors():
    _, _, values, moments = one_process(2)
    for found in run_ranks(dicts, 4, timeout=240):
        for stage, ((weights, states), once, twice) in found.items():
            for name, value in values.items():
                what = f"stage {stage}: {name}"
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=what)
                torch.testing.assert_close(states["state"][name]["exp_avg"], moments[name], rtol=0, atol=1e-6, msg=what)
            torch.testing.assert_close(once, twice, rtol=0, atol=1e-7)


# Uses of single parameters, and what is refused -----------------------------------------------------------------------


class Crossing(Net):
    """Uses weights outside of the modules that hold them: a tied head by hand, and a penalty on a norm's weight."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return F.linear(self.norm(x), self.embed.weight) + self.head.weight.sum() * 0.1


def crossing(rank, world):
    import dsx_zero
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, found = meshes(1, 2), {}
    for stage in STAGES:
        model = Crossing()
        plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
                "head": ColwiseParallel(use_local_output=False)}  # fmt: skip
        for index in range(2):
            plan |= {f"blocks.{index}.up": ColwiseParallel(), f"blocks.{index}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)

        def as_dtensor(module, args, output):
            return DTensor.from_local(output, mesh["tp"], [Replicate()])

        model.norm.register_forward_hook(as_dtensor)
        model.register_forward_hook(lambda module, args, output: output.full_tensor())
        for settings in ({}, {"stage3_param_persistence_threshold": 0})[: 2 if stage == 3 else 1]:
            shown = copy.deepcopy(model) if stage < 3 else model
            shown, optimizer = dsx_zero.shard(shown, adamw, stage=stage, mesh=mesh["dp"], config=settings)
            found[stage, len(settings)] = train(shown, optimizer, 0)
            model = shown
            optimizer.release()
            if stage == 3:
                break
    return found


def test_weights_are_dtensors_in_every_forward_that_uses_them():
    torch.manual_seed(7)
    model = Crossing()
    expected, norms = train_plain(model)
    for found in run_ranks(crossing, 2, timeout=180):
        for case, (losses, got) in found.items():
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6, msg=str(case))
            torch.testing.assert_close(got, norms, rtol=1e-5, atol=1e-6, msg=str(case))


def train_plain(model):
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, 0, step)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def placed(mesh, placement, shape=(4, 4)):
    """A linear layer whose weight is a DTensor placed so."""
    from torch.distributed.tensor import DTensor

    model = nn.Linear(shape[1], shape[0], bias=False)
    local = torch.zeros(shape)
    if placement.is_shard():
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    strides = local.new_empty(shape).stride()
    model.weight = nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides)
    )
    return model


def refusals(rank, world):
    import dsx_zero
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    found = {}
    mesh = meshes(1, 2)
    flat = meshes(2, 1)

    def attempt(case, model, **given):
        before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
        hooks = [len(m._forward_pre_hooks) for m in model.modules()]
        try:
            dsx_zero.shard(model, given.pop("make", adamw), stage=given.pop("stage", 3), **given)
            found[case] = "nothing was raised"
        except dsx_zero.ZeroError as error:
            same = before == {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
            same = same and hooks == [len(m._forward_pre_hooks) for m in model.modules()]
            found[case] = str(error) if same else f"the model was changed: {error}"

    tp = mesh["tp"]
    attempt("no mesh", placed(tp, Shard(0)))
    attempt("mesh of the DTensors", placed(tp, Shard(0)), mesh=tp)
    attempt("Partial", placed(tp, Partial()), mesh=mesh["dp"])
    attempt("strided", placed(tp, _StridedShard(0, split_factor=1)), mesh=mesh["dp"])
    attempt("uneven", placed(tp, Shard(0), (5, 4)), mesh=mesh["dp"])
    two = nn.Linear(4, 4, bias=False)
    two.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Shard(0)]))
    attempt("two dimensions", two, mesh=mesh["dp"])
    others = nn.Sequential(placed(tp, Shard(0)), placed(flat["tp"], Replicate()))
    attempt("two meshes", others, mesh=mesh["dp"])
    attempt("ranks_of", placed(tp, Shard(0)), mesh=mesh["dp"], ranks_of=lambda info: None)
    attempt("the optimizer is refused", placed(tp, Shard(0)), mesh=mesh["dp"],
            make=lambda parameters: torch.optim.LBFGS(parameters))  # fmt: skip
    found["the whole mesh"] = "as mesh['dp']"
    dsx_zero.shard(placed(tp, Shard(0)), adamw, stage=3, mesh=mesh)[1].release()
    return found


def test_what_cannot_be_sharded_is_named_and_left_as_it_was():
    expected = {
        "no mesh": "shard(..., mesh=mesh['dp'])",
        "mesh of the DTensors": "only ranks with equal parts can share one",
        "Partial": "Redistribute it before",
        "strided": "expected Shard or Replicate",
        "uneven": "expected a multiple of 2",
        "two dimensions": "mesh=mesh['dp'] of shard, in the place of fully_shard",
        "two meshes": "expected one mesh of one dimension for all of them",
        "ranks_of": "leave out ranks_of=",
        "the optimizer is refused": "LBFGS",
        "the whole mesh": "as mesh['dp']",
    }
    for found in run_ranks(refusals, 2, timeout=120):
        assert found.keys() == expected.keys()
        for case, text in expected.items():
            assert text in found[case] and "was changed" not in found[case], f"{case}: {found[case]}"


def later(rank, world):
    """What a user does after `shard`: copies, freezing and unfreezing, a copy of the model, offload, sharding again."""
    import dsx_zero

    mesh = meshes(1, 2)
    found = {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"], frozen=("head.weight",)),
            adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage],
        )  # fmt: skip
        average = optimizer.copy_of()
        train(model, optimizer, 0)
        average.update(0.5)
        kept = {name: view.full_tensor() for name, view in average.state_dict().items() if hasattr(view, "full_tensor")}
        with torch.no_grad(), average.applied():
            inside = loss_of(model, 0, 50).item()
        outside = loss_of(model, 0, 50).item()
        deep = None
        if stage < 3:
            deep = loss_of(copy.deepcopy(model), 0, 50).item()
        model, optimizer = dsx_zero.shard(model, adamw, stage=3 - stage, mesh=mesh["dp"], config=CONFIGS[3 - stage])
        again = loss_of(model, 0, 50).item()
        optimizer.release()
        found[stage] = kept, inside, outside, deep, again
    return found


def test_copies_and_sharding_again():
    model = Net()
    model.head.weight.requires_grad_(False)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_plain(model)
    outside = loss_of(model, 0, 50).item()
    ema = {name: torch.lerp(start[name], p.detach(), 0.5) for name, p in model.named_parameters()}
    model.load_state_dict(ema)
    inside = loss_of(model, 0, 50).item()
    for found in run_ranks(later, 2, timeout=180):
        for stage, (kept, *losses) in found.items():
            for name, value in kept.items():
                torch.testing.assert_close(value, ema[name], rtol=0, atol=1e-5, msg=f"stage {stage}: {name}")
            assert kept or stage < 3
            expected = [inside, outside, outside if stage < 3 else None, outside]
            for got, wanted in zip(losses, expected):
                assert got is wanted is None or got == pytest.approx(wanted, abs=1e-5), f"stage {stage}: {losses}"


def clipped_by_hand(rank, world):
    import dsx_zero

    mesh, found = meshes(1, 2), {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"]), adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage]
        )
        loss_of(model, 0, 0).backward()
        try:
            found[stage] = f"the norm {torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)}"
        except dsx_zero.ZeroError as error:
            found[stage] = str(error)
        optimizer.release()
    return found


def test_no_rank_clips_by_the_norm_of_its_own_parts():
    for found in run_ranks(clipped_by_hand, 2, timeout=120):
        for stage, text in found.items():
            assert "Clip with optimizer.step(max_norm=...)" in text, f"stage {stage}: {text}"
