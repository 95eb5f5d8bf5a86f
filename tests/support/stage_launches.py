"""Launches of whole stages, which compile tests share so that Triton's cache has their kernels."""

import torch
from aot_launches import (
    given_plan,
    launch_hopper_layer,
    launch_packed_layer,
    launch_residency,
    packed,
)
from pairwise import cover
from plans import row_tile
from products import stored_product, stored_sum
from token_layers import Layer

from moe_ops.dispatch.device import NO_GPU
from moe_ops.kernels import (
    activation,
    align,
    batched,
    eplb,
    expert_product,
    expert_wgrad,
    permute,
    quantize,
    routing,
    routing_adjust,
    symmetric,
    symmetric_batched,
    weight_and_reduce,
)
from moe_ops.routing import SCORING_FUNCS
from moe_ops.windows import FAILED

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def launch_stages(tokens, experts=257, k=8):
    """Stages beside GEMMs and quantization."""

    def launch(empty):
        ids = empty(tokens, k, dtype=torch.int32)
        weights, expert_map = (
            empty(tokens, k, dtype=torch.float32),
            empty(experts, dtype=torch.int32),
        )
        for scoring in ("softmax", "sigmoid"):
            logits, bias = (
                empty(tokens, experts, dtype=torch.float32),
                empty(experts, dtype=torch.float32),
            )
            how = (bias, k, True, scoring, 1.0)
            routing.fused_topk(logits, *how)
        align.plan_slots(ids, expert_map, experts, "unquantized", torch.bfloat16)
        counts = align.count_expert_num_tokens(ids, None, experts)
        align.adapter_ids(ids, expert_map, empty(tokens, dtype=torch.int32), experts, 8)
        align.plan_batched(counts, tokens, "unquantized")
        order = permute.moe_permutation(ids, None, experts)
        align.plan_permuted(order[0], tokens * k, "unquantized")
        rows = permute.gather_rows(empty(tokens, 2880), order[2], order[0], k)
        permute.order_columns(
            empty(tokens, 2880), empty(experts, 2880, dtype=torch.int32), ids, expert_map
        )
        permute.moe_unpermute(rows, weights, order[1], order[0])
        activation.activation(empty(tokens * k, 1408), "silu")
        weight_and_reduce.moe_fused_mul_sum(
            empty(tokens, k, 2880), weights, ids, expert_map, None, experts
        )
        replicas, enabled = empty(experts, 33, dtype=torch.int64), empty(1, dtype=torch.bool)
        unpadded = empty(1, dtype=torch.int32)
        eplb.eplb_map_to_physical_and_record(
            ids, expert_map, replicas, expert_map, enabled, unpadded, torch.int64, 0, unpadded
        )
        for slots, tile in ((32, 16), (200, 192)):
            launch_residency(empty, experts, slots, tile)

    return launch


QUANTS = (
    *(
        f"{element}:{group}"
        for element in ("int8", "fp8")
        for group in ("*x*:float32", "1x*:float32", "1x128:float32", "1x16:pow2")
    ),
    *(f"{element}:1x32:e8m0" for element in ("fp8", "fp6_e2m3", "fp6_e3m2", "fp4")),
    "fp4:1x16:e4m3:global_scale",
)


WAYS = ("rows", "slots", "activation", "dispatch", "batched", "batched activation")
"""Every way to a quantized row: of x, of slots, of an activation, in both formats."""


def parts(quant):
    """The element of a quantization, and what shares a scale of which type."""
    element, group = quant.split(":", 1)
    return {"element": element, "group": group}


PAIRS = cover(
    {
        "way": WAYS,
        **{n: [*dict.fromkeys(parts(q)[n] for q in QUANTS)] for n in ("element", "group")},
    },
    [(("element", "group"), lambda element, group: f"{element}:{group}" in QUANTS)],
)
"""Ways with elements and groups, which are different functions: every two of them meet."""


