"""moe_kernel_quantize_input: shapes, layouts, errors, and one compilation for all of them."""

import pytest
import torch
from quantize_oracle import assert_bits, random_rows

import moe_ops

pytestmark = pytest.mark.kernel
FP8, INT8 = torch.float8_e4m3fn, torch.int8


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


@pytest.mark.parametrize("group", [(False, None), (True, None), (False, [128, 128])])
def test_one_compilation_for_every_number_of_rows(group, device):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    per_row, block_shape = group

    def quantized(x):
        return moe_ops.moe_kernel_quantize_input(x, None, FP8, per_row, block_shape)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend=counter)
        for rows in (7, 3, 1, 0, 16):
            x = random_rows(rows, rows, 130, torch.bfloat16).to(device)
            for a, b in zip(compiled(x), quantized(x), strict=True):
                assert_bits(a, b)
    assert counter.frame_count == 1
