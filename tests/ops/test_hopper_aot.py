"""Hopper's own kernels of the expert GEMMs, compiled as their launchers choose them."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
import plans  # noqa: E402
from aot_launches import EXPERTS, HALF, TOP_K, given_plan, launch_hopper_layer, launch_unquantized  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from products import plain_product  # noqa: E402
from table_items import every_row  # noqa: E402

from moe_ops.dispatch import hopper  # noqa: E402
from moe_ops.dispatch.device import Device
from moe_ops.dispatch.hopper import FETCH, FETCHED_ROWS, PACKED, HopperTiles, most_stages
from moe_ops.dispatch.row_tiles import HOPPER
from moe_ops.dispatch.tiles import row_tile
from moe_ops.kernels import expert_product
from moe_ops.kernels._hopper import gathered as hopper_tile
from moe_ops.kernels._hopper import gemm as hopper_gemm
from moe_ops.kernels._hopper import stream as hopper_stream
from moe_ops.scheme import get_scheme

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
PACKED_AT_ONCE = ["fp8_channel", "fp8_block128", "fp8_tensor_static", "int8_channel"]
H200 = Device(90, 232448, 132)


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(hopper_stream, hopper_tile)


def constants(kernel):
    """Those that the launcher made of its tiles."""
    return next(c for c in kernel.src.constants.values() if isinstance(c, hopper_gemm.Constants))


SCHEMES = [
    "unquantized", "fp8_channel", "fp8_tensor", "fp8_block128", "int8_channel", "int8_block128",
]  # fmt: skip
ONE_TOKEN = ["unquantized", "fp8_channel", "fp8_block128", "int8_channel", "int8_block128"]
"""Schemes of the kernels of one token."""


LAYERS = [
    (1, "silu", 2048, 768),
    (100, "swigluoai", 2880, 2880),
    (400, "silu", 7168, 2048),
    (1024, "gelu", 2880, 1408),
    (2500, "relu2_no_mul", 1536, 640),
    (4000, "swigluoai", 2880, 2880),
    (4000, "silu", 2880, 2880),
    (8000, "silu", 2048, 768),
    (65536, "silu", 4096, 1536),
]
"""Tokens, activation, hidden size and intermediate size."""


@pytest.mark.parametrize(("scheme", "layer"), half_exhaustive(SCHEMES, LAYERS), ids=str)
def test_a_layer(scheme, layer, one_of_two):
    """What is launched; one of the GEMMs is compiled, in turns of layers, or both."""
    tokens, activation, hidden, width = layer
    launch = launch_hopper_layer(scheme, tokens, activation, hidden, width, tokens == 1024)
    names = aot.launched_names(90, launch)
    one = names.count("hopper_token_kernel")
    hoppers = [name for name in names if "hopper" in name and "token" not in name]
    assert one == (tokens == 1 and scheme in ONE_TOKEN)  # see `test_token_gemm_aot`
    rows, wide = tokens * TOP_K / EXPERTS, scheme == "unquantized"
    tile = row_tile(HOPPER[2 if wide else 1], tokens * TOP_K, EXPERTS)
    stream = not wide and tile <= 32
    packed = (rows > 170 or tile == 192) if wide else tile == 128
    assert len(hoppers) + one * stream == 2 * (stream or packed)
    assert {*hoppers} <= {"hopper_stream_kernel" if stream else "hopper_gemm_kernel"}
    # The first GEMM of an unquantized layer writes rows as the second reads them.
    gate = 1 if activation == "relu2_no_mul" else 2
    narrow = [n <= FETCHED_ROWS * (1 + wide) for n in (gate * width, hidden)]
    fetched = [packed and tile == 128 and narrow[0], packed and tile == 128 and narrow[1] > wide]
    assert names.count("_pack_kernel") == packed * (1 if wide else 2) - sum(fetched)
    turn = one_of_two(LAYERS.index(layer))
    launched = aot.compile_launch(90, launch, nth=turn)
    kernels = [k for k in launched if k.metadata.name in hoppers]
    assert len(kernels) == (len(hoppers) if turn is None else bool(hoppers))
    for i, kernel in enumerate(kernels, turn or 0):
        fetches = packed and fetched[i]
        used = aot.resources(kernel, 90)
        assert used["shared"] <= (HALF if stream else aot.SHARED_MEMORY[90]), used
        assert used["spilled"] == 0 and used["serialized"] == 0, used
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        c = constants(kernel)
        assert c.FETCHES is fetches
        on_demand = fetches or tile == 192 or (not wide and tile == 128 and rows <= 682)
        assert c.ON_DEMAND is (packed and on_demand) and tile == c.BLOCK_M


@every_row(
    ("scheme", "tokens", "activation", "spilled"),
    [
        ("unquantized", 4000, "silu", 0),
        ("unquantized", 8000, "silu", 64),
        ("int8_channel", 4000, "swigluoai", 0),
        ("fp8_block128", 4000, "silu", None),
        ("int4_w4a8_g128", 4000, "swigluoai", 0 if aot.RELEASE == "3.6" else 1496),
    ],
)
def test_the_product_beside_its_activation(scheme, tokens, activation, spilled):
    """One kernel stores both; or two kernels where one would spill in its loop.

    Hopper's own kernel stores 16 bytes a thread, and keeps some addresses of its epilogue in memory
    if tiles have 192 rows. As many products and sums are joined as without the product, since the
    activated rows must have the same bits.
    """

    def gemms(operator, until=""):
        def launch(empty):
            quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight
            ids = empty(tokens, TOP_K, dtype=torch.int32)
            a, scale, w = empty(tokens, 2048), None, [empty(EXPERTS, 1536, 2048), None]
            if quant is not None:
                a = empty(tokens, 2048, dtype=quant.dtype)
                scale = empty(*quant.row_scale_shape(tokens, 2048), dtype=torch.float32)
                sizes = weight.weight_scale_shape(EXPERTS, 1536, 2048)
                w = [
                    empty(EXPERTS, 1536, weight.data_width(2048), dtype=weight.dtype),
                    None,
                    empty(*sizes, dtype=weight.scale_dtype),
                    None,
                    empty(EXPERTS, dtype=torch.float32) if weight.global_scale else None,
                ]
            with plans.row_tile(None, portable_only=False):
                tiles = given_plan(ids, EXPERTS, scheme)
                call = (a, scale, w, None, tiles, TOP_K, scheme, torch.bfloat16, activation)
                operator(*call, weight is None)

        return [k for k in aot.compile_launch(90, launch, until=until) if "gemm" in k.metadata.name]

    kernels = gemms(expert_product.activated_product)
    used = [aot.resources(k, 90)["spilled"] for k in kernels]
    assert len(used) == (1 if spilled is not None else 2)
    assert max(used) <= (spilled or 0)
    for kernel in (k for k in kernels if k.metadata.name == "hopper_gemm_kernel"):
        stores = re.findall(r"st\.global\S*", kernel.asm["ptx"])
        assert stores and all(".v4" in store for store in stores)
    if spilled is not None:
        (alone,) = gemms(expert_product.expert_product, until="ptx")
        joined = [k.asm["ptx"].count("fma.rn.f32") for k in (*kernels, alone)]
        assert joined[0] == joined[1]


MODELS = {
    "qwen3-30b": (2048, 768, "silu", False),
    "gpt-oss": (2880, 2880, "swigluoai", True),
    "deepseek-v3": (7168, 2048, "silu", False),
}
"""Hidden size, intermediate size, activation, and whether there is a bias."""


ONCE = {("deepseek-v3", 300), ("gpt-oss", 900), ("qwen3-30b", 4096)}
"""Models and tokens: each of both."""
GIVEN_TILES = {900: HopperTiles(PACKED, 64, 256, 8, 4)}
"""By tokens: tiles of 64 rows, which only a tuned file or a caller chooses."""


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        pytest.param(model, tokens, marks=[pytest.mark.exhaustive] * ((model, tokens) not in ONCE))
        for model in MODELS
        for tokens in (300, 900, 4096)
    ],
)
@pytest.mark.parametrize(
    "scheme", ["int8_channel", pytest.param("int8_tensor", marks=pytest.mark.exhaustive)]
)
def test_layers_of_integers(scheme, model, tokens, one_of_two):
    """Tensor cores add all of K: products are added nowhere else, nor written to other registers.

    Tiles of 32, 64 and 128 rows.
    """
    hidden, width, activation, has_bias = MODELS[model]
    first_gemm = one_of_two(0)
    config = GIVEN_TILES.get(tokens)
    launch = launch_hopper_layer(scheme, tokens, activation, hidden, width, has_bias, config)
    launched = aot.compile_launch(90, launch, nth=first_gemm)
    kernels = [k for k in launched if "hopper" in k.metadata.name]
    assert len(kernels) == (2 if first_gemm is None else 1)
    for kernel in kernels:
        used = aot.resources(kernel, 90)
        assert used["spilled"] == 0 and used["serialized"] == 0, used
        assert set(re.findall(r"wgmma\S*k32\.(\S+)", kernel.asm["ptx"])) == {"s32.s8.s8"}
        products = re.findall(r"IGMMA\S+ (\w+), gdesc\[\w+\], (\w+)", aot.disassembled(kernel))
        assert products and all(out == added for out, added in products)


PACKED_TILES = [(64, 128), (64, 256), (128, 128), (128, 256), (192, 256), (192, 128)]
PARTS = {("unquantized", 192): 2, ("fp8", 128): 2, ("int8", 128): 2}
"""Of a warp group's share of a tile of 256 columns."""


