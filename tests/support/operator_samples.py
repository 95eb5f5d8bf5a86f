"""Sample calls of every operator."""

from functools import cache

import torch
from plans import planned
from products import plain_product, weight_of
from sum_calls import sum_samples
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from windows_here import Ranks, alone

from moe_ops import ops
from moe_ops.scheme import pack_weight, quantize_weight
from moe_ops.testing import Problem, make_inputs

I32, FP8 = torch.int32, torch.float8_e4m3fn
K, E, H, I = 2, 4, 32, 16  # noqa: E741
MAP = torch.tensor([1, 0, -1, 2], dtype=I32)
OF_WINDOWS = ("symmetric_send", "symmetric_return", "symmetric_send_batched")
"""Operators that find memory by the very tensor of its addresses, and count calls in another.

With a copy of these tensors, or other numbers in them, a call fails or writes anywhere.
`ops/test_symmetric*.py` and `window_case` of `sanitize_operators.py` test these operators.
"""
COPIED = [q for q in ops.STAGES if q not in OF_WINDOWS]
"""The others, which tests call with copies of arguments and with other numbers in them."""


def samples(device):
    """Calls of every operator on which all of the output is specified."""
    inputs = make_inputs(Problem(5, E, K, H, I, torch.float32, has_bias=True), device)
    x, w1, w2, weights, ids, _, b1, b2 = inputs
    plan = planned(ids, None, E)
    direct, order = plan._replace(topk_ids=ids), ops.moe_permutation(ids, None, E)
    h = plain_product(ops, x, w1, b1, None, [*plan], K, "silu")
    rows = ops.gather_rows(x, order[2], order[0], K)
    y = plain_product(ops, h, w2, b2, None, [*plan], 1).view(5, K, H)
    expert_map, columns = MAP.to(device), torch.rand(E, H, device=device).argsort(1).to(I32)
    valid, many = torch.tensor([4], dtype=I32, device=device), ids.repeat(3, 1)
    return {
        **routing_samples(x, weights, ids),
        "moe_align_block_size": [
            (ids, None, 8, E, True, False),
            (ids, expert_map, 16, E, False, False),
            (ids.long(), expert_map, 32, 3, False, True),
        ],
        "plan_slots": [
            (many, None, E, "unquantized", torch.float32),
            # One tile on every device: references on the CPU make the same plan.
            (many.long(), expert_map, 3, "unquantized", torch.float32, True),
        ],
        "plan_permuted": [(order[0], 5 * K, "mxfp8"), (order[0], 5 * K, "unquantized", True)],
        "count_expert_num_tokens": [(ids, None, E), (ids.long(), expert_map, 3)],
        "adapter_ids": [
            (ids, None, None, E, 2),
            (ids.long(), expert_map, torch.arange(-1, len(ids) - 1, device=ids.device), 3, 2),
        ],
        "moe_permutation": [(ids, None, E), (ids.long(), expert_map, 3)],
        "gather_rows": [(x, *order[2::-2], K), (x.t().contiguous().t(), *order[2::-2], K)],
        "order_columns": [(x, columns, ids, None), (x, columns[:3], ids.long(), expert_map)],
        "moe_unpermute": [(rows, weights, order[1], order[0]), (rows, None, order[1], None)],
        "expert_product": [
            *plain_samples((x, h), (w1, w2), (b1, b2), weights, plan, direct),
            *scaled_samples(x, w1, b1, plan),
            *decoded_samples(x, w1, b1, plan),
            *stored_samples(x, w1, b1, weights, plan),
        ],
        "activated_product": activated_samples(x, w1, b1, weights, plan, direct),
        "expert_product.out": [
            (h, [w2], None, [*plan], 1),
            (x, [w1], weights, [*direct], K),
            (x.t().contiguous().t(), [w1.mT.contiguous().mT], weights, [*plan], K),
            (h, [w2], None, [*plan], 1, False, 1, 2),
        ],
        "expert_product_sum": sum_samples(device) + stored_sum_samples(x, w1, b1, weights, direct),
        "expert_dgrad": dgrad_samples(x, w1, plan),
        **quantized_samples(x, h, weights, ids),
        **batched_samples(x, weights, ids),
        **window_samples(x, weights, ids),
        "activation": [(x, "silu"), (x.t().contiguous().t(), "gelu_tanh_no_mul")],
        **gradient_samples(x, h, b2, weights, ids, plan),
        "moe_fused_mul_sum": [
            (y, weights, None, None, None, E),
            (y, None, ids, expert_map, valid, 3),
            (y.flatten(0, 1), weights, ids, None, None, E),
        ],
        "moe_fused_mul_sum.out": [(y, weights, None, None, None, E)],
    }  # fmt: skip


