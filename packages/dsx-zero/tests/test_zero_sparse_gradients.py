"""`sparse_gradients`: embeddings with `sparse=True` at stage 0 train as in plain PyTorch on the whole batch, and of
their gradients only rows travel.
"""

import copy

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks
from torch import nn

ROWS = 50


class Factors(nn.Module):
    """Nothing but sparse embeddings, one of them a bag."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.Embedding(ROWS, 4, sparse=True)
        self.items = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum")
        self.idle = nn.Embedding(3, 4, sparse=True)

    def forward(self, users, items, rates):
        return ((self.users(users) * self.items(items)).sum(-1) - rates).square().mean()


class Mixed(nn.Module):
    """A sparse embedding in front of a dense layer."""

    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(ROWS, 4, sparse=sparse, padding_idx=1), nn.Linear(4, 2)

    def forward(self, users, items, rates):
        return (self.head(self.words(items).mean(1)).sum(-1) - rates).square().mean()


def batch(step, world, rows=2):
    """Ranks take turns: row r is rank r % world's. The bag of the last rank is always one row, and ties are many."""
    generator = torch.Generator().manual_seed(step)
    count = rows * world
    users = torch.randint(0, 8, (count,), generator=generator)
    items = torch.randint(0, ROWS, (count, 3), generator=generator)
    return users, items, torch.randn(count, generator=generator)


def part(found, rank, world):
    return [tensor[rank::world] for tensor in found]


def reference(kind, optimizer, world, steps, accumulate, max_norm):
    model = kind()
    plain = optimizer(model.parameters())
    norms = []
    for step in range(steps):
        for micro in range(accumulate):
            (model(*batch(10 * step + micro, world)) / accumulate).backward()
        dense = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat([g.reshape(-1) for g in dense]).norm().item())
        factor = min(1.0, max_norm / (norms[-1] + 1e-6)) if max_norm else 1.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        plain.step()
        plain.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
}


def trains(rank, world):
    for name, kind in OPTIMIZERS.items():
        for model_class in (Factors, Mixed):
            if name == "SparseAdam" and model_class is Mixed:
                continue
            for accumulate, max_norm, late in ((1, None, False), (2, 0.1, False), (2, 0.1, True)):
                want, norms = reference(model_class, kind, world, 4, accumulate, max_norm)
                model, optimizer = dsx_zero.shard(model_class(), kind, stage=0, sparse_gradients=True)
                for step in range(4):
                    for micro in range(accumulate):
                        mine = part(batch(10 * step + micro, world), rank, world)
                        if late or micro + 1 == accumulate:
                            (model(*mine) / accumulate).backward()
                        else:
                            with optimizer.no_sync():
                                (model(*mine) / accumulate).backward()
                    outcome = optimizer.step(max_norm=max_norm)
                    if max_norm:
                        assert outcome.grad_norm == pytest.approx(norms[step], rel=1e-4)
                    optimizer.zero_grad()
                found = {n: p.detach() for n, p in model.named_parameters()}
                assert_close_named(found, want, rtol=1e-4, atol=1e-6)
                optimizer.release()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_is_that_of_plain_pytorch(world):
    run_ranks(trains, world, timeout=150)


