"""Layer reduction and distillation: copied layers, losses by their formulas, cheap teachers."""

import pytest
import torch
from compress_zoo import TinyBert, ids, method
from dsx_compress import CompressionError, DistillationLoss, Teacher, init_compression, student_initialization
from dsx_compress.distillation import logits_loss
from dsx_compress.runtime import QuantizedLinear
from torch import nn


def reduction(**changes):
    return {"layer_reduction": {
        "enabled": True, "keep_number_layer": 2, "module_name_prefix": "layers", "teacher_layer": [1, 3],
        "other_module_name": ["embedding", "head"], **changes}}  # fmt: skip


def test_layers_and_other_modules_are_copied():
    teacher, student = TinyBert(4), TinyBert(2)
    student_initialization(student, teacher, reduction())
    for ours, theirs in ((student.layers[0], teacher.layers[1]), (student.layers[1], teacher.layers[3]),
                         (student.embedding, teacher.embedding), (student.head, teacher.head)):  # fmt: skip
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_init_compression_copies_too_and_needs_the_teacher():
    teacher, student = TinyBert(4), TinyBert(2)
    config = {**reduction(), **method("sparse_pruning", g={"modules": ["up"]})}
    with pytest.raises(CompressionError, match="no teacher_model"):
        init_compression(student, config)
    init_compression(student, config, teacher)
    assert torch.equal(student.layers[1].up.parametrizations.weight.original, teacher.layers[3].up.weight)


@pytest.mark.parametrize("changes, message", [
    ({"teacher_layer": [1, 4]}, "got 4, but the teacher has 4 layers"),
    ({"teacher_layer": [1, 2, 3], "keep_number_layer": 3}, "the student has 2 layers"),
    ({"module_name_prefix": "layer"}, "no module 'layer'; near names: .*layers"),
    ({"module_name_prefix": "head"}, "expected a list of modules; it has layers"),
    ({"other_module_name": ["heat"]}, "no module 'heat'; near names: head"),
])  # fmt: skip
def test_wrong_names_copy_nothing(changes, message):
    student = TinyBert(2)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(CompressionError, match=message):
        student_initialization(student, TinyBert(4), reduction(**changes))
    assert all(torch.equal(before[name], tensor) for name, tensor in student.state_dict().items())
    with pytest.raises(CompressionError, match="only the number of layers may differ"):
        student_initialization(TinyBert(2, width=8), TinyBert(4), reduction())


def test_the_logits_term_is_the_divergence_of_the_softened_distributions():
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    p, q = (theirs / 2).softmax(-1), (ours / 2).softmax(-1)
    expected = 4 * (p * (p / q).log()).sum(-1).mean()
    assert logits_loss(ours, theirs, 2.0).item() == pytest.approx(expected.item(), rel=1e-5)
    assert logits_loss(ours, ours, 3.0).item() == pytest.approx(0.0, abs=1e-6)


def test_all_terms_add_up():
    torch.manual_seed(0)
    teacher, student = TinyBert(2), TinyBert(1)
    loss = DistillationLoss(student, Teacher(teacher), temperature=2.0, alpha=0.3, beta=0.5, gamma=0.25,
                            hidden={"layers.0": "layers.1"},
                            attention={"layers.0.attention": "layers.1.attention"})  # fmt: skip
    x = ids()
    logits = student(x)
    task = nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
    found = loss(logits, task, (x,))
    seen = {}
    for name, model in (("s", student), ("t", teacher)):
        place = 0 if name == "s" else 1
        model.layers[place].register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name + "h", o))
        model.layers[place].attention.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name + "a", o))
        seen[name] = model(x)
    mse = nn.functional.mse_loss
    expected = 0.7 * task + 0.3 * logits_loss(seen["s"], seen["t"], 2.0)
    expected = expected + 0.5 * mse(seen["sh"], seen["th"]) + 0.25 * mse(seen["sa"], seen["ta"])
    torch.testing.assert_close(found, expected)
    found.backward()
    assert student.embedding.weight.grad is not None and teacher.embedding.weight.grad is None


def test_staged_distillation_ends():
    teacher, student = TinyBert(1), TinyBert(1)
    loss = DistillationLoss(student, teacher, stop_step=2)
    task = torch.tensor(1.5)
    values = []
    for _ in range(4):
        values.append(loss(student(ids()), task, (ids(),)).item())
        loss.step()
    assert values[0] == values[1] != 1.5 and values[2:] == [1.5, 1.5]


def test_other_widths_need_a_learnt_map():
    teacher, student = TinyBert(1, width=32), TinyBert(1, width=16)
    x = ids()
    with pytest.raises(CompressionError, match=r"project=\{'layers.0': \(16, 32\)\}"):
        DistillationLoss(student, teacher, hidden={"layers.0": "layers.0"})(student(x), torch.tensor(0.0), (x,))
    loss = DistillationLoss(student, teacher, hidden={"layers.0": "layers.0"}, project={"layers.0": (16, 32)})
    assert [p.shape for p in loss.parameters()] == [(32, 16)]
    loss(student(x), torch.tensor(0.0), (x,)).backward()
    assert next(loss.parameters()).grad.abs().sum() > 0


def test_mistakes_are_named():
    teacher, student = TinyBert(1), TinyBert(1, words=10)
    with pytest.raises(CompressionError, match=r"the teacher has no module 'layer.0'; near names: layers.0"):
        DistillationLoss(student, teacher, hidden={"layers.0": "layer.0"})
    with pytest.raises(CompressionError, match="need the same classes"):
        x = ids(words=10)
        DistillationLoss(student, teacher)(student(x), torch.tensor(0.0), (x,))
    with pytest.raises(CompressionError, match="temperature > 0"):
        DistillationLoss(student, teacher, temperature=0.0)
    with pytest.raises(CompressionError, match="expected 8, 4 or None"):
        Teacher(teacher, bits=5)
    with pytest.raises(CompressionError, match="belong together"):
        Teacher(teacher, offload_to="cpu")


@pytest.mark.parametrize("settings", [{"bits": 8}, {"bits": 4}, {"offload_to": "cpu", "device": "cpu"}])
def test_a_teacher_is_frozen_and_may_be_small(settings):
    torch.manual_seed(0)
    model = TinyBert(1)
    x = ids()
    with torch.no_grad():
        expected = model(x)
    dense = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    teacher = Teacher(model, **settings).train()
    out = teacher(x)
    assert not out.requires_grad and not model.training and not any(p.requires_grad for p in teacher.parameters())
    assert (out - expected).abs().max() <= {8: 0.05, 4: 0.5, None: 0.0}[settings.get("bits")]
    if "bits" in settings:
        assert isinstance(model.layers[0].up, QuantizedLinear)
        assert sum(t.numel() * t.element_size() for t in model.state_dict().values()) < dense
