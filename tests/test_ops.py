"""Every operator: opcheck, and fakes that allocate what kernels return without asking sizes."""

import pytest
import torch
from conftest import HAS_CUDA
from plans import planned
from sum_calls import sum_samples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_ops import ops
from moe_ops.dispatch.tiles import ROW_TILES
from moe_ops.ops import STAGES
from moe_ops.scheme import quantize_weight
from moe_ops.testing import Problem, make_inputs

I32, FP8 = torch.int32, torch.float8_e4m3fn
K, E, H, I = 2, 4, 32, 16  # noqa: E741
MAP = torch.tensor([1, 0, -1, 2], dtype=I32)


def samples(device):
    """Calls of every operator on which all of the output is specified."""
    inputs = make_inputs(Problem(5, E, K, H, I, torch.float32, has_bias=True), device)
    x, w1, w2, weights, ids, _, b1, b2 = inputs
    plan = planned(ids, None, ROW_TILES, E)
    direct, order = plan._replace(topk_ids=ids), ops.moe_permutation(ids, None, E)
    h = ops.expert_matmul(x, w1, b1, None, *plan, ROW_TILES, K, "silu")
    rows = ops.gather_rows(x, order[2], order[0], K)
    y = ops.expert_matmul(h, w2, b2, None, *plan, ROW_TILES, 1).view(5, K, H)
    expert_map, columns = MAP.to(device), torch.rand(E, H, device=device).argsort(1).to(I32)
    valid, many = torch.tensor([4], dtype=I32, device=device), ids.repeat(3, 1)
    return {
        **routing_samples(x, weights, ids),
        "moe_align_block_size": [
            (ids, None, [8], E, True, False),
            (ids, expert_map, [16], E, False, False),
            (ids.long(), expert_map, list(ROW_TILES), 3, False, True),
        ],
        "plan_slots": [(many, None, [8], E), (many.long(), expert_map, list(ROW_TILES), 3)],
        "plan_permuted": [(order[0], 5 * K, [16]), (order[0], 5 * K, list(ROW_TILES))],
        "count_expert_num_tokens": [(ids, None, E), (ids.long(), expert_map, 3)],
        "moe_permutation": [(ids, None, E), (ids.long(), expert_map, 3)],
        "gather_rows": [(x, *order[2::-2], K), (x.t().contiguous().t(), *order[2::-2], K)],
        "order_columns": [(x, columns, ids, None), (x, columns[:3], ids.long(), expert_map)],
        "moe_unpermute": [(rows, weights, order[1], order[0]), (rows, None, order[1], None)],
        "expert_matmul": [
            (h, w2, b2, None, *plan, ROW_TILES, 1, "", True),
            (x, w1, None, weights, *direct, ROW_TILES, K),
            (x.t().contiguous().t(), w1, None, None, *plan, ROW_TILES, K),
            (x, w1, b1, weights, *plan, ROW_TILES, K, "silu", True),
            (x, w1, None, None, *direct, ROW_TILES, K, "swigluoai"),
            (x, w1, None, None, *plan, ROW_TILES, K, "gelu_no_mul"),
        ],
        "scaled_matmul": scaled_samples(x, w1, b1, plan) + decoded_samples(x, w1, b1, plan),
        **weight_only_samples(x, w1, b1, weights, plan),
        **quantized_samples(x, h, weights, ids),
        **batched_samples(x, weights, ids),
        "activation": [(x, "silu"), (x.t().contiguous().t(), "gelu_tanh_no_mul")],
        "moe_fused_mul_sum": [
            (y, weights, None, None, None, E),
            (y, None, ids, expert_map, valid, 3),
            (y.flatten(0, 1), weights, ids, None, None, E),
        ],
        "moe_fused_mul_sum.out": [(y, weights, None, None, None, E)],
        "gemm_sum": sum_samples(device),
    }  # fmt: skip


def routing_samples(x, weights, ids):
    """Routers, what adjusts their choice, and the choice among replicas."""
    device = x.device
    logits = torch.linspace(-2, 2, 5 * E, device=device).view(5, E)
    valid, bias = torch.tensor([4], dtype=I32, device=device), torch.zeros(E, device=device)
    words = torch.arange(5, device=device)
    table = words[:, None] % torch.tensor([E, E - 1], device=device)
    load = torch.zeros(6, dtype=I32, device=device)
    replicas = torch.tensor([[0, 4], [1, -1], [2, 5], [3, -1]], device=device)
    return {
        "fused_topk": [(logits, None, K, True, "softmax", 1.0),
                       (logits.half(), bias, K, False, "sigmoid", 2.0)],
        "topk_plan": [(logits.repeat(2, 1), bias, K, True, "softmax", 1.0,
                        MAP.to(device), list(ROW_TILES), 3)],
        "grouped_topk": [
            (logits, bias, K, True, "sqrtsoftplus", 2.5, 2, 1),
            (logits, None, K, False, "softmax", 1.0, 2, 2),
        ],
        "hash_topk": [(logits, words, table, True, "softmax", 1.0)],
        "sparsemixer": [(logits, 0.01)],
        "adjust_routing": [
            (weights, ids, bias, words > 2, E, 2, 0.5),
            (weights.half(), ids.long(), None, None, E, 0, 1.0),
        ],
        "zero_experts": [(x, weights, ids, 2, 0), (x, weights.half(), ids.long(), 1, -1)],
        "eplb_map_to_physical_and_record": [
            (ids, load, replicas, replicas.ne(-1).sum(1), None, None, torch.int64, 0),
            (ids.long(), load.long(), replicas, replicas.ne(-1).sum(1).int(),
             torch.tensor(True, device=device), valid, I32, 3),
            (ids, load, replicas, replicas.ne(-1).sum(1), None, None, I32, 0, valid),
        ],
    }  # fmt: skip


