"""The op builders' names: what they load works under the names and arguments of scripts, what is elsewhere names the
way.
"""

import dsx_nvme
import dsx_ops
import pytest
import torch
from dsx_compat import op_builder

DEEPSPEED_NAMES = (
    *("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLamb", "FusedLion", "AsyncIO", "GDS", "Quantizer"),
    *("FPQuantizer", "RandomLTD", "SparseAttn", "Transformer", "StochasticTransformer", "Utils", "EvoformerAttn"),
    *("PinMemory", "DeepCompile", "Inference"),
)
ELSEWHERE = {"SparseAttn": "dsx_sparse_attn", "DeepCompile": "torch.compile"}


@pytest.mark.parametrize("name", DEEPSPEED_NAMES)
def test_every_name_is_there_and_loads_or_names_the_way(name):
    builder = getattr(op_builder, f"{name}Builder")()
    assert op_builder.ALL_OPS[builder.NAME] is type(builder) and builder.NAME.islower()
    assert isinstance(builder.is_compatible(), bool)
    if isinstance(builder, op_builder.ElsewhereBuilder):
        with pytest.raises(dsx_ops.OpsError, match=ELSEWHERE.get(name, name)):
            builder.load()
        assert not builder.is_compatible() and "not in dsx" in builder.why_not()
        return
    if name in ("AsyncIO", "GDS"):
        assert type(builder) is getattr(dsx_nvme, f"{name}Builder") and builder.load() is dsx_nvme
        return
    assert vars(builder.load())
    assert builder.is_compatible() == dsx_ops.native_status()["native"]
    assert bool(builder.why_not()) != builder.is_compatible()


