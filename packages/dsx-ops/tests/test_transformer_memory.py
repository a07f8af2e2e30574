"""What a `TransformerLayer` keeps for backward, counted in bytes of distinct storages: each option drops what it
says.
"""

import dsx_ops
import torch

BATCH, SEQUENCE, HIDDEN, HEADS, INNER = 2, 64, 64, 4, 256
TOKENS = BATCH * SEQUENCE * HIDDEN * 4  # bytes of one [batch, sequence, hidden]
INNERS = BATCH * SEQUENCE * INNER * 4
SCORES = BATCH * HEADS * SEQUENCE * SEQUENCE * 4


def kept_bytes(module, *arguments):
    """Bytes that autograd holds between forward and backward, parameters and arguments apart."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *(a for a in arguments if a is not None)]}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )  # holding it keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(*arguments)
    own.add(y.untyped_storage().data_ptr())  # the next layer's input
    return sum(size for address, (size, _) in storages.items() if address not in own)


def layer(**options):
    torch.manual_seed(0)
    config = {"hidden_size": HIDDEN, "heads": HEADS, "intermediate_size": INNER, "num_hidden_layers": 2}
    return dsx_ops.TransformerLayer(
        dsx_ops.TransformerConfig(**{**config, "attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1, **options})
    )


def of(**options):
    return kept_bytes(layer(**options), torch.randn(BATCH, SEQUENCE, HIDDEN), None)


SLACK = 8 * BATCH * SEQUENCE * 4 + 1024  # means, rstds, keys


def close(got, wanted):
    assert abs(got - wanted) <= SLACK, (got, wanted)


def test_each_option_drops_what_it_says():
    for pre in (True, False):
        everything = of(pre_layer_norm=pre)
        close(everything - of(pre_layer_norm=pre, gelu_checkpoint=True), INNERS)
        close(everything - of(pre_layer_norm=pre, attn_dropout_checkpoint=True), SCORES)
        # The sum before each norm; the first norm of a pre-LN layer had the argument itself.
        close(everything - of(pre_layer_norm=pre, normalize_invertible=True), TOKENS if pre else 2 * TOKENS)


def test_dropout_keeps_no_masks():
    """Dropping hidden values costs a key; dropping probabilities costs their second copy."""
    close(of(), of(hidden_dropout_ratio=0.0))
    without = of(attn_dropout_ratio=0.0)
    assert without < of() - SCORES


def test_the_whole_account():
    """post-LN, everything recomputed: q, k, v, context, two norm results (one of them the layer's own), the inner input
    and P.
    """
    tightest = of(pre_layer_norm=False, gelu_checkpoint=True, attn_dropout_checkpoint=True, normalize_invertible=True)
    close(tightest, 3 * TOKENS + TOKENS + TOKENS + INNERS + SCORES)


def test_less_than_torchs_own_layer():
    torch.manual_seed(0)
    torchs = torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, 0.1, activation="gelu", batch_first=True)
    theirs = kept_bytes(torchs, torch.randn(BATCH, SEQUENCE, HIDDEN), None)
    assert of(pre_layer_norm=False) < theirs
    everything = {"gelu_checkpoint": True, "attn_dropout_checkpoint": True, "normalize_invertible": True}
    assert of(pre_layer_norm=False, **everything) < 0.6 * theirs
