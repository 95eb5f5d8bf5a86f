"""Launches that compile tests share, and what every compiled kernel must keep to."""

import importlib
from types import SimpleNamespace

import aot
import operator_samples
import torch
from plans import row_tile
from products import plain_product, scaled_product, stored_product, stored_sum
from token_layers import Layer

from moe_ops import fake_impls
from moe_ops.dispatch.device import Device
from moe_ops.kernels import align, expert_product, residency
from moe_ops.ops import STAGES
from moe_ops.residency import StateLayout
from moe_ops.residency.slots import COLUMNS
from moe_ops.scheme import get_scheme
from moe_ops.scheme.packed import groups_first
from moe_ops.support import SUPPORT
from moe_ops.tensors import QTensor

ARCHITECTURES = sorted({arch for row in SUPPORT for arch in row.architectures})


ZEROS_128 = ("int4_w4a16_g128_zp", 128, torch.float32)
SPILLED = {
    ("3.7", *ZEROS_128): 924,
    ("3.8", *ZEROS_128): 72,
    ("3.9", *ZEROS_128): 104,
    ("3.9", "int8_w8a16", 16, torch.bfloat16): 8,
    ("3.9", "topk_backward_kernel"): 48,
    **{(release, "_expert_wgrad_kernel", 80): 52 for release in ("3.6", "3.7", "3.8", "3.9")},
    ("3.9", "scaled_gemm_kernel", 128, 90): 72,
    ("3.9", "scaled_gemm_kernel", 64, 100): 16,
    ("3.8", "mxfp4_mxfp8", 32, 100): 88,
    ("3.9", "mxfp4_mxfp8", 32, 100): 88,
    **{(release, "nvfp4", 128, 120): 32 for release in ("3.7", "3.8", "3.9")},
    **{
        (release, scheme, 128, arch): most
        for release, most in (("3.7", 368), ("3.8", 384), ("3.9", 336))
        for scheme in ("mxfp4_w4a8", "mxfp4_w4a8_token")
        for arch in (100, 103)
    },
}
"""Bytes that kernels spill beside those that their tests allow with each release of Triton, by
release and kernel, or these and the architecture; for quantized weights by release, scheme, row
tile and dtype of the rows; for two quantized operands by release, kernel or scheme, row tile and
architecture."""


def may_spill(otherwise, *what):
    """Bytes that a kernel may spill: what `SPILLED` says of this release, or ``otherwise``."""
    return SPILLED.get((aot.RELEASE, *what), otherwise)


def slot_plan(ids, num_experts, scheme, dtype=torch.bfloat16, expert_map=None):
    """The ``tiles`` of a routing, as the launchers make them."""
    return [align.plan_slots(ids, expert_map, num_experts, scheme, dtype), ids, expert_map]


def given_plan(ids, num_experts, scheme, dtype=torch.bfloat16):
    """`slot_plan` without a launch, for tests of GEMMs alone."""
    return [fake_impls.align.plan_slots(ids, None, num_experts, scheme, dtype), ids, None]


def launch_gemms(
    tile, dtype, activation_key, hidden=2048, width=768, has_bias=False, experts=4, of_expert=1
):
    """Both GEMMs of experts with ``of_expert`` row tiles each; few tiles have few columns."""

    def launch(empty):
        slots = tile * experts * of_expert
        ids = empty(slots, 1, dtype=torch.int32)
        bias = empty(experts, 2 * width, dtype=dtype) if has_bias else None
        x, w1 = empty(slots, hidden, dtype=dtype), empty(experts, 2 * width, hidden, dtype=dtype)
        with row_tile(tile):
            tiles = slot_plan(ids, experts, "unquantized", dtype)
            h = plain_product(expert_product, x, w1, bias, None, tiles, 1, activation_key, True)
            w2 = empty(experts, hidden, h.shape[1], dtype=dtype)
            plain_product(expert_product, h, w2, None, None, tiles, 1, "", True)

    return launch


def check_resources(kernels, arch):
    assert kernels
    for kernel in kernels:
        used = aot.resources(kernel, arch)
        assert used["shared"] <= aot.SHARED_MEMORY[arch], (kernel.metadata.name, used)
        # ptxas may spill a word that lives across a small kernel; in a product's loop none. Top-k
        # of many tokens is given few registers: more do on the way that is seldom taken.
        few = getattr(kernel.metadata, "maxnreg", None) and "topk" in kernel.metadata.name
        allowed = 640 if few else 0 if "gemm" in kernel.metadata.name else 8
        allowed = may_spill(may_spill(allowed, kernel.metadata.name), kernel.metadata.name, arch)
        assert used["spilled"] <= allowed, (kernel.metadata.name, used)
        assert used["serialized"] == 0, (kernel.metadata.name, used)