def test_utilities_and_classes_are_those_of_the_package():
    assert op_builder.UtilsBuilder().load().flatten([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]
    assert op_builder.CPUAdamBuilder().load().CPUAdam is dsx_ops.DeepSpeedCPUAdam


@pytest.fixture
def handle():
    return op_builder.QuantizerBuilder().load()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["Symmetric", "Asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_codes_and_params_have_the_shapes_scripts_expect_and_come_back(handle, bits, kind, dtype):
    x, groups = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype), 12
    how = getattr(handle, kind)
    codes, params = handle.quantize(x, groups, bits, how)
    assert codes.dtype == torch.int8 and codes.shape == (6, 32 * bits // 8)
    assert params.dtype == torch.float32 and params.shape == (groups, 1 if kind == "Symmetric" else 2)
    for back, wanted in ((handle.dequantize, torch.float16), (handle.dequantize_fp32, torch.float32)):
        got = back(codes, params, groups, bits, how)
        assert got.dtype == wanted and got.shape == x.shape
        rows, step = x.float().view(groups, -1), 1.0 / (2 ** (bits - 1) - 1)
        error = (got.float().view(groups, -1) - rows).abs()
        assert (error <= rows.abs().amax(1, keepdim=True) * step * 0.51 + 1e-2).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("devices", [4, 8])
def test_the_exchange_of_two_nodes_adds_up(handle, bits, devices):
    """swizzle_quant, quantized_reduction, dequantize as a hierarchical all-to-all calls them; and the same with error
    feedback.
    """
    nodes, x = 2, torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    groups = 64
    swizzled = x.view(nodes, devices, -1).permute(1, 0, 2).reshape(x.shape)
    codes, params = handle.swizzle_quant(x, groups, bits, handle.Symmetric, 1, nodes, devices)
    said = handle.dequantize_fp32(codes, params, params.numel(), bits, handle.Symmetric).view(x.shape)
    torch.testing.assert_close(said, swizzled, rtol=0, atol=0.6 if bits == 4 else 0.04)
    total = said.view(devices, -1).sum(0)
    out, scales = handle.quantized_reduction(codes, params, groups, groups // devices, bits, handle.Symmetric, devices)
    assert out.numel() == codes.numel() // devices and scales.shape == (groups // devices, 1)
    got = handle.dequantize_fp32(out, scales, scales.numel(), bits, handle.Symmetric).reshape(-1)
    size = 4096 // groups
    width = total.view(-1, size).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((got - total).view(-1, size).abs() <= width * 0.51).all()

    for dtype in (torch.float32, torch.float16):
        error = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        before = error.float().clone()
        codes, params = handle.loco_swizzle_quant(x, error, 0.0, groups, bits, handle.Symmetric, 1, nodes, devices)
        said = handle.dequantize_fp32(codes, params, params.numel(), bits, handle.Symmetric).view(x.shape)
        torch.testing.assert_close(swizzled + before, said + error.float(), rtol=1e-3, atol=1e-3)
        total = said.view(devices, -1).sum(0)
        error = torch.randn(total.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        before = error.float().clone()
        how = (groups, groups // devices, bits, handle.Symmetric, devices)
        out, scales = handle.loco_quantized_reduction(codes, params, error, 0.0, *how)
        got = handle.dequantize_fp32(out, scales, scales.numel(), bits, handle.Symmetric).reshape(-1)
        torch.testing.assert_close(total + before, got + error.float(), rtol=1e-3, atol=2e-3)


def test_beta_mixes_the_old_error_in(handle):
    x, error = torch.full((8,), 0.3), torch.full((8,), 1.0)
    x[0] = 2.0
    codes, params = handle.loco_swizzle_quant(x, error, 0.25, 1, 4, handle.Symmetric, 1, 1, 1)
    said = handle.dequantize_fp32(codes, params, 1, 4, handle.Symmetric)
    torch.testing.assert_close(error, 0.25 + 0.75 * (x + 1.0 - said))


@pytest.mark.parametrize("name", ["ds_quantize", "ds_sr_quantize", "ds_quantize_asym", "ds_sr_quantize_asym"])
def test_rounding_in_place_by_dtype(handle, name):
    for suffix, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        x = torch.linspace(-1, 1, 64).to(dtype)
        got = getattr(handle, f"{name}_{suffix}")(x, 4, 8)
        assert got is x
        torch.testing.assert_close(x.float(), torch.linspace(-1, 1, 64), rtol=0, atol=0.02)
        with pytest.raises(dsx_ops.errors.TensorError):
            getattr(handle, f"{name}_{suffix}")(x.double(), 4, 8)


def test_weights_that_were_quantised_beforehand(handle):
    scale, smallest = torch.tensor([[2.0], [0.5]]).half(), torch.tensor([[-1.0], [3.0]]).half()
    codes = torch.tensor([[0, 15, 7, 2], [1, 2, 3, 4]], dtype=torch.uint8)
    wanted = (codes.float() / scale.float() + smallest.float()).half()
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    assert torch.equal(handle.dequantize_int4_to_half_experimental(packed, scale, smallest, 2, 4), wanted)
    assert torch.equal(handle.dequantize_int8_to_half_experimental(codes, scale, smallest, 2, 4), wanted)
    with pytest.raises(dsx_ops.errors.TensorError, match="expected 3 groups of 4"):
        handle.dequantize_int8_to_half_experimental(codes, scale, smallest, 3, 4)


def test_groups_that_do_not_divide_are_refused(handle):
    with pytest.raises(dsx_ops.errors.TensorError, match="groups: got 5, expected a divisor of the 64 elements"):
        handle.quantize(torch.ones(64), 5, 8, handle.Symmetric)


def test_adam_by_its_raw_functions():
    """create, update, roll back: the numbers of torch.optim.AdamW, and back to where it began."""
    handle = op_builder.CPUAdamBuilder().load()
    handle.create_adam(3, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    p, m, v = torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.zeros(100), torch.zeros(100)
    twin = torch.nn.Parameter(p.clone())
    oracle = torch.optim.AdamW([twin], lr=0.01, weight_decay=0.1)
    kept = []
    for step in (1, 2):
        kept.append((p.clone(), m.clone(), v.clone()))
        grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
        numbers = (3, step, 0.01, 0.9, 0.999, 1e-8, 0.1, True)
        assert handle.adam_update(*numbers, p, grad, m, v) == 0
        twin.grad = grad
        oracle.step()
        torch.testing.assert_close(p, twin.detach(), rtol=2e-6, atol=1e-7)
    handle.adam_rollback(*numbers, p, grad, m, v)
    for got, wanted in zip((p, m, v), kept[1]):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    handle.destroy_adam(3)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="optimizer_id: got 3"):
        handle.adam_update(*numbers, p, grad, m, v)
