"""The analysis against numpy, by any number of processes and ranks, stopped and resumed; every failure is named."""

import os
import re

import numpy as np
import pytest
import torch
from dsx_data import DataAnalyzer, DistributedDataAnalyzer, SequenceLength, open_index
from dsx_data.analysis import VocabularyCounts, VocabularyRarity, difficulty_picture
from dsx_data.batching.plan import lengths_from
from dsx_data.errors import AnalysisError, DataArgumentError
from dsx_testkit import run_ranks
from torch.utils.data import TensorDataset


def ragged(count=300, seed=0):
    draw = np.random.default_rng(seed)
    return [torch.from_numpy(draw.integers(0, 50, draw.integers(1, 40))) for _ in range(count)]


def analyzer(data, path, **options):
    chosen = {
        "metric_names": ["seqlen", "vocab"], "metric_functions": [SequenceLength(), VocabularyCounts(50)],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "metric_dtypes": [torch.int32, np.int64], "save_path": path, "batch_size": 16, "collate_fn": list, **options,
    }  # fmt: skip
    return DataAnalyzer(data, **chosen)


def check(data, path, name="seqlen", values=None, ids=None):
    values = np.array([len(s) for s in data]) if values is None else values
    ids = np.arange(len(values)) if ids is None else np.asarray(ids)
    base = path / name / name
    assert open_index(f"{base}_sample_to_metric").values.tolist() == values.tolist()
    distinct = np.unique(values)
    assert open_index(f"{base}_index_to_metric").values.tolist() == distinct.tolist()
    rows = open_index(f"{base}_index_to_sample")
    assert [row.tolist() for row in (rows[i] for i in range(len(rows)))] == [
        ids[values == v].tolist() for v in distinct
    ]
    merged = open_index(f"{base}_index_to_sample_percentile_merged")
    assert len(merged) == 100 and merged.values.tolist() == ids[np.argsort(values, kind="stable")].tolist()
    assert max(merged.sizes) - min(merged.sizes) <= 1


@pytest.mark.parametrize("threads, form", [(1, "dsx"), (3, "dsx"), (2, "megatron")])
def test_results_are_those_of_numpy(tmp_path, threads, form):
    data = ragged()
    one = analyzer(data, tmp_path, num_threads=threads, num_threads_reduce=2, index_format=form)
    one.run_map()
    one.run_reduce()
    check(data, tmp_path)
    counts = np.bincount(torch.cat(data).numpy(), minlength=50)
    assert open_index(tmp_path / "vocab" / "vocab_metric_value")[0].tolist() == counts.tolist()
    assert lengths_from(tmp_path).tolist() == [len(s) for s in data]
    rarity = VocabularyRarity(counts)
    two = analyzer(data, tmp_path, metric_names=["rarity"], metric_functions=[rarity], metric_dtypes=["int64"],
                   metric_types=["single_value_per_sample"])  # fmt: skip
    two.run_map_reduce()
    expected = [round(sum(-np.log(counts[t] / counts.sum()) for t in s.tolist())) for s in data]
    check(data, tmp_path, "rarity", np.array(expected))


def test_workers_share_the_work_and_a_missing_one_is_named(tmp_path):
    data = ragged()
    for worker in (0, 2):
        analyzer(data, tmp_path, num_workers=3, worker_id=worker, num_threads=2).run_map()
    with pytest.raises(AnalysisError, match=r"metric 'seqlen': the result of samples 8 to 11 is missing"):
        analyzer(data, tmp_path).run_reduce()
    analyzer(data, tmp_path, num_workers=3, worker_id=1, num_threads=2, specific_threads=[0]).run_map()
    analyzer(data, tmp_path, num_workers=3, worker_id=1, num_threads=2, specific_threads=[1]).run_map()
    analyzer(data, tmp_path).run_reduce()
    check(data, tmp_path)


class Counting:
    def __init__(self, data, stop_at=None):
        self.data, self.stop_at, self.read = data, stop_at, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        if self.stop_at is not None and self.read > self.stop_at:
            raise KeyError(number)
        self.read += 1
        return self.data[number]


def test_a_stopped_map_goes_on_with_what_is_missing(tmp_path):
    data = ragged()
    with pytest.raises(KeyError):
        analyzer(Counting(data, stop_at=200), tmp_path).run_map()
    rest = Counting(data)
    again = analyzer(rest, tmp_path, num_threads=1)
    again.run_map()
    assert rest.read < 120, "what was finished is not read again"
    again.run_reduce()
    check(data, tmp_path)
    part = next((tmp_path / "seqlen" / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:50])
    again.run_map()
    again.run_reduce()
    check(data, tmp_path)


def test_another_dataset_in_the_same_folder_is_noticed(tmp_path):
    first, second = ragged(seed=1), ragged(seed=2)
    analyzer(first, tmp_path).run_map()
    with pytest.raises(AnalysisError, match="another dataset was analysed in this folder"):
        analyzer(second, tmp_path).run_reduce()
    again = analyzer(second, tmp_path)
    again.run_map()
    again.run_reduce()
    check(second, tmp_path)