def packed(block_m, block_n, on_demand, kernel=PACKED):
    """Tiles of a kernel for many rows, with as many stages as fit."""
    tiles = HopperTiles(kernel, block_m, block_n, 8, 2, on_demand)
    return replace(tiles, num_stages=most_stages(tiles, H200))


def check_packed(kernel, scheme, block_m, block_n, on_demand):
    """Its resources, and how many products there are in its code."""
    c, used = constants(kernel), aot.resources(kernel, 90)
    found = c.BLOCK_M, c.BLOCK_N, c.ON_DEMAND
    assert found == (block_m, block_n, on_demand)
    assert used["shared"] <= aot.SHARED_MEMORY[90], used
    assert used["spilled"] == 0 and used["serialized"] == 0, used
    groups = 3 if block_m == 192 else 2
    parts = PARTS.get((scheme.split("_")[0], block_m), 1) if block_n == 256 else 1
    ptx = kernel.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == groups * 4 * parts
    width = block_n // 2 if block_m == 64 else block_n // parts
    assert set(re.findall(r"wgmma.mma_async\S*\.m64n(\d+)k", ptx)) == {str(width)}
    # Tiles are taken from a count only where they are taken on demand.
    assert len(re.findall(r"\batom\.", ptx)) == on_demand
    return c