def scaled_samples(x, w1, b1, plan):
    """Scales of rows and of blocks; three activations.

    In int8: opcheck cannot compare fp8 inputs with what they were.
    """
    channel, block = (quantize_weight(w1, f"int8_{groups}") for groups in ("channel", "block16x32"))
    rows = (x * 8).round().clamp(-127, 127).to(torch.int8)
    scale, sizes = torch.full((len(x), 1), 0.125, device=x.device), (*plan, ROW_TILES, K)
    whole = (rows, scale, *channel[:2], None, b1, *sizes, "int8_channel", torch.float32)
    groups = torch.full((len(x), 1), 0.25, device=x.device)
    blocks = (rows, groups, *block[:2], None, None, *sizes, "int8_block16x32", torch.float32)
    names, calls = ("silu", "swigluoai", "gelu_no_mul"), (whole, blocks, (x, None, *whole[2:]))
    return [*calls, *[(*call, name) for call in calls for name in names]]  # of the last: plain rows


def quantized_samples(x, h, weights, ids):
    """Rows of tokens, of slots and of activations; computed and given scales."""
    one, expert_map = x.new_full((1,), 0.02), MAP.to(x.device)
    return {
        "moe_quantize": [
            (x, None, weights, ids, expert_map, 3, "int8:1x16:float32"),
            (x, None, None, ids, None, E, "fp8:*x*:float32"),
            (x.t().contiguous().t(), one, None, None, None, E, "fp8:1x*:float32:static"),
            (x.half(), None, None, ids, None, E, "int8:1x*:float32"),
        ],
        "activation_quantize": [
            (h, None, ids, None, E, "silu", "fp8:1x*:float32"),
            (h, None, None, None, E, "gelu_no_mul", "fp8:1x16:pow2"),
        ],
    }


def batched_samples(x, weights, ids):
    """Three experts with room for six rows."""
    counts, one = torch.tensor([3, 0, 6], dtype=I32, device=x.device), x.new_full((1,), 0.02)
    batch = x.view(5, 1, H).repeat(1, 6, 1)[:3].contiguous()
    turned = batch.transpose(1, 2).contiguous().transpose(1, 2)
    return {
        "plan_batched": [(counts, 6, [16]), (counts, 6, list(ROW_TILES))],
        "batched_dispatch": [
            (x, None, weights, ids, 1, 3, 4, "int8:1x*:float32"),
            (x, None, None, ids, 0, E, 2, "fp8:*x*:float32"),
            (x.t().contiguous().t(), None, weights, ids, 0, 2, 5, ""),
        ],
        "batched_rows": [(ids, 0, E, 2), (ids.long(), 1, 2, 5)],
        "batched_activation": [(batch, counts, "silu"), (turned, counts, "gelu_no_mul")],
        "batched_quantize": [
            (batch, None, counts, "fp8:1x16:float32"),
            (batch, one, counts, "int8:*x*:float32"),
        ],
        "batched_activation_quantize": [
            (batch, None, counts, "silu", "fp8:1x*:float32"),
            (turned, None, counts, "relu2", "int8:*x*:float32"),
        ],
    }


def weight_only_samples(x, w1, b1, weights, plan):
    """A scale a row, and groups with zero points; with and without a gate."""
    channel, groups = (quantize_weight(w1, s) for s in ("int8_w8a16", "int4_w4a16_g16_zp"))
    sizes = (*plan, ROW_TILES, K)
    whole = (x, *channel, b1, weights, *sizes, "int8_w8a16")
    pieces = (x, *groups, None, None, *sizes, "int4_w4a16_g16_zp")
    names = ("silu", "swigluoai", "gelu_no_mul")
    calls = (whole, pieces)
    return {"weight_only_matmul": [*calls, *[(*call, name) for call in calls for name in names]]}


def decoded_samples(x, w1, b1, plan):
    q, rows = quantize_weight(w1, "mxfp4"), ops.moe_quantize(x, *[None] * 4, 0, "fp4:1x32:e8m0")
    call = (*rows, *q[:2], None, b1, *plan, ROW_TILES, K, "mxfp4", torch.bfloat16)
    return [call, (*call, "silu"), (*call, "gelu_no_mul")]