def test_tensors_and_numbers_of_samples(tmp_path):
    table = torch.randint(0, 50, (130, 9))
    table[3, 5:] = 0
    ids = list(range(1000, 1130))
    one = analyzer(
        table, tmp_path, collate_fn=None, sample_indices=ids, metric_functions=[SequenceLength(0), VocabularyCounts(50)]
    )
    one.run_map()
    one.run_reduce()
    check(table, tmp_path, values=(table != 0).sum(1).numpy(), ids=ids)
    two = analyzer(TensorDataset(table), tmp_path / "two", collate_fn=None)
    two.run_map_reduce()
    check(table, tmp_path / "two", values=np.full(130, 9))


def test_masks_decide_the_length():
    batch = {"input_ids": torch.ones(2, 5), "attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])}
    assert SequenceLength()(batch).tolist() == [2, 4]
    assert SequenceLength()([{"input_ids": [1, 2]}, {"input_ids": [3]}]).tolist() == [2, 1]
    with pytest.raises(DataArgumentError, match="expected 0 to 1"):
        VocabularyCounts(2)(torch.tensor([[2]]))


class Broken:
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 200

    def __getitem__(self, number):
        if number == 154:
            if self.how == "die":
                os._exit(9)
            raise OSError("the disk is gone")
        return torch.ones(number % 5 + 1)


@pytest.mark.parametrize(
    "how, text", [("raise", "process 1 .* failed: OSError: the disk is gone"), ("die", "process 1 .* exit code 9")]
)
def test_a_process_that_fails_is_named(tmp_path, how, text):
    one = analyzer(Broken(how), tmp_path, num_threads=2, metric_names=["seqlen"], metric_functions=[SequenceLength()],
                   metric_types=["single_value_per_sample"], metric_dtypes=["int32"])  # fmt: skip
    with pytest.raises(AnalysisError, match=text):
        one.run_map()


def test_a_metric_that_returns_the_wrong_count_is_named(tmp_path):
    for function, kind, text in (
        (lambda batch: torch.zeros(3), "single_value_per_sample", "returned 3 numbers, expected 4, one per sample"),
        (lambda batch: torch.zeros(len(batch[0])), "accumulate_value_over_samples", "added up"),
    ):
        one = analyzer(ragged(), tmp_path, metric_names=["m"], metric_functions=[function], metric_types=[kind],
                       metric_dtypes=["int64"], batch_size=2)  # fmt: skip
        with pytest.raises(AnalysisError, match=text.replace("4", "2")):
            one.run_map()
    with pytest.raises(AnalysisError, match="collate_fn=list"):
        analyzer(ragged(), tmp_path / "b", collate_fn=None).run_map()
    with pytest.raises(DataArgumentError, match="expected equally many"):
        analyzer(ragged(), tmp_path, metric_dtypes=[])


def test_custom_functions_replace_map_and_reduction(tmp_path):
    seen = []

    def init(thread, names, types, dtypes, path, worker):
        return {"sum": 0, "names": names}

    def update(types, dtypes, functions, results, batch, first):
        results["sum"] += int(functions[0](batch).sum())
        seen.append(first)

    def finalize(types, dtypes, results):
        seen.append(results["sum"])

    data = ragged(20)
    one = analyzer(data, tmp_path, custom_map_init=init, custom_map_update=update, custom_map_finalize=finalize,
                   custom_reduce=lambda *args: seen.append(args[1]))  # fmt: skip
    one.run_map()
    one.run_reduce()
    assert seen == [*range(20), sum(len(s) for s in data), ["seqlen", "vocab"]]


def work(rank, world, path, broken):
    data = Broken("raise") if broken and rank == 1 else [torch.ones(i % 7 + 1) for i in range(200)]
    one = DistributedDataAnalyzer(
        data, batch_size=8, metric_names=["seqlen"], metric_functions=[SequenceLength()],
        metric_types=["single_value_per_sample"], save_path=path, collate_fn=list, fingerprint="x",
    )  # fmt: skip
    try:
        one.run_map_reduce()
    except (AnalysisError, OSError) as error:
        return str(error)
    return open_index(f"{path}/seqlen/seqlen_sample_to_metric").values.tolist()


def test_ranks_share_the_work(tmp_path):
    results = run_ranks(work, 2, str(tmp_path), False)
    assert results == [[i % 7 + 1 for i in range(200)]] * 2


def test_a_failure_on_one_rank_reaches_all(tmp_path):
    results = run_ranks(work, 2, str(tmp_path), True)
    assert results[1] == "the disk is gone"
    assert results[0] == "the analysis failed on rank 1: the disk is gone"


def test_the_picture_names_its_axes_and_counts_in_whole_numbers():
    svg = difficulty_picture(np.arange(3, 301), title="lengths", bins=7)
    assert ">samples</text>" in svg and ">samples up to here</text>" in svg
    ticks = [text for text in re.findall(r">([\d.]+)</text>", svg)]
    assert {"3", "77", "300"} <= set(ticks) and not [text for text in ticks if "." in text]


def test_the_picture_shows_every_sample():
    svg = difficulty_picture(np.array([1, 1, 2, 5]), title="a < b", bins=4)
    assert svg.startswith("<svg") and "a &lt; b: 4 samples" in svg and "1 to 2: 2" in svg and "quartiles 1, 1.5" in svg
    with pytest.raises(DataArgumentError, match="no values"):
        difficulty_picture(np.array([]), title="x")