EVERY_TILE = [
    pytest.param(
        scheme, tile, on_demand,
        # Every two meet in the rest; tiles of 192 rows hold most where they are wide.
        marks=[pytest.mark.exhaustive] * ((i + j + on_demand) % 2 or tile == (192, 128)),
    )
    for i, scheme in enumerate(SCHEMES)
    for j, tile in enumerate(PACKED_TILES)
    for on_demand in (False, True)
    if tile[1] in hopper.tile_widths(PACKED, tile[0], 2 if scheme == "unquantized" else 1)
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "tile", "on_demand"), EVERY_TILE, ids=str)
def test_every_packed_tile(scheme, tile, on_demand, one_of_two):
    """The first GEMM, with a bias and an activation; others are in `test_a_layer`."""
    (block_m, block_n), first_gemm = tile, one_of_two(0)
    config = packed(block_m, block_n, on_demand)
    launch = launch_hopper_layer(scheme, 65536, "swigluoai", 2880, 1408, True, config)
    launched = aot.compile_launch(90, launch, nth=first_gemm)
    kernels = [k for k in launched if "hopper" in k.metadata.name]
    assert len(kernels) == (2 if first_gemm is None else 1)
    for kernel in kernels:
        check_packed(kernel, scheme, block_m, block_n, on_demand)