def momentum(rank, world):
    """Optimizers of dense gradients get dense ones: the values are those of a dense embedding."""

    def train(sparse, kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(ROWS, 4, sparse=sparse), nn.Linear(4, 1))
        model, optimizer = dsx_zero.shard(model, kind, stage=0, sparse_gradients=sparse)
        for step in range(4):
            users, _, rates = part(batch(step, world), rank, world)
            (model(users)[:, 0] - rates).square().mean().backward()
            optimizer.step(max_norm=0.5)
            optimizer.zero_grad()
        return {n: p.detach() for n, p in model.named_parameters()}

    for kind in (
        lambda p: torch.optim.AdamW(p, lr=0.05),
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    ):
        assert_close_named(train(True, kind), train(False, kind), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_of_dense_gradients_get_dense_ones(world):
    run_ranks(momentum, world)


def travels(rank, world):
    """Bytes of indices and values of the rows that ranks touch; a dense reduction would send the whole table."""
    table = nn.Embedding(10_000, 8, sparse=True)
    model, optimizer = dsx_zero.shard(table, lambda p: torch.optim.SGD(p, lr=0.1), stage=0, sparse_gradients=True)
    for _ in range(2):
        with dsx_comm.count_traffic() as traffic:
            model(torch.arange(5 if rank else 3) + rank).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    sent = traffic.by_op()
    assert sent["sparse_allreduce"][1] == (world - 1) * (5 * (4 + 8 * 4) + 16)
    assert "all_reduce" not in sent or sent["all_reduce"][1] < 100
    assert sum(tensor.nbytes for tensor in optimizer.runtime.gradients.reductions.tensors()) == 0
    assert optimizer.state_bytes()["grads"] == 0


def test_only_rows_travel():
    run_ranks(travels, 2)


def edits(rank, world):
    model, optimizer = dsx_zero.shard(Mixed(), lambda p: torch.optim.SGD(p, lr=0.5), stage=0, sparse_gradients=True)
    plain = Mixed()
    mine = part(batch(0, world), rank, world)
    model(*mine).backward()
    plain(*batch(0, world)).backward()
    words = model.words.weight
    assert words.grad.is_sparse
    torch.testing.assert_close(words.grad.to_dense(), plain.words.weight.grad.to_dense())
    torch.testing.assert_close(dsx_zero.safe_get_full_grad(words), plain.words.weight.grad.to_dense())
    words.grad.mul_(0.5)  # the user's own scaling
    plain.words.weight.grad.mul_(0.5)
    before = words.detach().clone()
    optimizer.step()
    torch.testing.assert_close(words, before - 0.5 * plain.words.weight.grad.to_dense())
    model.zero_grad()  # the user's way
    assert words.grad is None
    with optimizer.no_sync():
        model(*mine).backward()  # this rank's own sum
    assert words.grad.is_sparse
    model.zero_grad()
    model(*mine).backward()
    dsx_zero.safe_set_full_grad(words, torch.ones(ROWS, 4))
    before = words.detach().clone()
    optimizer.step()
    torch.testing.assert_close(words, before - 0.5)
    optimizer.zero_grad()
    words.grad = torch.ones(ROWS, 4).to_sparse(1) * (rank + 1)  # this rank's own gradient, to be averaged
    before = words.detach().clone()
    optimizer.step()
    torch.testing.assert_close(words, before - 0.5 * sum(range(1, world + 1)) / world)


@pytest.mark.parametrize("world", [1, 2])
def test_what_users_do_to_grad_counts(world):
    run_ranks(edits, world)


class ByMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True)

    def loss(self, x):
        return self.table(x).square().sum()


def without_forward(rank, world):
    """A backward that dsx learns of from its first gradient: autograd has added to what `.grad` showed by then."""
    torch.manual_seed(0)
    model = ByMethod()
    plain = ByMethod()
    plain.load_state_dict(model.state_dict())
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=0, sparse_gradients=True)
    for step in range(3):
        model.loss(torch.arange(4) + rank + step).backward()
        for other in range(world):
            (plain.loss(torch.arange(4) + other + step) / world).backward()
    optimizer.step()
    for parameter in plain.parameters():
        parameter.data -= 0.1 * parameter.grad.to_dense()
    torch.testing.assert_close(model.table.weight, plain.table.weight)


@pytest.mark.parametrize("world", [1, 2])
def test_backwards_without_a_forward_of_the_model_accumulate(world):
    run_ranks(without_forward, world)


