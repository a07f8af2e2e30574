"""One rank's range of a tensor as boxes: they tile the range, and are contiguous in it."""

from __future__ import annotations

import copy
import pickle
from itertools import combinations

import dsx_zero
import pytest
import torch
from dsx_zero.params.shard_view import Part, ShardView, boxes_of_range


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 2), (2, 1, 3, 2)])
def test_boxes_of_every_range(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in combinations(range(whole.numel() + 1), 2):
        found, position = [], 0
        for box in boxes_of_range(shape, start, stop):
            place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))
            found += whole[place].reshape(-1).tolist()
            assert box.first == position
            position += box.numel
        assert found == list(range(start, stop)), (start, stop)
        assert len(list(boxes_of_range(shape, start, stop))) <= max(1, 2 * len(shape) - 1)
    assert not list(boxes_of_range(shape, 0, 0))


def test_a_part_of_a_box_of_a_tensor():
    whole = torch.arange(24).view(4, 6)
    part = Part((4, 6), (0, 2), (4, 3), 2, 10)
    values = whole[:, 2:5].reshape(-1)[2:10]
    view = ShardView(values, part)
    for offset, piece in view.chunks():
        place = tuple(slice(o, o + s) for o, s in zip(offset, piece.shape))
        assert torch.equal(whole[place], piece)
        assert piece.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert torch.equal(view.cut(whole), values)


def test_copies_and_what_is_refused():
    values = torch.arange(5.0)
    view = ShardView(values, Part.of_range((3, 3), 2, 7), mine=1)
    assert view.shape == (3, 3) and view.dtype == torch.float32 and view.in_place
    for other in (copy.deepcopy(view), view.clone(), pickle.loads(pickle.dumps(view)), view.to(torch.float64)):
        assert isinstance(other, ShardView) and torch.equal(other.values.float(), values) and not other.in_place
        other.values.zero_()
    assert torch.equal(values, torch.arange(5.0))
    assert view.detach().values.data_ptr() == values.data_ptr() and view.detach().in_place
    view.copy_(torch.arange(9.0).view(3, 3) * 10)
    assert values.tolist() == [20, 30, 40, 50, 60]
    with pytest.raises(dsx_zero.ZeroStateError, match=r"\(2, 2\), expected \(3, 3\)"):
        view.copy_(torch.zeros(2, 2))
    for wrong in (lambda: view + 1, lambda: view.sum(), lambda: torch.zeros(3, 3).add_(view), lambda: view[0]):
        with pytest.raises(dsx_zero.ZeroStateError, match="full_tensor"):
            wrong()
    with pytest.raises(dsx_zero.ZeroStateError, match="another process"):
        view.full_tensor()
