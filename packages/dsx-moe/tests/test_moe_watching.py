"""Monitoring of MoE layers: events, statistics of all ranks, and the picture of the experts' load."""

import itertools
import xml.etree.ElementTree as ElementTree

import dsx_comm
import pytest
import torch
from dsx_moe import MoE, moe_events
from dsx_moe.errors import MoEConfigError
from dsx_moe.watching import LoadHistory, layer_stats
from dsx_testkit import run_ranks
from torch import nn


def model(ep_size=1):
    torch.manual_seed(0)
    return nn.ModuleDict({"a": MoE(8, nn.Linear(8, 8), 4, ep_size, k=2), "b": MoE(8, nn.Linear(8, 8), 2, ep_size)})


def test_events_say_load_dropped_share_and_loss():
    layers = model()
    assert moe_events(layers, 7) == []
    _, l_aux, counts = layers["a"](torch.randn(32, 8))
    events = {label: (value, samples) for label, value, samples in moe_events(layers, 7)}
    assert set(events) == {f"Train/MoE/a/{part}" for part in
                           ("load_0", "load_1", "load_2", "load_3", "max_load", "dropped_share", "l_aux")}  # fmt: skip
    assert [events[f"Train/MoE/a/load_{e}"][0] for e in range(4)] == pytest.approx((counts / 64 * 4).tolist())
    assert events["Train/MoE/a/l_aux"] == (pytest.approx(l_aux.item()), 7)
    kept = int(layers["a"].stats.kept.sum())
    assert events["Train/MoE/a/dropped_share"][0] == pytest.approx(1 - kept / 64)


def _stats(rank, world):
    dsx_comm.init_distributed()
    layers = model(world)
    x = torch.randn(16 * (rank + 1), 8, generator=torch.Generator().manual_seed(rank))
    layers["a"](x)
    layers["b"](x)
    mine, everyone = layer_stats(layers), layer_stats(layers, all_ranks=True)
    return [mine[n].requested.tolist() for n in "ab"], [everyone[n].requested.tolist() for n in "ab"], (
        float(mine["a"].l_aux), float(everyone["a"].l_aux),
    )  # fmt: skip


def test_counts_of_all_ranks_are_summed_and_losses_averaged():
    results = run_ranks(_stats, 2)
    for layer in (0, 1):
        total = [sum(counts) for counts in zip(*(mine[layer] for mine, _, _ in results))]
        assert all(everyone[layer] == total for _, everyone, _ in results)
    mean = sum(loss for _, _, (loss, _) in results) / 2
    assert all(everyone == pytest.approx(mean) for _, _, (_, everyone) in results)


def test_the_picture_is_svg_with_a_cell_per_record(tmp_path):
    layers, history = model(), LoadHistory()
    for step in range(5):
        layers["a"](torch.randn(32, 8))
        history.record(layers, step)
    history.write_svg(tmp_path / "load.svg")
    root = ElementTree.parse(tmp_path / "load.svg").getroot()
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 5 * 4
    assert titles[0].startswith("step 0, expert 0")
    assert LoadHistory().svg().startswith("<svg")


def test_the_history_of_a_long_run_is_thinned_out_evenly():
    layers, history = model(), LoadHistory(most=8)
    layers["b"](torch.randn(8, 8))
    for step in range(100):
        history.record(layers, step)
    steps = [record.step for record in history.records["b"]]
    assert len(steps) <= 9
    assert steps[0] == 0
    assert steps[-1] > 80
    assert len({later - earlier for earlier, later in itertools.pairwise(steps)}) == 1
    with pytest.raises(MoEConfigError):
        LoadHistory(most=1)