def in_16_bits(rank, world):
    """bf16 parameters and messages, fp32 accumulation and masters: as with a dense embedding."""
    found = {}
    for sparse in (False, True):
        model, optimizer = dsx_zero.shard(
            Mixed(sparse).bfloat16(),
            lambda p: torch.optim.SGD(p, lr=0.1),
            stage=0,
            sparse_gradients=sparse,
            precision=dsx_zero.Precision(gradients=torch.float32, communication=torch.bfloat16),
        )
        for step in range(3):
            users, items, rates = part(batch(step, world), rank, world)
            model(users, items, rates.bfloat16()).backward()
            assert model.words.weight.grad.dtype == torch.bfloat16
            optimizer.step()
            optimizer.zero_grad()
        found[sparse] = {n: dsx_zero.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    assert found[True]["words.weight"].dtype == torch.float32
    assert_close_named(found[True], found[False], rtol=0.02, atol=1e-3)


def test_16_bit_parameters():
    run_ranks(in_16_bits, 2)


def resumed(rank, world):
    """States of an optimizer of sparse gradients are saved and loaded."""

    def make():
        return dsx_zero.shard(Factors(), OPTIMIZERS["SparseAdam"], stage=0, sparse_gradients=True)

    def step(model, optimizer, number):
        model(*part(batch(number, world), rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer, 0)
    state = optimizer.state_dict()
    other, resumed_optimizer = make()
    resumed_optimizer.load_state_dict(state)
    for number in (1, 2):
        step(model, optimizer, number)
        step(other, resumed_optimizer, number)
    assert_close_named(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def test_states_resume():
    run_ranks(resumed, 2)


def refused(rank, world):
    for stage in (1, 2, 3):
        with pytest.raises(dsx_zero.ZeroConfigError, match=r"sparse_gradients.*Use stage 0"):
            dsx_zero.shard(Factors(), OPTIMIZERS["SGD"], stage=stage, sparse_gradients=True)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"head\.weight.*SparseAdam takes sparse"):
        dsx_zero.shard(Mixed(), OPTIMIZERS["SparseAdam"], stage=0, sparse_gradients=True)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"users\.weight.*sparse_gradients"):
        dsx_zero.shard(Factors(), OPTIMIZERS["SparseAdam"], stage=0)
    with pytest.raises(dsx_zero.ZeroConfigError, match="expected True or False"):
        dsx_zero.shard(Factors(), OPTIMIZERS["SGD"], stage=0, sparse_gradients="yes")


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_work_is_refused(world):
    run_ranks(refused, world)


def test_a_tied_weight_is_dense(caplog):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.words(x)).square().mean()

    model, optimizer = dsx_zero.shard(Tied(), OPTIMIZERS["SGD"], stage=0, sparse_gradients=True)
    assert "has no effect" in caplog.text
    model(torch.tensor([1, 2])).backward()
    assert not model.words.weight.grad.is_sparse
    optimizer.step()


def test_a_functional_use_beside_the_embedding_counts_whole():
    torch.manual_seed(0)
    model = ByMethod()
    model.forward = lambda x: model.loss(x) + model.table.weight.square().sum()
    model, optimizer = dsx_zero.shard(model, OPTIMIZERS["SGD"], stage=0, sparse_gradients=True)
    before = model.table.weight.detach().clone()
    model(torch.tensor([3])).backward()
    optimizer.step()
    want = before - 0.5 * 2 * before
    want[3] -= 0.5 * 2 * before[3]
    torch.testing.assert_close(model.table.weight.detach(), want)


def grows(rank, world):
    """A group that is added after a step, beside an embedding whose gradients are rows."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    first = [*model[0].parameters(), *model[1].parameters()]
    late = list(model[2].parameters())
    for parameter in (*plain[2].parameters(), *late):
        parameter.requires_grad_(False)
    model, optimizer = dsx_zero.shard(model, torch.optim.SGD(first, lr=0.1), stage=0, sparse_gradients=True)
    reference = torch.optim.SGD([*plain[0].parameters(), *plain[1].parameters()], lr=0.1)
    for step in range(4):
        if step == 2:
            for module, chosen in ((model, optimizer), (plain, reference)):
                added = list(module[2].parameters())
                for parameter in added:
                    parameter.requires_grad_(True)
                chosen.add_param_group({"params": added, "lr": 0.2})
        words = (torch.arange(6) * 5 + step) % 11
        plain(words).square().mean().backward()
        model(words).square().mean().backward()
        for chosen in (optimizer, reference):
            chosen.step()
            chosen.zero_grad()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach())


@pytest.mark.parametrize("world", [1, 2])
def test_groups_are_added_beside_rows(world):
    run_ranks(grows, world)
