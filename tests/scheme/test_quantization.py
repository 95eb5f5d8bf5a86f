"""moe_kernel_quantize_input: shapes, layouts, errors, and one compilation for all of them."""

import importlib

import pytest
import torch
from conftest import INTERPRETED
from quantize_oracle import assert_bits, random_rows
from strategies import DTYPES
from table_items import every_row

import moe_ops
from moe_ops.scheme import SCHEMES, dequantize_rows, parse_quant

pytestmark = pytest.mark.kernel
reference = importlib.import_module("moe_ops.reference.quantize")
FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAMED = {
    "mxfp8": ("fp8:1x32:e8m0", FP8, 130, torch.uint8),
    "mxfp6_e2m3": ("fp6_e2m3:1x32:e8m0", torch.uint8, 130, torch.uint8),
    "mxfp6_e3m2": ("fp6_e3m2:1x32:e8m0", torch.uint8, 130, torch.uint8),
    "mxfp4": ("fp4:1x32:e8m0", torch.uint8, 65, torch.uint8),
    "nvfp4": ("fp4:1x16:e4m3:global_scale", torch.uint8, 65, FP8),
}
"""The formats with names: their keys, and the results for 130 columns."""


def global_scale(name, device="cpu"):
    return torch.tensor([0.0123], device=device) if name == "nvfp4" else None


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_named_formats(name, dtype, device):
    """Byte by byte the reference quantizer, which `test_quantize_micro` has derived; and back."""
    key, element, width, scale_dtype = NAMED[name]
    quant, given = parse_quant(key), global_scale(name)
    if name in SCHEMES:  # quantized tokens and public function alike
        assert SCHEMES[name].activation in (quant, None)
    x = random_rows(2, 5, 130, dtype)
    wanted = reference.moe_quantize(x, given, None, None, None, 0, key)
    for block_shape in (None, [1, quant.group.cols]):
        q, scale = moe_ops.moe_kernel_quantize_input(
            x.to(device), global_scale(name, device), name, False, block_shape
        )
        assert q.dtype == element and q.shape == (5, width)
        assert scale.dtype == scale_dtype and scale.shape == (5, -(-130 // quant.group.cols))
        assert_bits(q, wanted[0])
        assert_bits(scale, wanted[1])
    back = dequantize_rows(q.cpu(), scale.cpu(), quant) * (1 if given is None else given)
    groups = torch.nn.functional.pad(x.float().abs(), (0, 30)).unflatten(1, (-1, 32)).amax(2)
    steps = {"mxfp8": 2**-4, "mxfp6_e2m3": 2**-4, "mxfp6_e3m2": 2**-3, "mxfp4": 0.25, "nvfp4": 0.25}
    bound = steps[name] * groups.repeat_interleave(32, 1)[:, :130] + 2.0**-100
    inside = groups.amax(1) < 448 * 6 * 0.0123 if name == "nvfp4" else groups.amax(1) >= 0
    inside &= groups.amax(1) > 0.1  # scales of nvfp4 are e4m3 numbers: not of any size
    assert inside.any() and ((back - x.float()).abs() <= bound)[inside].all()


@pytest.mark.parametrize("name", NAMED)
def test_named_formats_of_batched_rows(name, device):
    """Valid rows as by themselves; padding is not read, and zeros."""
    counts = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    x = random_rows(3, 12, 130, torch.bfloat16).view(3, 4, 130).to(device)
    given = global_scale(name, device)
    flat = moe_ops.moe_kernel_quantize_input(x.flatten(0, 1), given, name, False)
    for expert, count in enumerate(counts.tolist()):
        x[expert, count:] = torch.nan
    arguments = (x, given, 4, 3, 130, counts, name, False)
    batched = moe_ops.functional.batched_moe_kernel_quantize_input(*arguments)
    for a, b in zip(batched, flat, strict=True):
        assert a.is_contiguous() and a.shape == (3, 4, b.shape[1]) and a.dtype == b.dtype
        for expert, count in enumerate(counts.tolist()):
            assert_bits(a[expert, :count], b.view(a.shape)[expert, :count])
            assert not a[expert, count:].cpu().view(torch.uint8).any()


def test_strided_rows(device):
    x = random_rows(0, 8, 128, torch.bfloat16).to(device)
    for view in (x[:, :64], x[::2], x.t().contiguous().t()):
        for a, b in zip(
            moe_ops.moe_kernel_quantize_input(view, None, FP8, True),
            moe_ops.moe_kernel_quantize_input(view.contiguous(), None, FP8, True),
            strict=True,
        ):
            assert_bits(a, b)


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ((None, FP8, False), (1,)),
        ((None, INT8, False), (1,)),
        ((None, FP8, True), (5, 1)),
        ((None, FP8, False, [128, 128]), (5, 2)),
        ((None, INT8, False, [64, 32]), (5, 5)),
        ((torch.tensor([0.1]), FP8, False), (1,)),
        ((torch.full((5, 1), 0.1), INT8, True), (5, 1)),
    ],
)
def test_the_public_function(arguments, shape, device):
    x = random_rows(0, 5, 130, torch.bfloat16).to(device)
    scale, *rest = arguments
    q, q_scale = moe_ops.moe_kernel_quantize_input(
        x, None if scale is None else scale.to(device), *rest
    )
    assert q.dtype == rest[0] and q_scale.shape == shape and q_scale.dtype == torch.float32