SCALES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def stored(empty, scheme, experts, n, k, dtype):
    """An empty weight as a scheme stores it."""
    quant = get_scheme(scheme).weight
    per_byte, shape = quant.element.values_per_byte, quant.weight_scale_shape(experts, n, k)
    other = dtype if quant.scale == "input" else torch.float32
    return QTensor(
        empty(experts, n, k // per_byte, dtype=quant.dtype),
        empty(*shape, dtype=SCALES.get(quant.scale, other)),
        empty(experts, n // per_byte, shape[-1], dtype=torch.uint8)
        if quant.zero_point else None,
        empty(experts, *[n] * quant.channel_scale, dtype=torch.float32)
        if quant.global_scale else None,
    )  # fmt: skip


EXPERTS, TOP_K = 64, 4
H200 = Device(90, 232448, 132)
HALF = (232448 - 1024) // 2
"""Shared memory of a program of which two fit a processor, in bytes."""


def launch_hopper_layer(scheme, tokens, activation, hidden, width, has_bias, config=None):
    """Both GEMMs of a layer, in the tiles that ``config`` says, if it is given."""
    quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight

    def launch(empty):
        ids = empty(tokens, TOP_K, dtype=torch.int32)

        def operands(rows, n, k):
            bias = empty(EXPERTS, n) if has_bias else None
            if weight is None:
                return empty(rows, k), empty(EXPERTS, n, k), bias
            scale = empty(*quant.row_scale_shape(rows, k), dtype=torch.float32)
            w_scale = empty(*weight.weight_scale_shape(EXPERTS, n, k), dtype=torch.float32)
            w = empty(EXPERTS, n, k, dtype=weight.dtype)
            return empty(rows, k, dtype=quant.dtype), scale, w, w_scale, None, bias

        first = operands(tokens, 2 * width, hidden)
        second = operands(tokens * TOP_K, hidden, width)
        with row_tile(config and config.block_m, portable_only=False):
            tiles = given_plan(ids, EXPERTS, scheme)
            if weight is None:
                rest = (tiles, TOP_K, activation, True)
                plain_product(expert_product, *first, None, *rest, config=config)
                plain_product(expert_product, *second, None, tiles, 1, "", True, config=config)
            else:
                rest = (scheme, torch.bfloat16)
                scaled_product(
                    expert_product, *first, tiles, TOP_K, *rest, activation, config=config
                )
                scaled_product(expert_product, *second, tiles, 1, *rest, config=config)

    return launch


def launch_unquantized(scheme):
    """A GEMM of many rows that are not quantized yet, one for each slot."""

    def launch(empty):
        ids = empty(4096, 4, dtype=torch.int32)
        weight = get_scheme(scheme).weight
        w = empty(64, 512, 2048, dtype=weight.dtype)
        w_scale = empty(*weight.weight_scale_shape(64, 512, 2048), dtype=torch.float32)
        given = empty(1, dtype=torch.float32) if "static" in scheme else None
        with row_tile(64, portable_only=False):
            rest = (slot_plan(ids, 64, scheme), 1, scheme, torch.bfloat16)
            x = empty(4 * 4096, 2048)
            scaled_product(expert_product, x, given, w, w_scale, None, None, *rest)

    return launch


def packed(empty, scheme, n, k, dtype, experts=128):
    """The same in the packed form."""
    q = stored(empty, scheme, experts, n, k, dtype)
    words = empty(experts, n, q.data.shape[2] * q.data.itemsize // 4, dtype=torch.int32)
    more = (None if t is None else empty(*groups_first(t.shape), dtype=t.dtype) for t in q[1:])
    return QTensor(words, *more)


def launch_packed_layer(scheme, tile, activation, sizes, dtype=torch.bfloat16, gemms=(1, 2)):
    """One GEMM or both of a layer with packed weights, with biases."""
    hidden, width = sizes

    def launch(empty):
        experts, slots = 128, 64 * tile
        ids = empty(slots, 1, dtype=torch.int32)
        rows = width if activation.endswith("no_mul") else 2 * width
        w1, w2 = (packed(empty, scheme, *s, dtype) for s in ((rows, hidden), (hidden, width)))
        x, b1, b2 = empty(slots, hidden, dtype=dtype), empty(experts, rows), empty(experts, hidden)
        with row_tile(tile, H200, portable_only=False):
            tiles = given_plan(ids, experts, scheme, dtype)
            if 1 in gemms:
                stored_product(expert_product, x, *w1, b1, None, tiles, 1, scheme, activation)
            if 2 in gemms:
                h = empty(slots, width, dtype=dtype)
                stored_product(expert_product, h, *w2, b2, None, tiles, 1, scheme)

    return launch


def launch_residency(empty, experts, slots, row_tile=16):
    """Experts in host memory that become resident, for few ids and many, with plan and map."""
    at = StateLayout(experts, slots)
    table = empty(2, 6, COLUMNS, dtype=torch.int64)
    state, rows = empty(2, at.length, dtype=torch.int64), empty(experts, dtype=torch.int32)
    owner = SimpleNamespace(
        num_experts=experts, num_slots=slots, parts=[(table, state)], chunks=(200, 100),
        row_maps=(rows, rows),
    )  # fmt: skip
    plan = empty(3000, dtype=torch.int32)
    few, many = empty(1, 8, dtype=torch.int32), empty(64, 8, dtype=torch.int64)
    for tiles in ((None, few, None), (None, few, rows), (plan, many, rows)):
        out = residency.tiles_in_rows(owner, 0, tiles)
        residency.make_resident(owner, 0, tiles, row_tile, 0, out, most=slots)


def launch_samples(names, schemes=None):
    """What the samples of operators launch; of those with a scheme, if ``schemes`` are given."""
    samples = operator_samples.samples("cpu")

    def launch(empty):
        def moved(x):
            if isinstance(x, (list, tuple)):
                return [moved(value) for value in x]
            return empty(*x.shape, dtype=x.dtype) if torch.is_tensor(x) else x

        for qualified in names:
            module = importlib.import_module(f"moe_ops.kernels.{STAGES[qualified]}")
            function = getattr(module, qualified.replace(".", "_"))
            for arguments in samples[qualified]:
                if schemes and not any(isinstance(x, str) and x in schemes for x in arguments):
                    continue
                out = operator_samples.keywords(qualified, arguments)
                function(*map(moved, arguments), **{k: moved(v) for k, v in out.items()})

    return launch


def launch_more(empty):
    """What samples are too small for."""
    align.plan_slots(empty(4096, 8, dtype=torch.int32), None, 64, "unquantized", torch.bfloat16)
    for scheme in ("fp8_channel", "fp8_block128"):
        launch_unquantized(scheme)(empty)
        for tokens in (1, 65536):
            launch_hopper_layer(scheme, tokens, "silu", 2048, 768, False)(empty)
    launch_one_token(empty)
    for tile in (16, 128):
        launch_packed(empty, tile)


def launch_packed(empty, tile):
    """GEMMs with a packed weight, of which samples have none."""
    scheme, slots = "mxfp4_w4a16", 64 * tile // 2
    ids = empty(slots, 1, dtype=torch.int32)
    w = empty(64, 128, 128 // 8, dtype=torch.int32)
    scale = empty(64, 4, 128, dtype=torch.uint8)
    with row_tile(tile, Device(90, 232448, 132), portable_only=False):
        tiles = given_plan(ids, 64, scheme)
        x = empty(slots, 128)
        stored_product(expert_product, x, w, scale, *[None] * 4, tiles, 1, scheme)
        rows = empty(slots, 64, dtype=torch.uint8), empty(slots, 4, dtype=torch.uint8)
        tail = (None, None, tiles, 1, "mxfp4", torch.bfloat16)
        scaled_product(expert_product, *rows, w, scale, *tail)
    weights, ids = empty(1, 4, dtype=torch.float32), empty(1, 4, dtype=torch.int32)
    stored, tiles = (w, scale, None, None, None), [None, ids, None]
    stored_product(expert_product, empty(1, 128), *stored, None, tiles, 4, scheme)
    stored_sum(expert_product, empty(4, 128), *stored, weights, tiles, scheme)


def launch_one_token(empty):
    """A GEMM that quantizes its rows itself."""
    w = empty(64, 512, 2048, dtype=torch.float8_e4m3fn)
    w_scale = empty(64, 512, 1, dtype=torch.float32)
    tiles = [empty(0, dtype=torch.int32), empty(1, 4, dtype=torch.int32), None]
    how = (tiles, 4, "fp8_channel", torch.bfloat16)
    scaled_product(expert_product, empty(1, 2048), None, w, w_scale, None, None, *how)


def launch_early(empty):
    """GEMM 2 of one token, which may read the routing and the weight early."""
    for scheme in ("unquantized", "fp8_channel", "fp8_block128"):
        Layer(empty, (128, 2048, 768, 8), scheme).sum(early=True)
