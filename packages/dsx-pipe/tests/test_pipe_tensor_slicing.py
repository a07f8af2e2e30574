"""Sliced layers and models give the outputs and gradients of the whole ones, and have Megatron's attributes."""

import copy

import dsx_comm
import pytest
import torch
from dsx_pipe.errors import TensorSliceError
from dsx_pipe.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence,
    gather_parameter,
    scatter_sequence,
    slice_model,
    slice_of,
    sum_gradients_over_slices,
    tp_model_init,
    vocab_parallel_cross_entropy,
    whole_of,
    whole_state,
)
from dsx_testkit import run_ranks
from torch import nn

F64 = torch.float64


@pytest.mark.parametrize("length, size, parts", [(12, 3, 1), (12, 2, 3), (7, 3, 1), (24, 4, 2)])
def test_slices_of_all_ranks_are_the_whole(length, size, parts):
    whole = torch.arange(length * 2).view(length, 2)
    pieces = [slice_of(whole, 0, r, size, parts) for r in range(size)]
    assert torch.equal(whole_of(pieces, 0, parts), whole)


def check_gradient(parameter, expected, group=None):
    """A sliced parameter's gradient is its piece of the whole gradient."""
    piece = expected
    if getattr(parameter, "tensor_model_parallel", False):
        size, rank = dsx_comm.get_world_size(group), dsx_comm.get_rank(group)
        piece = slice_of(expected, parameter.partition_dim, rank, size, parameter.partition_stride)
    torch.testing.assert_close(parameter.grad, piece, rtol=1e-9, atol=1e-11)


def column_then_row(rank, world, overlap, sequence):
    torch.manual_seed(0)
    up = ColumnParallelLinear(6, 12, sequence_parallel=sequence, overlap=overlap, dtype=F64)
    down = RowParallelLinear(12, 6, sequence_parallel=sequence, dtype=F64)
    norm = nn.LayerNorm(6, dtype=F64)
    torch.manual_seed(0)
    whole_up, whole_down, whole_norm = (
        nn.Linear(6, 12, dtype=F64),
        nn.Linear(12, 6, dtype=F64),
        nn.LayerNorm(6, dtype=F64),
    )
    x = torch.randn(2, 4 * world, 6, dtype=F64)
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    if sequence:
        sum_gradients_over_slices(norm)
        entered = norm(scatter_sequence(mine))
        out = gather_from_sequence(entered + down(torch.tanh(up(entered))))
    else:
        entered = norm(mine)
        out = entered + down(torch.tanh(up(entered)))
    entered = whole_norm(reference)
    expected = entered + whole_down(torch.tanh(whole_up(entered)))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-9, atol=1e-11)
    for sliced, whole in ((up, whole_up), (down, whole_down), (norm, whole_norm)):
        for (name, p), (_, q) in zip(sliced.named_parameters(), whole.named_parameters(), strict=True):
            check_gradient(p, q.grad)
            torch.testing.assert_close(gather_parameter(p), q.detach(), rtol=0, atol=0, msg=name)
    assert (up.weight.partition_dim, down.weight.partition_dim) == (0, 1)
    assert not getattr(down.bias, "tensor_model_parallel", False)


@pytest.mark.parametrize("overlap, sequence", [(False, False), (True, False), (False, True), (True, True)])
def test_a_column_and_a_row_layer_equal_two_linear_layers(overlap, sequence):
    run_ranks(column_then_row, 2, overlap, sequence, backend="dsx")