def test_no_dtype_passes_through(device):
    x, scale = torch.ones(2, 4, device=device), torch.ones(1, device=device)
    q, q_scale = moe_ops.moe_kernel_quantize_input(x, scale, None, False)
    assert q is x and q_scale is scale


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.ones(2, 4, 4), (None, FP8, False), ValueError, "A must have 2 axes"),
        (torch.ones(2, 4).int(), (None, FP8, False), TypeError, "A must have a dtype"),
        (torch.ones(2, 4), (None, torch.uint8, False), NotImplementedError, "quant_dtype must be"),
        (torch.ones(2, 4), (None, "nvfp6", False), NotImplementedError, "mxfp4.*, got 'nvfp6'"),
        (torch.ones(2, 4), (None, "nvfp4", False), ValueError, "A_scale must be a Tensor for nvf"),
        (torch.ones(2, 4), (torch.ones(1), "mxfp8", False), ValueError, "A_scale must be None for"),
        (torch.ones(2, 4), (torch.ones(2), "nvfp4", False), ValueError, "must be one element = 1"),
        (torch.ones(2, 4), (None, "mxfp4", True), ValueError, "per_act_token_quant must be False"),
        (torch.ones(2, 4), (None, "mxfp4", True, [1, 32]), ValueError, "per_act_token_quant must"),
        (torch.ones(2, 4), (None, "mxfp4", False, [1, 16]), ValueError, "must be 32 for mxfp4"),
        (torch.ones(2, 5), (None, "mxfp4", False), ValueError, r"A.shape\[1\] must be even for mx"),
        (torch.ones(2, 4), (None, FP8, True, [128, 128]), ValueError, "per_act_token_quant must"),
        (torch.ones(2, 4), (None, FP8, False, [128, 96]), ValueError, r"block_shape\[1\] must be"),
        (torch.ones(2, 4), (torch.ones(1), FP8, False, [16, 16]), ValueError, "must be None with"),
        (torch.ones(2, 4), (torch.ones(2), FP8, False), ValueError, "must be one element = 1"),
        (torch.ones(2, 4), (torch.ones(3, 1), FP8, True), ValueError, "2 tokens of A, got 3"),
        (torch.ones(2, 4), (torch.ones(1).int(), FP8, False), TypeError, "A_scale must have a"),
    ],
)  # fmt: skip
def test_errors(x, arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.moe_kernel_quantize_input(x, *arguments)


@pytest.mark.skipif(INTERPRETED, reason="the graph is that of references")
@pytest.mark.parametrize(
    "how",
    [(FP8, False, None), (FP8, True, None), (FP8, False, [128, 128]), *((n, False) for n in NAMED)],
)
def test_one_compilation_for_every_number_of_rows(how, device):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    given = global_scale(how[0], device)

    def quantized(x):
        return moe_ops.moe_kernel_quantize_input(x, given, *how)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend=counter)
        for rows in (7, 3, 1, 0, 16):
            x = random_rows(rows, rows, 130, torch.bfloat16).to(device)
            for a, b in zip(compiled(x), quantized(x), strict=True):
                assert_bits(a, b)
    assert counter.frame_count == 1


@every_row("scheme", ["fp8_tensor", "fp8_channel", "fp8_block128", "int4_w4a16_g32_zp", "nvfp4"])
def test_dequantization_names_a_field_of_another_size_or_place(scheme):
    q = moe_ops.quantize_weight(torch.randn(4, 64, 64), scheme)
    with pytest.raises(ValueError, match="q.data must have 3 axes"):
        moe_ops.dequantize_weight(q._replace(data=q.data[0]), scheme)
    with pytest.raises(TypeError, match="q.data must have a dtype"):
        moe_ops.dequantize_weight(q._replace(data=q.data.float()), scheme)
    for name in ("scale", "zero_point", "global_scale"):
        x = getattr(q, name)
        for other in () if x is None else (x[:1], torch.cat([x] * 3), [1.0], x.to("meta")):
            with pytest.raises((TypeError, ValueError), match=f"q.{name} must"):
                moe_ops.dequantize_weight(q._replace(**{name: other}), scheme)