def plain_samples(rows, w, bias, weights, plan, direct):
    """Rows of tokens and of slots, by slot and permuted, with and without a plan."""
    (x, h), (w1, w2), (b1, b2) = rows, w, bias
    plain = ("unquantized", torch.float32)
    return [
        (h, None, [w2, b2], None, [*plan], 1, *plain, "", True),
        (x, None, [w1], weights, [*direct], K, *plain),
        (x.t().contiguous().t(), None, [w1], None, [*plan], K, *plain),
        (x, None, [w1, b1], weights, [*plan], K, *plain, "silu", True),
        (x, None, [w1], None, [*direct], K, *plain, "swigluoai"),
        (x, None, [w1], None, [*plan], K, *plain, "gelu_no_mul"),
    ]


def activated_samples(x, w1, b1, weights, plan, direct):
    """A product and its activation, of rows and weights of every kind."""
    scheme = ("unquantized", torch.float32)
    return [
        (x, None, [w1, b1], weights, [*plan], K, *scheme, "silu", True),
        (x, None, [w1], None, [*direct], K, *scheme, "swigluoai"),
        (x, None, [w1, b1], None, [*plan], K, *scheme, "gelu_no_mul"),
        *((*call, "silu") for call in scaled_samples(x, w1, b1, plan)[:3]),
        *((*call, "swigluoai") for call in decoded_samples(x, w1, b1, plan)[:1]),
        *((*call, "silu") for call in stored_samples(x, w1, b1, weights, plan)[:2]),
    ]


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
        "grouped_topk": [
            (logits, bias, K, True, "sqrtsoftplus", 2.5, 2, 1),
            (logits, None, K, False, "softmax", 1.0, 2, 2),
        ],
        "hash_topk": [(logits, words, table, True, "softmax", 1.0)],
        "topk_backward": [
            (weights, logits, ids, True, "softmax", 1.0),
            (weights.t().contiguous().t(), logits.half(), ids.long(), False, "sigmoid", 2.5),
        ],
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
            (ids.t().contiguous().t(), load, replicas, replicas.ne(-1).sum(1), None, None, I32, 0,
             valid),
        ],
    }  # fmt: skip


def gradient_samples(x, h, b2, weights, ids, plan):
    """Rows of tokens and of slots, on either side; with and without a plan."""
    direct, turned = plan._replace(topk_ids=ids), h.t().contiguous().t()
    expert_map, layer = MAP.to(x.device), (E, "unquantized")
    product = torch.cat([h, h + 1], 1)
    return {
        "expert_wgrad": [
            (x, h, weights, [*direct], *layer, torch.float32),
            (turned, x.repeat_interleave(K, 0), None, [*plan], *layer, torch.bfloat16),
        ],
        "expert_wgrad.out": [
            (x, h, weights, [*direct], E),
            (turned, x.repeat_interleave(K, 0), None, [*plan], E),
        ],
        "expert_bias_grad": [(x, weights, [*direct], *layer), (h, None, [*plan], *layer)],
        "slot_products": [
            (x, b2, ids, None, E, True),
            (x.half(), x.repeat_interleave(K, 0), ids.long(), None, E, False),
            (x, b2[:3], ids, expert_map, 3, True),
        ],
        "moe_activation_backward": [
            (h, product, weights, ids, None, E, "silu", True),
            (turned, product, None, ids.long(), None, E, "swigluoai", True),
            (h, h + 1, None, ids, None, E, "gelu_no_mul", False),
        ],
    }