def transposed(rank, world, sequence):
    """Weights of shape [in, out], as in GPT-2's Conv1D: backward gives the same with and without overlap."""
    torch.manual_seed(0)
    x, found = torch.randn(2, 2 * world, 6, dtype=F64), []
    for overlap in (False, True):
        torch.manual_seed(1)
        layer = ColumnParallelLinear(
            6, 12, transposed=True, parts=3, overlap=overlap, sequence_parallel=sequence, dtype=F64
        )
        mine = (x.chunk(world, 1)[rank] if sequence else x).clone().requires_grad_()
        out = layer(mine)
        (out * out.detach().sin()).sum().backward()
        assert layer.weight.shape == (6, 12 // world)
        found.append((type(out.grad_fn).__name__, out.detach(), mine.grad, layer.weight.grad, layer.bias.grad))
    (plain, *a), (overlapped, *b) = found
    assert (plain == "_OverlappedBackward", overlapped == "_OverlappedBackward") == (False, True)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_overlap_on_transposed_weights(sequence):
    run_ranks(transposed, 2, sequence, backend="dsx")


def under_autocast(rank, world):
    layer = ColumnParallelLinear(4, 4, overlap=True)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_overlap_under_autocast():
    run_ranks(under_autocast, 2, backend="dsx")


def test_a_column_and_a_row_layer_on_three_ranks_of_gloo():
    run_ranks(column_then_row, 3, False, True)


def vocabulary(rank, world):
    for size in (12, 13):  # two ranks cannot divide 13 evenly
        torch.manual_seed(0)
        sliced = VocabParallelEmbedding(size, 4, padding_idx=1, dtype=F64)
        head = ColumnParallelLinear(4, size, bias=False, uneven=True)
        torch.manual_seed(0)
        whole = nn.Embedding(size, 4, padding_idx=1, dtype=F64)
        whole_head = nn.Linear(4, size, bias=False)
        ids = torch.randint(0, size, (3, 5))
        labels = ids.clone()
        labels[0, 2] = -100
        hidden, expected_hidden = sliced(ids), whole(ids)
        torch.testing.assert_close(hidden, expected_hidden)
        logits = head(hidden.float())
        expected = nn.functional.cross_entropy(whole_head(expected_hidden.float()).flatten(0, 1), labels.flatten())
        loss = vocab_parallel_cross_entropy(logits, labels, vocab_size=size)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for p, q in ((sliced.weight, whole.weight), (head.weight, whole_head.weight)):
            torch.testing.assert_close(p.grad, slice_of(q.grad, 0, rank, world), rtol=1e-5, atol=1e-7)
        none = vocab_parallel_cross_entropy(logits.detach(), labels, vocab_size=size, reduction="none")
        assert none.shape == labels.shape and none[0, 2] == 0
    with pytest.raises(TensorSliceError, match="expected logits"):
        vocab_parallel_cross_entropy(torch.ones(3, 5, 6), torch.ones(3, 4, dtype=torch.long))
    with pytest.raises(TensorSliceError, match="0 <= label < 4"):
        vocab_parallel_cross_entropy(torch.ones(1, 2), torch.tensor([9]))


def test_a_sliced_vocabulary_may_be_uneven():
    run_ranks(vocabulary, 2, backend="dsx")


def model_of(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=41, n_positions=16, n_embd=16, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config).double()
    sizes = {
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16)
        return transformers.LlamaForCausalLM(config).double()
    if kind == "qwen3":  # norms on each head: every rank uses them on its own heads
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=4, max_position_embeddings=16)
        return transformers.Qwen3ForCausalLM(config).double()
    config = transformers.BertConfig(
        **sizes, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    return transformers.BertForMaskedLM(config).double()


def hugging_face(rank, world, kinds, options):
    for kind in kinds:
        whole, model = model_of(kind), model_of(kind)
        names = [n for n, _ in model.named_parameters()]
        slice_model(model, **options)
        assert [n for n, _ in model.named_parameters()] == names
        state = whole_state(model)
        for name, value in whole.named_parameters():
            assert torch.equal(state[name], value), name
        ids = torch.randint(0, 41, (2, 8), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        a, b = (
            model(input_ids=ids, attention_mask=mask, labels=ids),
            whole(input_ids=ids, attention_mask=mask, labels=ids),
        )
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-6, atol=1e-8)
        a.loss.backward()
        b.loss.backward()
        assert sum(p.numel() for p in model.parameters()) < 0.75 * sum(p.numel() for p in whole.parameters())
        for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            piece = (
                slice_of(q.grad, p.partition_dim, rank, world, p.partition_stride)
                if hasattr(p, "partition_dim")
                else q.grad
            )
            torch.testing.assert_close(p.grad, piece, rtol=1e-5, atol=1e-7, msg=f"{kind} {name}")


@pytest.mark.parametrize("options", [{"overlap": True}, {"sequence_parallel": True}], ids=["overlap", "sequence"])
def test_hugging_face_models_are_sliced_by_the_rules_of_their_family(options):
    run_ranks(hugging_face, 2, ("gpt2", "llama", "qwen3", "bert"), options, backend="dsx", timeout=200)


class SequenceLengths:
    """Records the length of the sequence that each of some modules gets."""

    def __init__(self, model, names):
        self.lengths = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self.hook_for(name))

    def hook_for(self, name):
        def hook(module, args, output):
            self.lengths[name] = args[0].shape[1]

        return hook


