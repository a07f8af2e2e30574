"""The benefit gate of ZeRO++: its arithmetic against formulas written down here, and what a model does with its
verdict.
"""

import logging

import dsx_zero
import pytest
import torch
from dsx_comm.compressed.rates import LinkRates, PathRate
from dsx_testkit import Nodes, run_ranks, tiny
from dsx_zero.transports.gate import Buffer, Features, Places, estimate, subsets

RATES = LinkRates(PathRate(1e-6, 50e9), PathRate(1e-5, 1e9), encode=1e-11, decode=2e-11)
ALL = Features(near=2, weight_bits=8, gradient_bits=4)
S = 1 << 20


def buffer(**changes):
    return Buffer(**{"numel": S, "gathers": 2, "itemsize": 2, "gradient_itemsize": 2, "trained": True, **changes})


def test_bytes_between_nodes_are_those_of_zero_plus_plus():
    places = Places(nodes=2, devices=2)
    exact, ours = (estimate([buffer()], features, places, RATES) for features in (Features(), ALL))
    # per rank: 3 M against 0.75 M, times (nodes - 1) / nodes, divided among the ranks of a node, and some scales
    assert exact.between == 3 * 2 * S / 4
    assert ours.between == pytest.approx((1 + 0.5) * S / 4, rel=0.005)
    assert estimate([buffer(), buffer()], ALL, places, RATES).between == 2 * ours.between
    near = estimate([buffer(trained=False)], Features(near=2), places, RATES)
    assert near.between == 2 * S / 4 and near.inside == 2 * S / 2 + 2 * S / 2 - 0  # forward inside, backward near


def test_seconds_are_latency_bytes_and_arithmetic():
    places = Places(nodes=2, devices=2)
    exact = estimate([buffer(gathers=0)], Features(), places, RATES)
    part = 2 * S / 4
    assert exact.seconds == pytest.approx(3 * 1e-5 + part / 1e9 + 2 * part / 50e9)
    quantised = estimate([buffer(gathers=0)], Features(gradient_bits=4), places, RATES)
    message = S * (0.5 + 4 / 2048)
    wire = 1e-6 + message / 2 / 50e9 + 1e-5 + message / 4 / 1e9
    assert quantised.seconds == pytest.approx(wire + (S + S / 2) * 3e-11)
    one_level, two_levels = (
        estimate([buffer(trained=False)], Features(two_levels=levels), places, RATES) for levels in (False, True)
    )
    assert one_level.between == two_levels.between and one_level.inside == two_levels.inside
    assert one_level.seconds - two_levels.seconds == pytest.approx(2 * (3 * 1e-5 - 1e-5 - 1e-6))
    frozen = Features(weight_bits=8, only_frozen=True)
    assert estimate([buffer()], frozen, places, RATES) == estimate(
        [buffer()], Features(only_frozen=True), places, RATES
    )
    assert estimate([buffer(trained=False)], frozen, places, RATES).between < S


def test_one_node_has_nothing_between_and_all_that_is_less_is_tried():
    inside = LinkRates(PathRate(1e-6, 50e9), None, 1e-9, 1e-9)
    exact, ours = (estimate([buffer()], f, Places(1, 4), inside) for f in (Features(), ALL))
    assert exact.between == ours.between == 0.0 and exact.seconds < ours.seconds
    assert len(list(subsets(ALL))) == 8 and Features() in set(subsets(ALL)) and ALL in set(subsets(ALL))
    assert list(subsets(Features())) == [Features()]


class Listening(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        log = logging.getLogger("dsx_zero.transports.benefit")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


ASKED = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}


def verdicts(rank, world):
    listening, found = Listening(), {}
    exact = dsx_zero.shard(tiny.TinyGPT(), lambda p: torch.optim.SGD(p, lr=0.1), config={**ASKED, **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_gradients"), False), "zero_hpz_partition_size": 1})  # fmt: skip
    assert not listening.lines  # nothing is asked for
    exact[1].release()
    for name, gate in {
        "report": {},
        "off": {"mode": "off"},
        "slow": {"mode": "auto", "between_nodes_gb_per_s": 1e-6, "inside_nodes_gb_per_s": 1e-5},
        "fast": {"mode": "auto", "between_nodes_gb_per_s": 1e9, "inside_nodes_gb_per_s": 1e9},
    }.items():
        listening.lines.clear()
        with Nodes(world, 2).environment(rank):
            model, optimizer = dsx_zero.shard(
                tiny.TinyGPT(), lambda p: torch.optim.SGD(p, lr=0.1), config={**ASKED, "zeropp_gate": gate}
            )
        near = {g.ranks.near is not None for u in optimizer.runtime.units for g in u.groups}
        model.loss(*model.example(2, seed=rank)).backward()
        optimizer.step()
        import dsx_comm

        with dsx_comm.count_traffic() as traffic:
            model.loss(*model.example(2, seed=rank)).backward()
            optimizer.step()
        used = {op for op in ("quantized_all_gather", "quantized_reduce_scatter") if traffic.calls(op)}
        found[name] = list(listening.lines), near, used
        optimizer.release()
    return found


BOTH = {"quantized_all_gather", "quantized_reduce_scatter"}


def test_a_model_says_whether_it_pays_and_leaves_out_only_what_it_may():
    everybody = run_ranks(verdicts, 4, timeout=200)
    for rank, found in enumerate(everybody):
        for name in ("report", "slow", "fast"):
            assert len(found[name][0]) == (1 if rank == 0 else 0), found[name]
        assert found["off"][0] == []
        assert found["report"][1:] == found["off"][1:] == ({True}, BOTH)
        assert found["slow"][1:] == ({True}, BOTH)
        assert "quantized_all_gather" not in found["fast"][2]  # as many messages, and arithmetic costs
    lines = {name: found[0] for name, found in everybody[0].items()}
    assert "2 nodes of 2 ranks" in lines["report"][0] and "exact" in lines["report"][0]
    assert lines["slow"][0].endswith("it pays")
    assert "left out (zeropp_gate.mode auto)" in lines["fast"][0] and "zero_quantized_weights" in lines["fast"][0]


def test_mistakes_are_named():
    for wrong, match in (({"mode": "maybe"}, "mode"), ({"between_nodes_gb_per_s": 0.0}, "between_nodes")):
        with pytest.raises(dsx_zero.ZeroConfigError, match=rf"zeropp_gate\.{match}"):
            dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), config={"stage": 3, "zeropp_gate": wrong})