def launch_turned(empty):
    """Both data gradients of a layer, whose weights are contiguous along their rows."""
    ids = empty(32768, TOP_K, dtype=torch.int32)
    for n, k, top_k in ((2048, 1536, 1), (768, 2056, TOP_K)):
        with plans.row_tile(128, portable_only=False):
            tiles = given_plan(ids, EXPERTS, "unquantized")
            rows, w = empty(32768 * TOP_K // top_k, k), empty(EXPERTS, k, n).mT
            plain_product(expert_product, rows, w, None, None, tiles, top_k, "")


@every_row(("scheme",), [(scheme,) for scheme in (*SCHEMES, "turned")])
def test_every_fetching_tile(scheme, one_of_two):
    """Rows come by copies of 16 bytes. 2880 and 2904 are no whole steps of 8 and of 16 bits."""
    config, nth = packed(128, 256, True, FETCH), one_of_two(scheme == "turned")
    if scheme == "turned":
        launch, scheme = launch_turned, "unquantized"
    elif scheme == "unquantized":
        launch = launch_ordered("swigluoai", None, False, config, 2904)
    else:
        launch = launch_hopper_layer(scheme, 65536, "swigluoai", 2880, 1408, True, config)
    launched = aot.compile_launch(90, launch, nth=nth)
    kernels = [k for k in launched if "hopper" in k.metadata.name]
    assert len(kernels) == (2 if nth is None else 1)
    for kernel in kernels:
        assert check_packed(kernel, scheme, 128, 256, True).FETCHES
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (\w+),", kernel.asm["ptx"])
        assert copies.count("0x10") == 16  # and scales of block scales
        assert copies.count("0x4") == len(copies) - 16 == 2 * ("block" in scheme)


def launch_ordered(activation, weights, ordered, config, hidden=2048):
    """Two unquantized GEMMs, between which rows lie by slot or by expert, with routing weights."""

    def launch(empty):
        tokens, width = 4096, 768
        ids = empty(tokens, TOP_K, dtype=torch.int32)
        first = empty(tokens, hidden), empty(EXPERTS, 2 * width, hidden), None
        second = empty(tokens * TOP_K, width), empty(EXPERTS, hidden, width), None
        given = None if weights is None else empty(tokens, TOP_K, dtype=weights)
        with plans.row_tile(config.block_m, portable_only=False):
            tiles = given_plan(ids, EXPERTS, "unquantized")
            rest = (tiles, TOP_K, activation, ordered)
            plain_product(expert_product, *first, given, *rest, config=config)
            plain_product(expert_product, *second, given, tiles, 1, "", ordered, config=config)

    return launch


WEIGHTS = [None, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "tile",
    [*PACKED_TILES[:-1], pytest.param(PACKED_TILES[-1], marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_order_and_routing_weights(tile, weights):
    """Rows in both orders; products are multiplied by weights of any dtype where there are any.

    Every two of tile, weights and order meet.
    """
    block_m, block_n = tile
    ordered = (PACKED_TILES.index(tile) + WEIGHTS.index(weights)) % 2 == 1
    config = packed(block_m, block_n, block_m > 64)
    launched = aot.compile_launch(90, launch_ordered("silu", weights, ordered, config))
    kernels = [k for k in launched if "hopper" in k.metadata.name]
    orders = ["out", "a"] if ordered else [None, None]
    assert len(kernels) == 2
    for kernel, order in zip(kernels, orders, strict=True):
        c = check_packed(kernel, "unquantized", block_m, block_n, block_m > 64)
        assert c.ORDERED is order and c.WEIGHTED is (weights is not None)
        if weights is not None:  # they are what the kernel is given, not something in their place
            type_of = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
            assert kernel.src.signature["row_scale"] == type_of[weights]


@every_row(("scheme",), [(scheme,) for scheme in (*PACKED_AT_ONCE, "fp8_tensor")])
def test_rows_are_quantized_as_they_are_packed(scheme):
    """Unless all of them share a scale of their own."""
    _, *kernels = aot.launched_names(90, launch_unquantized(scheme))
    apart = ["amax_kernel", "scaled_kernel", "_pack_kernel", "hopper_gemm_kernel"]
    once = ["_quantize_pack_kernel", "hopper_gemm_kernel"]
    assert kernels[-2:] == once if scheme in PACKED_AT_ONCE else kernels[-4:] == apart


@pytest.mark.parametrize("arch", [80, 100, 120])
def test_only_on_hopper(arch):
    launch = launch_hopper_layer(
        "fp8_channel" if arch > 80 else "unquantized", 4096, "silu", 512, 256, 0
    )
    found = aot.launched_names(arch, launch)
    assert found and not any("hopper" in name for name in found)
