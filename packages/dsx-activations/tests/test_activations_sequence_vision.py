"""`sequence_parallel` for models of images: every rank gives them whole inputs, and losses and gradients are those of
one process. Tokens of an image do not divide (a class token); features of images lie across the border of two ranks.
"""

import copy

import dsx_comm
import pytest
import torch
from dsx_activations import ActivationArgumentError, SequenceLoader, sequence_parallel, token_mean
from dsx_testkit import run_ranks
from torch.nn import functional as F

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
IMAGE = 39


def vit(**further):
    import transformers as t

    torch.manual_seed(0)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = t.ViTConfig(**VISION, image_size=16, patch_size=4, num_labels=3, **quiet, **further)
    return t.ViTForImageClassification(config).double().train()


def llava():
    import transformers as t

    torch.manual_seed(0)
    tower = t.CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=8)
    config = t.LlavaConfig(vision_config=tower, text_config=t.LlamaConfig(**TEXT), image_token_id=IMAGE,
                           vision_feature_layer=-1)  # fmt: skip
    return t.LlavaForConditionalGeneration(config).double().train()


def qwen2_vl():
    import transformers as t

    torch.manual_seed(0)
    tower = {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
             "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    config = t.Qwen2VLConfig(
        vision_config=tower, text_config={**TEXT, "rope_parameters": rope}, image_token_id=IMAGE, video_token_id=38,
        vision_start_token_id=37,
    )  # fmt: skip
    return t.Qwen2VLForConditionalGeneration(config).double().train()


def check_gradients(model, single):
    right = {name: p.grad for name, p in single.named_parameters()}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dsx_comm.all_reduce(grad)
        expected = torch.zeros_like(grad) if right[name] is None else right[name]
        torch.testing.assert_close(grad / dsx_comm.get_world_size(), expected, rtol=1e-6, atol=1e-9,
                                   msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip


def images(rank, world):
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)  # 16 patches and a class token
    labels = torch.tensor([0, 2])
    for order, recomputes in (("plain", False), ("zigzag", True)):
        model = vit()
        single = copy.deepcopy(model)
        expected = single(pixel_values=pixels, labels=labels).loss
        expected.backward()
        if recomputes:
            model.gradient_checkpointing_enable()
        sp = sequence_parallel(model, order=order)
        for _ in range(2):  # a second forward is what the first one was
            model.zero_grad()
            loss = model(pixel_values=pixels, labels=labels).loss
            loss.backward()
        torch.testing.assert_close(loss, expected)
        check_gradients(model, single)
        with pytest.raises(ActivationArgumentError, match="got output_hidden_states"):
            model(pixels, output_hidden_states=True)
        with sp.paused():
            torch.testing.assert_close(model(pixel_values=pixels, labels=labels).loss, expected)
        if world > 1:
            with pytest.raises(ActivationArgumentError, match="have other inputs"):
                model(pixel_values=pixels + rank)
        sp.remove()
        torch.testing.assert_close(model(pixel_values=pixels, labels=labels).loss, expected)


def sample(kind):
    """Whole inputs of two samples of 15 tokens, of which 5 to 8 are an image's; the second one is padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 36, (2, 15), generator=generator)
    tokens[:, 5:9] = IMAGE
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if kind == "llava":
        batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    else:
        tokens[:, 4] = 37
        batch["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 16, generator=generator, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        batch["mm_token_type_ids"] = (tokens == IMAGE).int()
    return batch, tokens.masked_fill((mask == 0) | (tokens == IMAGE), -100)


def pictures_in_texts(rank, world):
    for kind, make, order in (("llava", llava, "zigzag"), ("qwen2_vl", qwen2_vl, "plain")):
        model, (batch, labels) = make(), sample(kind)
        single = copy.deepcopy(model)
        expected = F.cross_entropy(single(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        expected.backward()
        sp = sequence_parallel(model, order=order)
        (mine,) = SequenceLoader([{**batch, "labels": labels}], order=order, whole_inputs=True)
        targets = mine.pop("shift_labels")
        logits = model(**mine, use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = token_mean(total, (targets != -100).sum())
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        check_gradients(model, single)
        if world > 1:
            with pytest.raises(ActivationArgumentError, match=r"expected whole inputs.*whole_inputs=True"):
                model(input_ids=sp.shard(batch["input_ids"]))
        with pytest.raises(ActivationArgumentError, match="labels without shift_labels"):
            model(**batch, labels=labels)
        sp.remove()


def pooled(rank, world):
    import transformers as t

    small = {"vocab_size": 40, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    bert = t.BertForSequenceClassification(t.BertConfig(**small, intermediate_size=16))
    sequence_parallel(bert)
    tokens, places = torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None] + 3 * rank
    with pytest.raises(ActivationArgumentError, match="BertForSequenceClassification gives logits for all tokens"):
        bert(tokens, position_ids=places)
    inner = t.BertModel(t.BertConfig(**small, intermediate_size=16))
    sequence_parallel(inner)
    with pytest.raises(ActivationArgumentError, match="add_pooling_layer=False"):
        inner(tokens, position_ids=places)


def everything(rank, world):
    images(rank, world)
    pictures_in_texts(rank, world)
    if world > 1:
        pooled(rank, world)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_models_of_images(world):
    """One test for each number of ranks: most of its time is the import of transformers."""
    pytest.importorskip("transformers")
    run_ranks(everything, world, timeout=200)


def test_models_that_would_mean_something_else_are_refused():
    t = pytest.importorskip("transformers")
    tower = {**VISION, "image_size": 8, "patch_size": 4}
    clip = t.CLIPModel(t.CLIPConfig(
        text_config={**VISION, "vocab_size": 40, "max_position_embeddings": 16}, vision_config=tower, projection_dim=8
    ))  # fmt: skip
    with pytest.raises(ActivationArgumentError, match="CLIPModel has a part for texts that is not found"):
        sequence_parallel(clip)
    swin = t.SwinModel(t.SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2]))
    with pytest.raises(ActivationArgumentError, match="SwinModel has 3 lists of blocks"):
        sequence_parallel(swin)
    dino = t.DINOv3ViTModel(t.DINOv3ViTConfig(**tower))
    sp = sequence_parallel(dino)
    with pytest.raises(ActivationArgumentError, match="the blocks of DINOv3ViTModel are given tensors beside"):
        dino(torch.randn(1, 3, 8, 8))
    sp.remove()
    with pytest.raises(ActivationArgumentError, match="drop path"):
        sequence_parallel(t.Dinov2Model(t.Dinov2Config(**tower, drop_path_rate=0.1)))


def test_a_length_that_is_another_one():
    pytest.importorskip("transformers")
    model = vit()
    sp = sequence_parallel(model.vit, length=9)
    with pytest.raises(ActivationArgumentError, match="got 17 tokens, expected the length that was given, 9"):
        model(torch.randn(1, 3, 16, 16, dtype=torch.float64))
    sp.remove()