def launch_quantization(tokens, quant, width, ways, experts=257, k=8):
    """Quantized rows, made in some ways."""

    def launch(empty):
        x, ids = empty(tokens, width), empty(tokens, k, dtype=torch.int32)
        weights = empty(tokens, k, dtype=torch.float32)
        h, one = empty(tokens * k, 2 * width), empty(1, dtype=torch.float32)
        wide, counts = empty(experts, tokens, 2 * width), empty(experts, dtype=torch.int32)
        scale = one if quant.endswith("global_scale") else None
        dispatch = (x, scale, weights, ids, 0, experts, tokens)
        rows = empty(experts, tokens, width)
        calls = {
            "rows": (quantize.moe_quantize, x, scale, None, None, None, experts),
            "slots": (quantize.moe_quantize, x, scale, weights, ids, None, experts),
            "activation": (quantize.activation_quantize, h, scale, ids, None, experts, "silu"),
            "dispatch": (batched.batched_dispatch, *dispatch),
            "batched": (batched.batched_quantize, rows, scale, counts),
            "batched activation": (
                batched.batched_activation_quantize, wide, scale, counts, "swigluoai"
            ),
        }  # fmt: skip
        for way in ways:
            function, *arguments = calls[way]
            function(*arguments, quant)
        if quant.startswith("int8:*x*"):
            quantize.moe_quantize(x, one, None, None, None, experts, f"{quant}:static")
            batched.batched_dispatch(*dispatch, "")
            batched.batched_activation(wide, counts, "silu")
            batched.batched_rows(ids, 0, experts, tokens)

    return launch


def ways_of(quant):
    """The ways in which rows of a quantization are made in `PAIRS`."""
    return [row["way"] for row in PAIRS if {**row, **parts(quant)} == row]


