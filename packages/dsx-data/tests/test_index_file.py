"""The index file: rows come back as written, and every truncated or damaged file is named."""

import pickle
import random

import numpy as np
import pytest
from dsx_data import open_index
from dsx_data.errors import DataArgumentError, IndexFileError
from dsx_data.index import IndexFile, IndexWriter


def written(path, rows, dtype="uint32", **options):
    with IndexWriter(path, dtype, **options) as writer:
        for row in rows:
            writer.add(row)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64", "float32"])
def test_rows_come_back_as_written(tmp_path, dtype):
    draw = random.Random(dtype)
    rows = [[draw.randrange(100) for _ in range(draw.randrange(6))] for _ in range(200)]
    index = IndexFile(written(tmp_path / "rows.dsxi", rows, dtype, facts={"what": "tokens"}))
    assert len(index) == 200 and index.dtype == np.dtype(dtype) and index.facts == {"what": "tokens"}
    assert [row.tolist() for row in index] == rows
    assert index[-1].tolist() == rows[-1]
    assert index.sizes.tolist() == [len(row) for row in rows]
    assert index.values[index.start(7) : index.start(8)].tolist() == rows[7]
    index.verify()
    again = pickle.loads(pickle.dumps(index))
    assert again[3].tolist() == rows[3]
    with pytest.raises(IndexError, match="has 200 rows"):
        index[200]


def test_rows_of_one_size_need_no_offsets(tmp_path):
    index = IndexFile(written(tmp_path / "a.dsxi", [[1, 2], [3, 4], [5, 6]], row_size=2))
    assert index.offsets is None and [row.tolist() for row in index] == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(DataArgumentError, match="multiple of the row size 2"):
        written(tmp_path / "b.dsxi", [[1, 2, 3]], row_size=2)
    assert not list(tmp_path.glob("b*")), "nothing is left of a file that failed"


def test_empty_index_and_empty_rows(tmp_path):
    assert len(IndexFile(written(tmp_path / "none.dsxi", []))) == 0
    assert [row.tolist() for row in IndexFile(written(tmp_path / "some.dsxi", [[], [1], []]))] == [[], [1], []]


def test_values_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(DataArgumentError, match=r"the value 300, which uint8 cannot hold"):
        written(tmp_path / "a.dsxi", [[1], [300]], "uint8")
    with pytest.raises(DataArgumentError, match="the value -1"):
        written(tmp_path / "a.dsxi", [[-1]], "uint32")
    with pytest.raises(DataArgumentError, match="integer or floating"):
        IndexWriter(tmp_path / "a.dsxi", "complex64")


def test_every_truncation_is_named(tmp_path):
    whole = written(tmp_path / "a.dsxi", [[1, 2, 3], [4]]).read_bytes()
    cut = tmp_path / "cut.dsxi"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(IndexFileError, match=r"cut\.dsxi: .*(truncated|magic)"):
            IndexFile(cut)


def test_every_damaged_byte_is_found(tmp_path):
    whole = bytearray(written(tmp_path / "a.dsxi", [[1, 2, 3], [4]]).read_bytes())
    bad = tmp_path / "bad.dsxi"
    unused = set(range(32, 64))
    end_of_values = 64 + 16
    unused |= set(range(end_of_values, -(-end_of_values // 64) * 64))  # padding between arrays
    offsets_end = 128 + 24
    unused |= set(range(offsets_end, -(-offsets_end // 64) * 64))
    for place in range(len(whole)):
        whole[place] ^= 0x55
        bad.write_bytes(whole)
        whole[place] ^= 0x55
        if place in unused:
            IndexFile(bad).verify()
            continue
        with pytest.raises(IndexFileError, match=r"bad\.dsxi"):
            IndexFile(bad).verify()


def test_other_files_and_missing_ones_are_named(tmp_path):
    (tmp_path / "text.dsxi").write_text("hello " * 100)
    with pytest.raises(IndexFileError, match="magic"):
        IndexFile(tmp_path / "text.dsxi")
    with pytest.raises(IndexFileError, match=r"nothing\.dsxi, or the pair nothing\.idx and nothing\.bin"):
        open_index(tmp_path / "nothing")


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = written(tmp_path / "a.dsxi", [[1]])
    with pytest.raises(RuntimeError), IndexWriter(path, "uint8") as writer:
        writer.add([2])
        raise RuntimeError
    assert IndexFile(path)[0].tolist() == [1] and list(tmp_path.iterdir()) == [path]
