"""Indexed datasets of Megatron and DeepSpeed: bytes by the layout, both ways, and damage named."""

import pickle
import struct

import numpy as np
import pytest
import torch
from dsx_data import MMapIndexedDataset, open_index
from dsx_data.errors import DataArgumentError, IndexFileError
from dsx_data.index import MMapIndexedDatasetBuilder

SEQUENCES = [[5, 6, 7], [], [8], [9, 10]]


def by_hand(prefix, sequences, *, code, dtype, documents=(0, 2, 4)):
    """The two files as the published layout says, written without our code."""
    width = np.dtype(dtype).itemsize
    pointers, position = [], 0
    for sequence in sequences:
        pointers.append(position)
        position += width * len(sequence)
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
    body = struct.pack(f"<{len(sequences)}i", *map(len, sequences)) + struct.pack(f"<{len(sequences)}q", *pointers)
    prefix.with_suffix(".idx").write_bytes(head + body + struct.pack(f"<{len(documents)}q", *documents))
    return prefix


@pytest.mark.parametrize(
    "code, dtype",
    [
        (1, "u1"),
        (2, "i1"),
        (3, "<i2"),
        (4, "<i4"),
        (5, "<i8"),
        (6, "<u2"),
        (7, "<u4"),
        (8, "<u8"),
        (6, "<f8"),
        (8, "<u2"),
    ],
)
def test_reads_the_layout_in_every_meaning_of_the_codes(tmp_path, code, dtype):
    data = MMapIndexedDataset(by_hand(tmp_path / "d", SEQUENCES, code=code, dtype=dtype))
    assert data.dtype == np.dtype(dtype)
    assert [data[i].tolist() for i in range(4)] == SEQUENCES and data[-1].tolist() == [9, 10]
    assert [row.tolist() for row in data[1:3]] == [[], [8]]
    assert data.sizes.tolist() == [3, 0, 1, 2] and data.doc_idx.tolist() == [0, 2, 4]
    assert data.get(0, 1).tolist() == [6, 7] and data.get(0, 1, 1).tolist() == [6]
    assert data.values.tolist() == [5, 6, 7, 8, 9, 10]
    assert pickle.loads(pickle.dumps(data))[3].tolist() == [9, 10]
    with pytest.raises(DataArgumentError, match="expected a part of the 3 numbers"):
        data.get(0, 2, 5)


def test_builder_writes_the_layout(tmp_path):
    ours = MMapIndexedDatasetBuilder(tmp_path / "a.bin", np.int32)
    ours.add_item(torch.tensor([5, 6, 7]))
    ours.add_item_numpy(np.array([], np.int64))
    ours.end_document()
    ours.add_items([[8], [9, 10]])
    ours.end_document()
    ours.finalize(tmp_path / "a.idx")
    by_hand(tmp_path / "b", SEQUENCES, code=4, dtype="<i4")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert MMapIndexedDataset.exists(tmp_path / "a") and not MMapIndexedDataset.exists(tmp_path / "c")


def test_merging_keeps_documents(tmp_path):
    by_hand(tmp_path / "b", SEQUENCES, code=4, dtype="<i4")
    ours = MMapIndexedDatasetBuilder(tmp_path / "a.bin", np.int32)
    ours.add_item([1])
    ours.end_document()
    ours.merge_file_(tmp_path / "b")
    ours.finalize(tmp_path / "a.idx")
    data = open_index(tmp_path / "a")
    assert [data[i].tolist() for i in range(5)] == [[1], *SEQUENCES] and data.doc_idx.tolist() == [0, 1, 3, 5]
    with pytest.raises(DataArgumentError, match="cannot hold"):
        MMapIndexedDatasetBuilder(tmp_path / "c.bin", np.uint8).add_item([256])


def test_every_truncation_is_named(tmp_path):
    prefix = by_hand(tmp_path / "d", SEQUENCES, code=4, dtype="<i4")
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    for length in range(len(index)):
        prefix.with_suffix(".idx").write_bytes(index[:length])
        with pytest.raises(IndexFileError, match=r"d\.idx: .*(truncated|magic)"):
            MMapIndexedDataset(prefix)
    prefix.with_suffix(".idx").write_bytes(index)
    for length in range(len(data)):
        prefix.with_suffix(".bin").write_bytes(data[:length])
        with pytest.raises(IndexFileError, match=r"d\.bin: got \d+ bytes, expected 24 .*truncated"):
            MMapIndexedDataset(prefix)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(IndexFileError, match=r"d\.bin: there is no such file"):
        MMapIndexedDataset(prefix)


def test_an_ambiguous_code_can_be_decided_by_hand(tmp_path):
    prefix = by_hand(tmp_path / "d", [[1.5, 2.5]], code=7, dtype="<f4", documents=(0, 1))
    assert MMapIndexedDataset(prefix).dtype == np.uint32
    assert MMapIndexedDataset(prefix, dtype=np.float32)[0].tolist() == [1.5, 2.5]
    by_hand(tmp_path / "e", [[1]], code=9, dtype="<i4", documents=(0, 1))
    with pytest.raises(IndexFileError, match="data type code 9"):
        MMapIndexedDataset(tmp_path / "e")
