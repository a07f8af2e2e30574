"""Operators beside the common layers: counted by closed forms, forward and backward, or named where they are not."""

import logging
from math import log2

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from dsx_monitor import FlopsProfiler, get_model_profile  # noqa: E402
from dsx_monitor.flops import RunFacts  # noqa: E402
from torch import nn  # noqa: E402


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def profile(model, *args, backward=False):
    model = model if isinstance(model, nn.Module) else Call(model)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    result = model(*args)
    if backward:
        result.sum().backward()
    profiler.stop_profile()
    return profiler


def test_a_bilinear_layer_counts_its_products_forward_and_backward():
    batch, left, right, outputs = 3, 4, 5, 6
    layer = nn.Bilinear(left, right, outputs)
    x1, x2 = torch.randn(batch, left), torch.randn(batch, right)
    through, last = batch * outputs * left * right, batch * outputs * right
    found = profile(layer, x1, x2, backward=True)
    assert found.get_total_macs() == through + last and not found.get_unknown_operators()
    assert found.get_total_flops() == 2 * (through + last) + batch * outputs  # and the bias
    # By the weight alone: x1 with the gradient, that with x2.
    assert found.totals.backward_macs == batch * outputs * left + through
    found = profile(layer, x1.requires_grad_(), x2.requires_grad_(), backward=True)
    assert found.totals.backward_macs > 3 * through and not found.get_unknown_operators()
    with torch.inference_mode():
        assert profile(layer, x1, x2).get_total_macs() == through + last


@pytest.mark.parametrize("rows", [10, 40])  # from 26 on torch uses a matrix product
@pytest.mark.parametrize("inference", [False, True])
def test_distances_cost_the_same_whichever_algorithm_finds_them(rows, inference):
    a, b = torch.randn(2, rows, 8), torch.randn(2, rows + 1, 8)
    pairs = 2 * rows * (rows + 1)
    with torch.inference_mode(inference):
        found = profile(torch.cdist, a, b)
        assert (found.get_total_flops(), found.get_total_macs()) == (pairs * 25, pairs * 8)
        found = profile(lambda a, b: torch.cdist(a, b, p=1.0), a, b)
        assert (found.get_total_flops(), found.get_total_macs()) == (pairs * 25, 0)
    if not inference:
        found = profile(torch.cdist, a.requires_grad_(), b, backward=True)
        assert found.totals.backward_flops >= 2 * pairs * 8 and not found.get_unknown_operators()


def test_distances_within_a_set():
    found = profile(F.pdist, torch.randn(10, 8, requires_grad=True), backward=True)
    assert found.get_total_flops() == 45 * 25 and found.get_total_macs() == 45 * 8
    assert found.totals.backward_flops >= 4 * 45 * 8 and not found.get_unknown_operators()


@pytest.mark.parametrize(
    "function, args, flops",
    [
        (torch.fft.fft, (torch.randn(4, 16, dtype=torch.complex64),), 5 * 64 * log2(16)),
        (torch.fft.rfft, (torch.randn(4, 16),), 2.5 * 64 * log2(16)),
        (lambda x: torch.fft.irfft(x, 16), (torch.randn(4, 9, dtype=torch.complex64),), 2.5 * 64 * log2(16)),
        (torch.fft.fft2, (torch.randn(4, 8, 16, dtype=torch.complex64),), 5 * 512 * log2(128)),
    ],
    ids=["fft", "rfft", "irfft", "fft2"],
)
def test_fourier_transforms_count_by_the_usual_convention(function, args, flops):
    assert profile(function, *args).get_total_flops() == pytest.approx(flops, rel=0.02)  # and the scaling


def test_products_of_complex_numbers_are_four_real_ones():
    a, b = torch.randn(4, 5, dtype=torch.complex64), torch.randn(5, 6, dtype=torch.complex64)
    found = profile(torch.mm, a, b)
    assert (found.get_total_macs(), found.get_total_flops()) == (4 * 120, 8 * 120)
    assert profile(lambda x, y: x * y, a, a).get_total_flops() == 6 * 20
    assert profile(lambda x, y: x * y, a, torch.randn(4, 5)).get_total_flops() == 2 * 20
    assert profile(lambda x, y: x + y, a, a).get_total_flops() == 2 * 20
    assert profile(lambda x: x.sum(), a).get_total_flops() == 2 * 20


def test_rotary_positions_by_complex_numbers_are_not_free():
    class Rotary(nn.Module):
        def forward(self, x, turn):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(-2)

    x, turn = torch.randn(2, 3, 8), torch.polar(torch.ones(3, 4), torch.randn(3, 4))
    assert profile(Rotary(), x, turn).get_total_flops() == 6 * 2 * 3 * 4