def lengths(rank, world):
    model = slice_model(model_of("gpt2"), sequence_parallel=True)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        seen = SequenceLengths(one, ["transformer.h.0.ln_1", "transformer.h.1.mlp.c_fc", "transformer.ln_f"])
        one(input_ids=torch.zeros(1, 8, dtype=torch.long))
        assert seen.lengths == {"transformer.h.0.ln_1": 4, "transformer.h.1.mlp.c_fc": 8, "transformer.ln_f": 8}
    with pytest.raises(TensorSliceError, match="sequence length"):
        model(input_ids=torch.zeros(1, 7, dtype=torch.long))
    untouched = model_of("gpt2")
    with pytest.raises(TensorSliceError, match="leave one out"):
        slice_model(untouched, overlap=True, sequence_parallel=True)
    with pytest.raises(TensorSliceError, match=r"expected one nn\.ModuleList"):
        slice_model(Custom(), config=SPECS, sequence_parallel=True)
    assert type(untouched.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


def test_between_sliced_layers_each_rank_has_its_part_of_the_sequence():
    run_ranks(lengths, 2, backend="dsx")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.up, self.down = 3, nn.Linear(4, 12), nn.Linear(12, 4)


def heads_that_do_not_divide(rank, world):
    model = Heads()
    specs = [{"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"}]
    with pytest.raises(TensorSliceError, match=r"Heads\.num_heads: got 3, expected a multiple of the 2 ranks"):
        slice_model(model, config={"layer_specs": specs})
    assert type(model.up) is nn.Linear and model.up.weight.shape == (12, 4) and model.num_heads == 3


def test_a_model_that_cannot_be_sliced_is_not_changed():
    run_ranks(heads_that_do_not_divide, 2)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.out, self.other = nn.Linear(4, 24), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b, c = self.fused(x).chunk(3, -1)
        return self.other(self.out(a * b + c))


SPECS = {
    "layer_specs": [
        {"patterns": [r"fused\.weight"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": ["out"], "partition_type": "row"},
        {"patterns": ["other"], "partition_type": "skip"},
    ]
}


def custom_rules(rank, world):
    torch.manual_seed(0)
    whole = Custom()
    torch.manual_seed(0)
    model = tp_model_init(Custom(), 2, config=SPECS)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), whole(x))
    assert type(model.other) is nn.Linear and model.fused.weight.shape == (12, 4)
    for bad, says in [
        (
            {"layer_specs": [{"patterns": ["fused"], "partition_type": "diagonal"}]},
            "expected 'column', 'row' or 'skip'",
        ),
        ({"layer_spec": []}, "unknown key 'layer_spec'"),
        ({"layer_specs": [{"patterns": ["nothing"], "partition_type": "row"}]}, "no layer matches"),
        ({"layer_specs": [{"patterns": ["fused"], "shape": [5, -1]}]}, "fused: output features: got 24"),
    ]:
        with pytest.raises(TensorSliceError, match=says):
            slice_model(Custom(), config=bad)
    with pytest.raises(TensorSliceError, match="there are no rules"):
        slice_model(Custom())
    with pytest.raises(TensorSliceError, match="out_features: got 5"):
        ColumnParallelLinear(4, 5)
    with pytest.raises(TensorSliceError, match="tp_size: got 3"):
        tp_model_init(Custom(), 3, config=SPECS)
    with pytest.raises(TensorSliceError, match="sequence length"):
        scatter_sequence(torch.ones(1, 5))


class Vocabulary(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.lm_head = nn.Linear(4, 8), nn.Linear(8, 7)

    def forward(self, x):
        return self.lm_head(torch.tanh(self.up(x)))


def uneven_head(rank, world):
    """A column-parallel layer with its whole output may have pieces of different sizes."""
    head = {"patterns": ["lm_head"], "partition_type": "column"}
    for bad in ({}, {"shape": [7, -1], "gather_output": True}):
        with pytest.raises(TensorSliceError, match="lm_head: output features: got 7"):
            slice_model(Vocabulary(), config={"layer_specs": [{**head, **bad}]})
    torch.manual_seed(0)
    whole = Vocabulary()
    torch.manual_seed(0)
    model = slice_model(Vocabulary(), config={"layer_specs": [{**head, "gather_output": True}]})
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), whole(x))
    whole(x).square().sum().backward()
    model(x).square().sum().backward()
    mine = slice(4 * rank, 4 * rank + (4, 3)[rank])
    torch.testing.assert_close(model.lm_head.weight.grad, whole.lm_head.weight.grad[mine])
    torch.testing.assert_close(model.up.weight.grad, whole.up.weight.grad)


def test_a_column_layer_with_its_whole_output_may_be_cut_unevenly():
    run_ranks(uneven_head, 2, backend="dsx")


def test_custom_rules_and_mistakes_in_them():
    run_ranks(custom_rules, 2, backend="dsx")
