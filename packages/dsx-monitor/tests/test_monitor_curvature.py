"""Eigenvalues of blocks against the Hessian written out in full; the noise scale against gradients of known noise."""

import logging

import pytest

torch = pytest.importorskip("torch")
from dsx_monitor import Eigenvalue, GradientNoise  # noqa: E402
from dsx_monitor.curvature import CurvatureError, double_backward  # noqa: E402
from dsx_monitor.noise import GradientSquares  # noqa: E402
from torch import nn  # noqa: E402


class Blocks(nn.Module):
    def __init__(self, count=3, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def problem(seed=0):
    torch.manual_seed(seed)
    return Blocks(), torch.randn(8, 4), torch.randn(8, 4)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def largest(model, x, y, place):
    """Eigenvalue of largest magnitude of one block's Hessian, from the whole matrix."""
    layer = model.layers[place]
    names = [f"layers.{place}.{name}" for name, _ in layer.named_parameters()]
    sizes = [p.numel() for p in layer.parameters()]

    def loss(flat):
        parts = dict(zip(names, (part.view_as(p) for part, p in zip(flat.split(sizes), layer.parameters()))))
        return ((torch.func.functional_call(model, parts, (x,)) - y) ** 2).mean()

    values = torch.linalg.eigvalsh(
        torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in layer.parameters()]))
    )
    return float(values[values.abs().argmax()])


def test_values_are_the_largest_of_each_blocks_hessian():
    model, x, y = problem()
    eigenvalue = Eigenvalue(layer_name="layers", layer_num=3, tol=1e-6, max_iter=2000)
    relative = eigenvalue.compute_from_loss(loss_of(model, x, y), model)
    exact = [largest(model, x, y, place) for place in range(3)]
    assert eigenvalue.latest == pytest.approx(exact, rel=1e-3)
    assert relative == pytest.approx([abs(v) / max(map(abs, exact)) for v in exact], rel=1e-3) and max(relative) == 1.0


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_give_the_same_and_the_loss_can_still_be_differentiated():
    model, x, y = problem(1)
    loss = loss_of(model, x, y)
    first = Eigenvalue(layer_name="layers", layer_num=2, tol=1e-5, max_iter=500)
    relative = first.compute_from_loss(loss, model)
    (loss * 1024).backward(create_graph=True)
    second = Eigenvalue(layer_name="layers", layer_num=2, tol=1e-5, max_iter=500)
    assert second.compute_eigenvalue(model, scale=1024.0) == pytest.approx(relative, rel=1e-3)
    assert second.latest == pytest.approx(first.latest, rel=1e-3), "the values are those of the loss without its scale"
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CurvatureError, match="a positive number"):
            second.compute_eigenvalue(model, scale=scale)


def test_a_block_without_curvature_counts_one():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 1)])

        def forward(self, x):
            return self.layers[0](x).sum()

    model = Linear()
    eigenvalue = Eigenvalue(layer_name="layers", layer_num=1)
    loss = model(torch.randn(2, 3)) + 0 * sum((p**2).sum() for p in model.parameters())
    assert eigenvalue.compute_from_loss(loss, model) == [1.0] and eigenvalue.latest == [0.0]


def test_curvature_keeps_its_sign():
    class Hill(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

        def forward(self):
            return (self.layers[0].weight ** 2).sum() - 3 * (self.layers[1].weight ** 2).sum()

    eigenvalue = Eigenvalue(layer_name="layers", layer_num=2)
    model = Hill()
    assert eigenvalue.compute_from_loss(model(), model) == pytest.approx([1 / 3, 1.0])
    assert eigenvalue.latest == pytest.approx([2.0, -6.0])


def test_the_mean_over_ranks_is_taken_of_the_products():
    model, x, y = problem(2)
    calls = []

    def mean(tensor):  # the other rank has the same blocks and no curvature at all
        calls.append(tensor.numel())
        tensor.mul_(0.5)

    plain, halved = (Eigenvalue(layer_name="layers", layer_num=1, tol=1e-5, max_iter=500) for _ in range(2))
    plain.compute_from_loss(loss_of(model, x, y), model)
    halved.compute_from_loss(loss_of(model, x, y), model, mean)
    assert halved.latest[0] == pytest.approx(plain.latest[0] / 2, rel=1e-3) and set(calls) == {20}


def test_attention_is_differentiated_twice_where_it_can_be():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 24)])

        def forward(self, x):
            q, k, v = self.layers[0](x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()

    model, x = Attends(), torch.randn(2, 5, 8)
    eigenvalue = Eigenvalue(layer_name="layers", layer_num=1)
    with double_backward():
        loss = model(x)
    eigenvalue.compute_from_loss(loss, model)
    assert eigenvalue.latest[0] != 0.0
    with pytest.raises(CurvatureError, match="double_backward"):
        eigenvalue.compute_from_loss(model(x), model)


def test_misuse_is_named(caplog):
    model, x, y = problem()
    with pytest.raises(CurvatureError, match="layer_name=''"):
        Eigenvalue()
    with pytest.raises(CurvatureError, match=r"no module 'encoder'.*\['layers'\]"):
        Eigenvalue(layer_name="encoder", layer_num=1).compute_from_loss(loss_of(model, x, y), model)
    with pytest.raises(CurvatureError, match="layer_num=4, but layers has 3"):
        Eigenvalue(layer_name="layers", layer_num=4).compute_from_loss(loss_of(model, x, y), model)
    loss_of(model, x, y).backward()
    with pytest.raises(CurvatureError, match="create_graph=True"):
        Eigenvalue(layer_name="layers", layer_num=1).compute_eigenvalue(model)
    with caplog.at_level(logging.INFO, "dsx_monitor"):
        Eigenvalue(verbose=True, layer_name="layers", layer_num=1).compute_from_loss(loss_of(model, x, y), model)
    assert "eigenvalue of layers.0" in caplog.text


# - Gradient noise


def test_the_noise_scale_is_that_of_gradients_of_known_noise():
    torch.manual_seed(0)
    signal, sigma, small, big = torch.full((50,), 0.3), 2.0, 4, 64
    noise = GradientNoise(small, big, memory=400)
    for _ in range(2000):
        parts = signal + sigma / small**0.5 * torch.randn(big // small, 50)
        noise.update(float((parts**2).sum(1).mean()), float((parts.mean(0) ** 2).sum()))
    exact = 50 * sigma**2 / float((signal**2).sum())
    assert noise.scale == pytest.approx(exact, rel=0.1)


def test_no_scale_without_signal_and_no_estimate_from_one_batch_size():
    noise = GradientNoise(1, 2)
    assert noise.scale is None
    noise.update(10.0, 1.0)  # more noise than two samples explain
    assert noise.scale is None
    with pytest.raises(ValueError, match="several ranks or gradient accumulation"):
        GradientNoise(8, 8)


def test_squares_are_those_of_each_backward_alone():
    model = nn.Linear(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    squares, total = GradientSquares(model.parameters()), 0.0
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(4, 3)
        model(x).square().sum().backward()  # the second adds to the first one's gradients
        alone = torch.autograd.grad(twin(x).square().sum(), list(twin.parameters()))
        total += sum(float((g**2).sum()) for g in alone)
    assert squares.take() == pytest.approx(total, rel=1e-5) and squares.take() == 0.0
    squares.remove()
    model(torch.randn(4, 3)).sum().backward()
    assert squares.take() == 0.0