@pytest.mark.parametrize(
    "function, args, flops, macs",
    [
        (torch.addr, (torch.randn(4, 5), torch.randn(4), torch.randn(5)), 2 * 20, 20),
        (torch.conv_tbc, (torch.randn(7, 2, 3), torch.randn(3, 3, 4), torch.randn(4)), 2 * 5 * 2 * 36 + 40, 5 * 2 * 36),
        (lambda t: F.affine_grid(t, [2, 3, 5, 5], align_corners=False), (torch.randn(2, 2, 3),), None, 2 * 25 * 2 * 3),
        (torch.linalg.cross, (torch.randn(4, 3), torch.randn(4, 3)), 36, 0),
        (lambda a, b: torch.sparse.mm(a.to_sparse(), b), (torch.eye(5), torch.randn(5, 6)), 2 * 30 + 30, 30),
        (torch.dist, (torch.randn(10), torch.randn(10)), 31, 0),
    ],
    ids=["addr", "conv_tbc", "affine_grid", "cross", "sparse", "dist"],
)
def test_rarer_products(function, args, flops, macs):
    found = profile(function, *args)
    assert found.get_total_macs() == macs and not found.get_unknown_operators()
    assert flops is None or found.get_total_flops() == flops


@pytest.mark.parametrize(
    "name, model, shape",
    [
        ("RReLU", nn.RReLU(), (4, 8)), ("Softshrink", nn.Softshrink(), (4, 8)), ("Hardshrink", nn.Hardshrink(), (4, 8)),
        ("AdaptiveMaxPool2d", nn.AdaptiveMaxPool2d(2), (2, 3, 8, 8)),
        ("pad 3d", nn.ReplicationPad3d(1), (1, 2, 3, 3, 3)), ("pad 2d", nn.ReflectionPad2d(1), (2, 3, 4, 4)),
        ("AdaptiveMaxPool3d", nn.AdaptiveMaxPool3d(2), (2, 3, 4, 4, 4)),
        ("trilinear", nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 3, 3)),
        ("nearest-exact", nn.Upsample(scale_factor=2, mode="nearest-exact"), (2, 3, 4, 4)),
        ("antialias", lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), (2, 3, 8, 8)),
        ("special", torch.special.i1, (4, 8)), ("asinh", torch.asinh, (4, 8)), ("median", torch.median, (4, 8)),
        ("weight norm", torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), (2, 4)),
        ("grid", lambda x: F.grid_sample(x, x.new_zeros(2, 4, 4, 2), align_corners=False), (2, 3, 8, 8)),
        ("bag", lambda x: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), x), (5, 8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_usual_layers_and_their_gradients_are_all_known(name, model, shape):
    found = profile(model, torch.rand(shape, requires_grad=True), backward=True)
    assert not found.get_unknown_operators()


# - What is not counted is said


def test_what_is_not_counted_is_named_also_without_a_printed_profile(caplog, capsys):
    def odd(x):
        return torch.linalg.inv(x)

    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        get_model_profile(Call(odd), args=(torch.eye(4),), print_profile=False)
    assert [r.getMessage() for r in caplog.records] == [
        "get_model_profile: not counted: aten::linalg_inv_ex x1",
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        get_model_profile(Call(odd), args=(torch.eye(4),))
        assert not caplog.records and "aten::linalg_inv_ex x1" in capsys.readouterr().out
        get_model_profile(nn.Linear(4, 4), (2, 4), print_profile=False)
    assert not caplog.records


def test_a_long_list_of_them_says_how_many_more_there_are():
    from collections import Counter

    from dsx_monitor.flops.facts import unknown_text

    found = unknown_text(Counter({f"aten::op{i}": 20 - i for i in range(15)}))
    assert found.startswith("aten::op0 x20, ") and found.endswith("aten::op11 x9 and 3 others")


# - Texts


def test_counts_are_in_flops_and_rates_in_flops_per_second(capsys):
    get_model_profile(nn.Linear(4, 4), (2, 4))
    rows = dict(
        line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line and "per GPU" in line
    )
    assert rows["fwd flops per GPU"].strip() == "72.00 flops"
    assert rows["fwd FLOPS per GPU"].strip().endswith("FLOPS")


def of_two_ranks(rank, world):
    model = nn.Linear(4, 4)
    profiler = profile(model, torch.ones(2, 4), backward=True)
    text = profiler.text()
    profiler.gather_ranks(lambda own: [own, own])
    return text, profiler.text()


def test_a_job_of_two_ranks_has_a_world_of_two():
    testkit = pytest.importorskip("dsx_testkit")
    for alone, together in testkit.run_ranks(of_two_ranks, 2):
        rows = {line.split(":")[0]: line.split(":")[1].strip() for line in alone.splitlines() if line.count(":") == 1}
        assert rows["world size"] == "2"
        assert "data parallel size" not in rows  # nothing here knows
        assert "params of all ranks:" in together and "144.00 flops" in together


def test_the_launchers_variables_tell_before_there_is_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert FlopsProfiler(nn.Linear(2, 2)).facts.world_size == 3
    monkeypatch.delenv("WORLD_SIZE")
    assert FlopsProfiler(nn.Linear(2, 2)).facts == RunFacts(1, 1, 1)
