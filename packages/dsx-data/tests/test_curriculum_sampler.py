"""Samples drawn by difficulty, against sets in plain Python: who is admitted, in which shares, and where a run goes
on.
"""

import collections
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from dsx_data import CurriculumSampler, DataAnalyzer, LoaderOptions, TrainingLoader
from dsx_data.errors import DataArgumentError, DataStateError
from dsx_data.index import IndexWriter


def write_metric(path, name, values, form="dsx"):
    one = DataAnalyzer(
        np.asarray(values)[:, None], metric_names=[name], metric_functions=[lambda batch: batch[:, 0]], batch_size=32,
        metric_types=["single_value_per_sample"], metric_dtypes=["int64"], save_path=path, index_format=form,
    )  # fmt: skip
    one.run_map()
    one.run_reduce()


def section(path, name, kind="value", low=1, high=100, steps=10, clustering="schedule_based", merged=False, **changes):
    suffix = "_percentile_merged" if merged else ""
    return SimpleNamespace(**{
        "index_to_sample_path": f"{path}/{name}/{name}_index_to_sample{suffix}",
        "index_to_metric_path": f"{path}/{name}/{name}_index_to_metric", "difficulty_type": kind,
        "clustering_type": clustering, "min_difficulty": low, "max_difficulty": high, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": steps, "difficulty_step": 1}, **changes,
    })  # fmt: skip