def launch_topk(experts, k, groups, scoring, turn=None):
    """Every choice of experts; in turns one of both kinds has a bias, or each without and with."""

    def launch(empty):
        logits, bias = empty(3, experts), empty(experts, dtype=torch.float32)
        words, table = empty(3, dtype=torch.int64), empty(9, k, dtype=torch.int64)
        routing.hash_topk(logits, words, table, True, scoring, 1.0)
        for first, b in enumerate((bias, None)):
            how = (b, k, True, scoring, 2.5)
            if turn != first:
                routing.fused_topk(logits, *how)
            if turn in (None, first):
                routing.grouped_topk(logits, *how, groups, groups // 2)

    return launch


def launch_adjustments(experts, k):
    """What else becomes of a routing."""

    def launch(empty):
        logits, bias = empty(3, experts), empty(experts, dtype=torch.float32)
        routing.sparsemixer(logits, 0.01)
        weights, ids = empty(3, k, dtype=torch.float32), empty(3, k, dtype=torch.int32)
        padding = empty(3, dtype=torch.bool)
        routing_adjust.adjust_routing(weights, ids, bias, padding, experts, 1, 1.0)
        routing_adjust.zero_experts(empty(3, 2880), weights, ids, experts, 0)

    return launch


def launch_weight_gradients(tile, dtype, n, k, experts=4, top_k=2):
    """Gradients of weights, biases and routing weights."""

    def launch(empty):
        slots = tile * experts
        ids = empty(slots // top_k, top_k, dtype=torch.int32)
        with row_tile(tile):
            how = (given_plan(ids, experts, "unquantized", dtype), experts, "unquantized")
            dy, x = empty(slots, n, dtype=dtype), empty(slots // top_k, k, dtype=dtype)
            weights = empty(slots // top_k, top_k, dtype=torch.float32)
            expert_wgrad.expert_wgrad(dy, x, None, *how, dtype)
            expert_wgrad.expert_wgrad(x, dy, weights, *how, dtype)
            total = empty(experts, n, k, dtype=torch.float32)
            expert_wgrad.expert_wgrad_out(dy, x, weights, *how[:2], out=total)
            expert_wgrad.expert_bias_grad(x, weights, *how)
            bias = empty(experts, k, dtype=dtype)
            expert_wgrad.slot_products(x, bias, ids, None, experts, True)

    return launch


def launch_wgrad(tile, dtype, n, k, out_dtype):
    """Gradients of weights by Hopper's own kernel: one operand has rows of slots."""

    def launch(empty):
        ids = empty(64 * tile, 2, dtype=torch.int32)
        with row_tile(tile, NO_GPU, portable_only=False):
            how = (given_plan(ids, 4, "unquantized", dtype), 4, "unquantized", out_dtype)
            dy, x = empty(128 * tile, n, dtype=dtype), empty(64 * tile, k, dtype=dtype)
            expert_wgrad.expert_wgrad(dy, x, None, *how)
            expert_wgrad.expert_wgrad(x, dy, None, *how)
            total = empty(4, n, k, dtype=torch.float32)
            expert_wgrad.expert_wgrad_out(dy, x, None, *how[:2], out=total)

    return launch


def launch_backward(empty):
    """Gradients of activations and routers."""
    ids = empty(512, 8, dtype=torch.int32)
    weights = empty(512, 8, dtype=torch.float32)
    for key, width in (("silu", 768), ("swigluoai", 2880), ("gelu_no_mul", 704)):
        x = empty(4096, width if "no_mul" in key else 2 * width)
        how = (weights, ids, None, 128, key, True)
        activation.moe_activation_backward(empty(4096, width), x, *how)
    for scoring in SCORING_FUNCS:
        how = (True, scoring, 1.0)
        routing.topk_backward(weights, empty(512, 257, dtype=torch.float32), ids, *how)


def packed_token(empty):
    """Both GEMMs of one token with packed weights."""
    (n, k, slots), scheme = (2048, 768, 8), "mxfp4_w4a16"
    x, h, ids = empty(1, n), empty(slots, k), empty(1, slots, dtype=I32)
    w1, w2 = (packed(empty, scheme, *sizes, BF16) for sizes in ((2 * k, n), (n, k)))
    tiles, weights = [None, ids, None], empty(1, slots, dtype=F32)
    rows = (x, *w1, empty(128, 2 * k), None, tiles, slots, scheme, "silu")
    stored_product(expert_product, *rows)
    stored_sum(expert_product, h, *w2, empty(128, n), weights, tiles, scheme)


def token(empty):
    """Both GEMMs of one token: of the second one, the kernel that reads early and the other."""
    for scheme in ("unquantized", "fp8_block128"):
        layer = Layer(empty, (128, 2048, 768, 8), scheme)
        layer.rows("relu2_no_mul")
        layer.sum(early=True)


def exchange(empty):
    """A send to 8 ranks, what they return, and a send in the Batched format."""
    where = (empty(9, dtype=I64), empty(FAILED + 1, dtype=I32))
    weights, ids = empty(64, 8, dtype=F32), empty(64, 8, dtype=I32)
    holders, x = empty(256, dtype=I32), empty(64, 2048)
    symmetric.symmetric_send(x, None, weights, ids, holders, *where, 64, 256, False, "")
    symmetric.symmetric_return(empty(512, 2048), holders, *where, 8)
    where = (empty(3, dtype=I64), empty(FAILED + 1, dtype=I32), 64)
    placement, held = empty(2, 64, dtype=I32), empty(32, dtype=I32)
    given = (x, None, weights, ids, placement, held, *where)
    symmetric_batched.symmetric_send_batched(*given, False, "")


SYNCHRONIZED = {
    "packed fp8": (90, launch_hopper_layer("fp8_channel", 8000, "silu", 2048, 768, False)),
    "packed dense": (90, launch_hopper_layer("unquantized", 65536, "silu", 4096, 1536, False)),
    "stream": (90, launch_hopper_layer("fp8_block128", 100, "swigluoai", 2880, 2880, False)),
    "few 16": (16, launch_packed_layer("mxfp4_w4a16", 16, "swigluoai", (2880, 2880))),
    "few 64": (64, launch_packed_layer("mxfp4_w4a16", 64, "swigluoai", (2880, 2880))),
    "many": (128, launch_packed_layer("mxfp4_w4a16", 128, "silu", (2048, 768))),
    "jobs": (None, packed_token),
    "token": (90, token),
    "exchange": (90, exchange),
    "gradient": (90, launch_wgrad(128, BF16, 1536, 2048, BF16)),
}
"""Kernels whose threads wait for each other: an architecture, or a row tile on an H200; and
launches."""