def overload(qualified):
    name, _, which = qualified.partition(".")
    return getattr(getattr(torch.ops.moe_ops, name), which or "default")


def keywords(qualified, arguments):
    if not qualified.endswith(".out"):
        return {}
    inputs = arguments[0]
    return {"out": torch.empty(inputs.shape[0], inputs.shape[2], device=inputs.device)}


def outputs(result):
    """The tensors that an operator returned."""
    return result if isinstance(result, tuple) else () if result is None else (result,)


def test_every_operator_has_samples(device):
    assert set(samples(device)) == set(STAGES)


@pytest.mark.kernel
@pytest.mark.parametrize("qualified", STAGES)
def test_opcheck(qualified, device):
    for number, arguments in enumerate(samples(device)[qualified]):
        tests = ["test_autograd_registration", "test_faketensor"]
        tests += ["test_aot_dispatch_dynamic"] if number == 0 else []
        if FP8 not in [getattr(x, "dtype", None) for x in arguments]:
            tests.append("test_schema")  # which cannot compare these with what they were
        more = keywords(qualified, arguments)
        torch.library.opcheck(overload(qualified), arguments, more, test_utils=tests)


@pytest.mark.kernel
@pytest.mark.parametrize("qualified", STAGES)
def test_fakes_return_what_runs_return(qualified, device):
    """Shape, stride and dtype, on fake tensors of the device."""
    for arguments in samples(device)[qualified]:
        real = overload(qualified)(*arguments, **keywords(qualified, arguments))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = [mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments]
            extra = {k: mode.from_tensor(v) for k, v in keywords(qualified, arguments).items()}
            fake = overload(qualified)(*faked, **extra)
        for a, b in zip(outputs(real), outputs(fake), strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            assert a.dtype == b.dtype and a.device == b.device
            assert a.is_contiguous()


def symbolic_tokens(mode, env, unbacked):
    if unbacked:
        return env.create_unbacked_symint()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode.from_tensor(torch.empty(37, 1, device="meta"), symbolic_context=context).shape[0]


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("unbacked", [False, True])
def test_fakes_add_no_guard_on_the_tokens(fake_device, unbacked):
    """The stages one after another, with a number of tokens that nobody may ask for."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = symbolic_tokens(mode, env, unbacked)
    with mode:

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=fake_device)

        x, w1, w2 = empty(tokens, H), empty(E, 2 * I, H), empty(E, H, I)
        weights, ids = ops.fused_topk(empty(tokens, E), None, K, True, "softmax", 1.0)
        count = empty(E, dtype=I32)
        ops.moe_align_block_size(ids, count, ROW_TILES, E, True, True)
        plan = (ops.plan_slots(ids, count, ROW_TILES, E), ids, count)
        h = ops.expert_matmul(x, w1, None, None, *plan, ROW_TILES, K, "silu")
        y = ops.expert_matmul(h, w2, None, None, *plan, ROW_TILES, 1)
        out = ops.moe_fused_mul_sum(y.view(tokens, K, H), weights, ids, None, None, E)
        order = ops.moe_permutation(ids, None, E)
        rows = ops.gather_rows(x, order[2], order[0], K)
        back = ops.moe_unpermute(ops.activation(rows, "silu_no_mul"), weights, order[1], order[0])
        ops.count_expert_num_tokens(ids, None, E)
        load, replicas = empty(E + 2, dtype=I32), empty(E, 3, dtype=I32)
        ops.eplb_map_to_physical_and_record(ids, load, replicas, count, None, None, I32, 0)
    assert not env.guards
    assert out.shape[0] is tokens or str(out.shape[0]) == str(tokens)
    assert back.shape == out.shape


@pytest.mark.gpu
@pytest.mark.parametrize("qualified", STAGES)
def test_tensors_of_another_device_than_the_current_one(qualified):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for arguments in samples("cuda:1")[qualified]:
        there = overload(qualified)(*arguments, **keywords(qualified, arguments))
        moved = [a.to("cuda:0") if torch.is_tensor(a) else a for a in arguments]
        here = overload(qualified)(*moved, **keywords(qualified, moved))
        for a, b in zip(outputs(there), outputs(here), strict=True):
            assert a.device.index == 1 and torch.equal(a.to("cuda:0"), b)


@pytest.mark.skipif(not HAS_CUDA, reason="compares kernels with references on the GPU")
@pytest.mark.parametrize("qualified", [q for q in STAGES if "gemm" not in q])
def test_kernels_equal_references_in_layout(qualified, device):
    import importlib

    module = importlib.import_module(f"moe_ops.reference.{STAGES[qualified]}")
    for arguments in samples(device)[qualified]:
        kernel = overload(qualified)(*arguments, **keywords(qualified, arguments))
        reference = getattr(module, qualified.replace(".", "_"))(
            *arguments, **keywords(qualified, arguments)
        )
        for a, b in zip(outputs(kernel), outputs(reference), strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            if not a.dtype.is_floating_point:
                assert torch.equal(a, b)
