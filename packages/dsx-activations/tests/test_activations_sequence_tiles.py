"""`SequenceTiledCompute` and `TiledFusedLogitsLoss` with DeepSpeed's arguments: values and gradients of the whole,
alone and sharded, for sequences that do not divide.
"""

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationArgumentError
from dsx_testkit.recomputed_models import Net, example


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_values_and_gradients_are_those_of_the_whole(batch, masked):
    found = []
    for tiled in (False, True):
        model, (x, y) = Net(tiled), example(1, batch)
        mask = (torch.arange(13) % 3 > 0).float().expand(batch, -1) if masked else None
        x.requires_grad_()
        loss = model(x, y, mask)
        (2 * loss).backward()
        found.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
    with torch.no_grad():
        torch.testing.assert_close(Net(True)(*example(1)), Net(False)(*example(1)))


def test_losses_of_pieces_are_averaged_or_added_up():
    x = torch.randn(1, 6, 2, requires_grad=True)
    by_hand = torch.stack([part.square().sum() for part in x.split(2, 1)])
    for reduction, want in (("mean", by_hand.mean()), ("sum", by_hand.sum()), (None, by_hand)):
        got = dsx_activations.sequence_tiled_compute(
            lambda x: x.square().sum(), 6, 3, {"x": x}, {}, "x", None, 0, reduction
        )
        torch.testing.assert_close(got, want)
    # three pieces of two tokens where five were asked for: no piece is empty
    assert dsx_activations.sequence_tiled_compute(lambda x: x, 6, 5, {"x": x}, {}, "x", None, 1, None).shape == x.shape


def test_mistakes_are_named():
    x, y = example(0)
    fn = lambda x: x  # noqa: E731
    with pytest.raises(ActivationArgumentError, match="expected one of x"):
        dsx_activations.sequence_tiled_compute(fn, 13, 2, {"x": x}, {}, "hidden")
    with pytest.raises(ActivationArgumentError, match=r"expected \(batch, 12"):
        dsx_activations.sequence_tiled_compute(fn, 12, 2, {"x": x}, {}, "x")
    with pytest.raises(ActivationArgumentError, match="0 shards"):
        dsx_activations.sequence_tiled_compute(fn, 13, 0, {"x": x}, {}, "x")
    with pytest.raises(ActivationArgumentError, match="got 1 values, expected 2: x, scale"):
        dsx_activations.SequenceTiledCompute.apply(fn, 13, 2, ["x"], ["scale"], "x", None, 1, None, x)
    for wrong, match in ((("none",), "output_reduction"), ((None,), "output_reduction None")):
        with pytest.raises(ActivationArgumentError, match=match):
            dsx_activations.TiledFusedLogitsLoss.apply(Net.loss_of, Net(True), x, y, None, 2, [], *wrong)
    with pytest.raises(ActivationArgumentError, match=r"y has the shape \(2, 12\)"):
        dsx_activations.TiledFusedLogitsLoss.apply(Net.loss_of, Net(True), x, y[:, 1:], None, 2, [], "sum")