def scaled_samples(x, w1, b1, plan):
    """Scales of rows and of blocks; three activations.

    In int8: opcheck cannot compare fp8 inputs with what they were.
    """
    channel, block = (quantize_weight(w1, f"int8_{groups}") for groups in ("channel", "block16x32"))
    rows = (x * 8).round().clamp(-127, 127).to(torch.int8)
    scale, sizes = torch.full((len(x), 1), 0.125, device=x.device), ([*plan], K)
    whole = (rows, scale, weight_of(channel, b1), None, *sizes, "int8_channel", torch.float32)
    groups = torch.full((len(x), 1), 0.25, device=x.device)
    blocks = (rows, groups, weight_of(block), None, *sizes, "int8_block16x32", torch.float32)
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
        "plan_batched": [(counts, 6, "fp8_channel"), (counts, 6, "unquantized", True)],
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


alone_on = cache(alone)
"""Windows of one rank on a device, which live as long as the samples."""
alone_batched = cache(lambda device: Ranks.of(1, device, 8, 32, 2, 4, E))
"""Likewise, with room for E experts."""


def window_samples(x, weights, ids):
    """Sends of one rank, and what comes back; with padding, and scales that travel."""
    (window,), one = alone_on(str(x.device)).windows, x.new_full((1,), 0.02)
    where, everyone = (window.peers, window.state), x.new_zeros(E, dtype=I32)
    routing, first = (weights, ids), (weights[:, :1], ids[:, :1].long())
    rows = (x.new_zeros(x.shape, dtype=torch.int8), x.new_ones(5, 2))
    turned = x.t().contiguous().t()
    return {
        "symmetric_send": [
            (x, None, *routing, everyone, *where, 7, E, False, ""),
            (turned, None, *first, None, *where, 5, E, True, "int8:1x*:float32"),
            (x.half(), one, *routing, everyone, *where, 8, E, False, "int8:*x*:float32:static"),
            (*rows, *routing, None, *where, 6, E, False, ""),
        ],
        "symmetric_return": [
            (torch.cat([x, x])[:8], everyone, *where, 2),
            (turned.half(), None, *where, 1),
        ],
        "symmetric_send_batched": batched_window_samples(x, weights, ids),
    }


def batched_window_samples(x, weights, ids):
    """Sends of one token, by one program: in the interpreter one cannot wait for another."""
    (window,), one = alone_batched(str(x.device)).windows, x.new_full((1,), 0.02)
    experts = torch.arange(E, dtype=I32, device=x.device)
    where = (torch.stack([experts * 0, experts]), experts, window.peers, window.state, 1)
    routing = (weights[:1], ids[:1])
    return [
        (x[:1], None, *routing, *where, False, ""),
        (x[:1].half(), None, weights[:1], ids[:1].long(), *where, True, "int8:1x16:float32"),
        (x[:1], one, *routing, *where, False, "int8:*x*:float32:static"),
    ]


def stored_weights(w1):
    """Weights that alone are quantized: with a scale a row, and groups with zero points."""
    return [(quantize_weight(w1, s), s) for s in ("int8_w8a16", "int4_w4a16_g16_zp")]


def stored_samples(x, w1, b1, weights, plan):
    """With and without a gate."""
    (channel, one), (groups, two) = stored_weights(w1)
    calls = (
        (x, None, weight_of(channel, b1), weights, [*plan], K, one, torch.float32),
        (x, None, weight_of(groups), None, [*plan], K, two, torch.float32),
    )
    names = ("silu", "swigluoai", "gelu_no_mul")
    return [*calls, *[(*call, name) for call in calls for name in names]]