def reference_admitted(values, difficulty, kind, maximum):
    """Plain Python: the samples that a difficulty of one metric admits."""
    if kind == "value":
        return {i for i, value in enumerate(values) if value <= difficulty}
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    return set(order[: max(1, len(values) * min(difficulty, maximum) // maximum)])


@pytest.mark.parametrize("seed", range(6))
def test_every_draw_takes_admitted_samples_and_nothing_twice_in_a_round(tmp_path, seed):
    draw = random.Random(seed)
    size = draw.randrange(40, 120)
    values = {"a": [draw.randrange(1, 60) for _ in range(size)], "b": [draw.randrange(1, 9) for _ in range(size)]}
    kinds = {"a": draw.choice(["value", "percentile"]), "b": draw.choice(["value", "percentile"])}
    highs = {"a": 60 if kinds["a"] == "value" else 100, "b": 9 if kinds["b"] == "value" else 100}
    lows = {name: 30 if kinds[name] == "value" else 60 for name in values} | ({"b": 5} if kinds["b"] == "value" else {})
    metrics = {}
    for name in values:
        write_metric(tmp_path, name, values[name], draw.choice(["dsx", "megatron"]))
        merged = kinds[name] == "percentile" and draw.random() < 0.5
        metrics[name] = section(tmp_path, name, kinds[name], lows[name], highs[name], steps=12, merged=merged)
    sampler = CurriculumSampler(
        size, metrics, global_batch_size=7, cluster_path=tmp_path / "clusters" if seed % 2 else None
    )
    clusters, seen = [], collections.Counter()
    for step in range(1, 60):
        found = sampler.draw()
        admitted = set.intersection(
            *(reference_admitted(values[n], found.difficulties[n], kinds[n], highs[n]) for n in values)
        )
        new = admitted.difference(*clusters)
        if new:
            clusters.append(new)
        assert found.samples.shape == (7,) and set(found.samples.tolist()) <= admitted
        assert found.difficulties["a"] == min(
            highs["a"], max(lows["a"], lows["a"] + (highs["a"] - lows["a"]) * step // 12)
        )
        seen.update(found.samples.tolist())
        for cluster in clusters:  # without repetition until the cluster is used up
            counts = [seen[i] for i in cluster]
            assert max(counts) - min(counts) <= 1
    assert set.union(*clusters) == set(range(size)) == set(seen)


def test_clusters_are_drawn_by_their_size(tmp_path):
    write_metric(tmp_path, "m", [1] * 100 + [2] * 300)
    changes = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [1]}}
    sampler = CurriculumSampler(400, {"m": section(tmp_path, "m", high=2, **changes)}, global_batch_size=400)
    assert (sampler.draw().samples < 100).all()
    shares = [(sampler.draw().samples < 100).mean() for _ in range(60)]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.02)


def test_fewer_samples_than_percentiles_admit_some(tmp_path):
    write_metric(tmp_path, "m", [5, 3, 9])
    sampler = CurriculumSampler(3, {"m": section(tmp_path, "m", "percentile", low=1, steps=100)}, global_batch_size=4)
    assert set(sampler.draw().samples.tolist()) == {1}
    for _ in range(99):
        last = sampler.draw()
    assert set(last.samples.tolist()) <= {0, 1, 2} and len(sampler._clusters) == 3


def test_a_single_cluster_takes_all_samples_and_only_tells_the_difficulty():
    metric = section("nowhere", "m", clustering="single_cluster", low=8, high=32, steps=4)
    sampler = CurriculumSampler(10, {"seqlen": metric}, global_batch_size=10)
    draws = [sampler.draw() for _ in range(3)]
    assert [d.difficulties["seqlen"] for d in draws] == [14, 20, 26]
    assert sorted(draws[0].samples.tolist()) == list(range(10))


def loaders(path, world, *, state=None, workers=0, cluster_path=None):
    made = []
    for rank in range(world):
        sampler = CurriculumSampler(90, {"m": section(path, "m", high=30, low=3, steps=8)}, global_batch_size=12,
                                    num_epochs=3, cluster_path=cluster_path)  # fmt: skip
        options = LoaderOptions(12 // world // 2, rank=rank, world_size=world, sampler=sampler, num_workers=workers)
        made.append(TrainingLoader(list(range(90)), options))
        if state is not None:
            made[-1].load_state_dict(state)
    return made


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_two_then_three_then_one_rank_draw_what_one_would(tmp_path, workers, on_disk):
    write_metric(tmp_path, "m", [i % 30 + 1 for i in range(90)])
    folder = tmp_path / "clusters" if on_disk else None
    whole = [sorted(b.tolist()) for b in loaders(tmp_path, 1)[0]]
    assert len(whole) == 45
    groups, state = [], None
    for world, steps in ((2, 5), (3, 8), (1, None)):  # stops also in the middle of an update
        made = loaders(tmp_path, world, state=state, workers=workers, cluster_path=folder)
        for number, group in enumerate(zip(*made)):
            groups.append(sorted(int(i) for batch in group for i in batch))
            state = made[0].state_dict()
            if steps is not None and number + 1 == steps:
                break
        for file in folder.glob("*") if on_disk and world == 2 else ():
            file.write_bytes(file.read_bytes()[:70])  # a damaged cluster is made again
    assert groups == whole


def test_a_loop_that_is_left_goes_on_and_a_state_of_other_settings_is_refused(tmp_path):
    write_metric(tmp_path, "m", [i % 30 + 1 for i in range(90)])
    (one,), (whole,) = loaders(tmp_path, 1), loaders(tmp_path, 1)
    got = [b.tolist() for _, b in zip(range(5), one)] + [b.tolist() for b in one]
    assert got == [b.tolist() for b in whole]
    state = whole.sampler.state_dict()
    other = CurriculumSampler(90, {"m": section(tmp_path, "m", high=30)}, global_batch_size=6)
    with pytest.raises(DataStateError, match=r"got 12 samples per global batch .* expected 6"):
        other.load_state_dict(state)
    named = CurriculumSampler(90, {"n": section(tmp_path, "m", high=30)}, global_batch_size=12)
    with pytest.raises(DataStateError, match=r"metrics \['m'\], expected \['n'\]"):
        named.load_state_dict(state)
    with pytest.raises(DataStateError, match="another kind of order"):
        TrainingLoader(list(range(9)), LoaderOptions(3)).load_state_dict(whole.state_dict())


def test_indexes_that_do_not_fit_are_named(tmp_path):
    write_metric(tmp_path, "m", [4, 5, 6])
    for size, changes, text in (
        (4, {}, "index of 3 samples .* expected 4 as in the dataset"),
        (3, {"low": 3, "high": 3}, "no sample is admitted at the first difficulties .* smallest value 4"),
        (3, {"merged": True}, 'a file of percentiles needs difficulty_type "percentile"'),
    ):
        with pytest.raises(DataArgumentError, match=text):
            CurriculumSampler(size, {"m": section(tmp_path, "m", **changes)}, global_batch_size=2).draw()
    with IndexWriter(tmp_path / "bad.dsxi", "uint32") as writer:
        writer.add([0, 1, 7])
    bad = section(tmp_path, "m", "percentile", low=100, index_to_sample_path=str(tmp_path / "bad.dsxi"))
    with pytest.raises(DataArgumentError, match="names sample 7, expected numbers below 3"):
        CurriculumSampler(3, {"m": bad}, global_batch_size=2).draw()


def test_two_metrics_over_a_million_samples_take_little_memory(tmp_path):
    size = 1_000_000
    for name in ("a", "b"):
        order = np.random.default_rng(len(name)).permutation(size).astype(np.uint32)
        with IndexWriter(tmp_path / f"{name}.dsxi", "uint32", row_size=1) as writer:
            writer.add_rows(order)
    metrics = {
        n: section(tmp_path, n, "percentile", low=10, index_to_sample_path=str(tmp_path / f"{n}.dsxi")) for n in "ab"
    }
    tracemalloc.start()
    sampler = CurriculumSampler(size, metrics, global_batch_size=64, cluster_path=tmp_path / "c")
    for _ in range(12):
        sampler.draw()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * size, f"{peak / size:.1f} bytes per sample; 10 million samples may take 200 MB"