def stored_sum_samples(x, w1, b1, weights, direct):
    (channel, one), (groups, two) = stored_weights(w1)
    h = x.repeat_interleave(K, 0)
    return [
        (h, None, weight_of(channel, b1), weights, [*direct], one, torch.float32),
        (h, None, weight_of(groups), None, [*direct], two, torch.float32),
    ]


def dgrad_samples(x, w1, plan):
    (channel, one), (groups, two) = stored_weights(w1)
    gate_up, sizes = torch.cat([x, x + 1], 1)[:, : w1.shape[1]].contiguous(), ([*plan], K)
    packed = pack_weight(quantize_weight(w1.repeat(1, 2, 2), one), one)
    return [
        (gate_up, *channel, *sizes, one),
        (gate_up.t().contiguous().t(), *groups, *sizes, two),
        (gate_up.repeat(1, 2), *packed, *sizes, one),
    ]


def decoded_samples(x, w1, b1, plan):
    q, rows = quantize_weight(w1, "mxfp4"), ops.moe_quantize(x, *[None] * 4, 0, "fp4:1x32:e8m0")
    call = (*rows, weight_of(q, b1), None, [*plan], K, "mxfp4", torch.bfloat16)
    return [call, (*call, "silu"), (*call, "gelu_no_mul")]


def overload(qualified):
    name, _, which = qualified.partition(".")
    return getattr(getattr(torch.ops.moe_ops, name), which or "default")


def keywords(qualified, arguments):
    if qualified == "expert_product.out":
        a, (w, *_), _, _, top_k, *place = arguments
        first, step = place[1:] or (0, 1)
        return {"out": a.new_ones(len(a) * top_k, first + step * w.shape[1])}
    if qualified == "expert_wgrad.out":
        dy, x, _, _, experts, *_ = arguments
        return {"out": dy.new_ones(experts, dy.shape[1], x.shape[1], dtype=torch.float32)}
    if not qualified.endswith(".out"):
        return {}
    inputs = arguments[0]
    return {"out": torch.empty(inputs.shape[0], inputs.shape[2], device=inputs.device)}


def outputs(result):
    """The tensors that an operator returned."""
    return result if isinstance(result, tuple) else () if result is None else (result,)


def symbolic_tokens(mode, env, unbacked):
    if unbacked:
        return env.create_unbacked_symint()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode.from_tensor(torch.empty(37, 1, device="meta"), symbolic_context=context).shape[0]


def two_slots(call):
    """A GEMM of two slots, whose ids tell its tiles: no plan is read."""
    rows, k = 2 // call["top_k"], len(call["a"])
    given = {name: x for name, x in call.items() if name in ("a", "a_scale") and x is not None}
    cut = {name: x[:rows] for name, x in given.items() if len(x) == k}
    weights = {name: x[:1] for name, x in call.items() if name == "topk_weights" and x is not None}
    ids = torch.empty(1, 2, dtype=torch.int32, device=call["a"].device)
    return {**call, **cut, **weights, "tiles": [None, ids, ids.new_empty(5)]}


cached_samples = cache(samples)


@cache
def called(qualified, device):
    """Calls of an operator by argument: its samples, and what else takes another way."""
    names = [argument.name for argument in overload(qualified)._schema.arguments]
    several = [dict(zip(names, call, strict=False)) for call in cached_samples(device)[qualified]]
    if "top_k" in names and "tiles" in names:
        several += [two_slots(c) for c in {c.get("scheme"): c for c in several[::-1]}.values()]
    for name in ("expert_num_tokens", "expert_map"):
        given = [call for call in several if call.get(name) is not None]
        several += [{**call, name: call[name].long()} for call in given[:1]]
    return several
