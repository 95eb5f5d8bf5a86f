"""Files of tuned tiles: what is refused, and what a layer finds in them."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_items import every_row
from tuned_entries import H200, SIZES, entry, gemm_of, layer, own, record

from moe_ops.dispatch import GemmProblem, plan_gemm, tuned
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, HopperTiles
from moe_ops.dispatch.plan import DEFAULT
from moe_ops.dispatch.portable import gemm_tiles, shared_bytes
from moe_ops.dispatch.row_tiles import EIGHT_BIT, HOPPER, INVARIANT, PORTABLE, routed_among
from moe_ops.dispatch.tiles import ROW_TILES, Gemm, TileConfig, one_row_tile, row_tile
from moe_ops.dispatch.tuned_file import file_name, parse_tuned_layer
from moe_ops.inspect.devices import TARGETS

NAME = file_name(SIZES, "NVIDIA H200", "unquantized")


def first(rows, rule=PORTABLE, itemsize=2):
    """GEMM 1 of the layer."""
    return Gemm(rows, 8, 64, 128, itemsize, 2, rule)


def chosen(gemm, device=H200, scheme="unquantized", hopper=False):
    """The plan; ``hopper``: whether Hopper's kernels can read the operands."""
    activation = "silu" if gemm.halves == 2 else ""
    return plan_gemm(GemmProblem(gemm, scheme, activation, boxes=hopper), device)


@pytest.fixture
def installed(monkeypatch):
    def install(*layers):
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))

    return install


def changed(path, value):
    """A good file with one thing changed; a value of None: left out."""
    content = record(_4=entry())
    *outer, last = path
    place = content
    for key in outer:
        place = place[key]
    place[last] = value
    if value is None:
        del place[last]
    return json.dumps(content)


@every_row(
    ("path", "value", "named"),
    [
        (["top_k"], None, "top_k must be a number >= 1, got None"),
        (["top_k"], 0, "top_k must be a number >= 1, got 0"),
        (["triton_version"], "3.6.0", "a key must be top_k or a token count, got 'triton_version'"),
        (["0"], {}, "a key must be top_k or a token count, got '0'"),
        (["4"], 7, "4 must be an object, got 7"),
        (["4", "BLOCK_M"], 8, "4.BLOCK_M must be among (16, 32, 64, 128, 192), got 8"),
        (["4", "BLOCK_M"], True, "4.BLOCK_M must be among"),
        (["4", "gemm2"], None, "4.gemm2 must be an object, got None"),
        (["4", "gemm1", "BLOCK_N"], 48, "4.gemm1.BLOCK_N must be a power of two, got 48"),
        (["4", "gemm1", "BLOCK_N"], 8, "4.gemm1.BLOCK_N must be a number >= 16, got 8"),
        (["4", "gemm1", "BLOCK_K"], "64", "4.gemm1.BLOCK_K must be a number >= 16, got '64'"),
        (["4", "gemm2", "GROUP_M"], None, "4.gemm2.GROUP_M must be a number >= 1, got None"),
        (["4", "gemm2", "num_warps"], 3, "4.gemm2.num_warps must be a power of two, got 3"),
        (["4", "gemm2", "num_stages"], 0, "4.gemm2.num_stages must be a number >= 1, got 0"),
        (["4", "gemm1", "BLOCK_N"], 2**20, "4.gemm1.BLOCK_N must be a number <= 256, got 1048576"),
        (["4", "gemm1", "BLOCK_K"], 512, "4.gemm1.BLOCK_K must be a number <= 256, got 512"),
        (["4", "gemm2", "GROUP_M"], 2**40, "4.gemm2.GROUP_M must be a number <= 128, got 10995"),
        (["4", "gemm2", "num_warps"], 64, "4.gemm2.num_warps must be a number <= 16, got 64"),
        (["4", "gemm2", "num_stages"], 10**9, "4.gemm2.num_stages must be a number <= 64, got 1"),
        (["5"], entry(64, own(group_m=2**40)), "5.gemm1.GROUP_M must be a number <= 128, got 109"),
        (["5"], entry(64, own(num_stages=10**9)), "5.gemm1.num_stages must be a number <= 64, got"),
        (["top_k"], 2**70, "top_k must be a number <= 65536, got 1180591620717411303424"),
        (["\u0664"], {}, "a key must be top_k or a token count, got '\u0664'"),
        (["04"], {}, "a key must be top_k or a token count, got '04'"),
        (["9" * 5000], {}, "a key must be top_k or a token count, got '999"),
        (["4", "gemm1"], own("cutlass"), "4.gemm1.kernel must be among ('hopper_fetch', 'hopper_p"),
        (["4", "gemm1"], own(["x"]), "4.gemm1.kernel must be among ('hopper_fetch', 'hopper_p"),
        (
            ["4", "gemm1"],
            own(),
            "4.gemm1.kernel must be one that has unquantized in tiles of 16 rows, got 'hopper_p",
        ),
        (
            ["4", "gemm1"],
            own(STREAM),
            "4.gemm1.kernel must be one that has unquantized in tiles of",
        ),
        (["5"], entry(64, own(block_n=64)), "5.gemm1.BLOCK_N must be among (128, 256), got 64"),
        (["5"], entry(64, own(block_n=None)), "5.gemm1.BLOCK_N must be among (128, 256), got None"),
        (["5"], entry(64, own(group_m=0)), "5.gemm1.GROUP_M must be a number >= 1, got 0"),
        (["5"], entry(64, own(num_stages=1)), "5.gemm1.num_stages must be a number >= 2, got 1"),
        (
            ["5"],
            entry(192, own(block_n=64)),
            "5.gemm1.BLOCK_N must be among (128, 256), got 64",
        ),
        (["5"], entry(64, own(ON_DEMAND=1)), "5.gemm1.ON_DEMAND must be true or false, got 1"),
        (["5"], entry(64, own(ON_DEMAND=None)), "5.gemm1.ON_DEMAND must be true or false, got"),
    ],
)
def test_refused_content(path, value, named):
    with pytest.raises(ValueError) as raised:
        parse_tuned_layer(NAME, changed(path, value))
    assert str(raised.value).startswith(f"{NAME}: {named}")


@pytest.mark.parametrize(
    "name, text, named",
    [
        ("E=8,N=64,device_name=NVIDIA_H200.json", "{}", "the name must match"),
        ("E=8,N=64,K=128,device_name=NVIDIA_H200,scheme=fp7.json", "{}", "unknown scheme|fp7"),
        (NAME, "{", "Expecting property name"),
        (NAME, "[]", "the file must be an object"),
        (NAME, '{"4":' * 100_000, "the file must not be nested so deeply"),
        (NAME.replace("E=8", "E=\u0668"), "{}", "the name must match"),
        (NAME.replace("E=8", "E=" + "8" * 5000), "{}", "the name must match"),
    ],
)
def test_refused_files(name, text, named):
    with pytest.raises(ValueError, match=named) as raised:
        parse_tuned_layer(name, text)
    assert str(raised.value).startswith(name)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.warns(match="must be a regular file, got a folder or a pipe"):
        assert tuned.read_folder(tmp_path) == []


def test_a_block_does_not_cross_a_scale():
    wide = record(_4=entry(gemm2=gemm_of(block_k=256)))
    layer(wide, scheme="fp8_channel")
    with pytest.raises(ValueError, match=r"4.gemm2.BLOCK_K must not cross a scale's 128, got 256"):
        layer(wide, scheme="fp8_block128")


@pytest.mark.parametrize("scheme", ["fp8_w8a16_block128", "fp8_w8a16", "mxfp4"])
def test_schemes_that_hoppers_kernels_lack(scheme):
    with pytest.raises(ValueError, match=f"4.gemm2.kernel must be one that has {scheme} in tiles"):
        layer(record(_4=entry(64, gemm2=own())), scheme=scheme)


def test_a_file_names_the_kernel(installed):
    """Hopper's where it says so, and the one for all GPUs where it does not."""
    installed(layer(record(_500=entry(64, own(), gemm_of())), scheme="fp8_channel"))
    gemm, less = first(1000, EIGHT_BIT, 1), first(600, HOPPER[1], 1)
    first_gemm = chosen(gemm, scheme="fp8_channel", hopper=True)
    assert first_gemm.config == HopperTiles(PACKED, 64, 128, 8, 4)
    assert first_gemm.source.startswith("tuned")
    second = chosen(Gemm(1000, 8, 128, 64, 1, 1, EIGHT_BIT), scheme="fp8_channel", hopper=True)
    assert second.config == TileConfig(64, 64, 64, 1, 4, 3)
    other = chosen(less, scheme="fp8_channel", hopper=True)
    assert "has nothing" in other.source and other.kernel == FETCH


def test_hoppers_kernels_that_do_not_serve(installed):
    rule = one_row_tile(64)
    installed(layer(record(_1=entry(64, own()), _500=entry(64, own(num_stages=40)))))
    few = chosen(first(2, rule), hopper=True)
    packs = "is for hopper_packed, but rows are packed by a plan, and so few slots have none, got 2"
    assert few.source == f"{DEFAULT} ({NAME} {packs})"
    assert chosen(first(6, rule), hopper=True).kernel == PACKED
    other = chosen(first(6, rule), hopper=False)
    assert other.config == gemm_tiles(first(6, rule), H200)
    assert other.source.startswith(f"{DEFAULT} ({NAME} is for hopper_packed, but operands must be")
    many = chosen(first(1000, rule), hopper=True)
    assert many.source.startswith(f"{DEFAULT} ({NAME} has 40 stages, must have 2 to")


def test_the_nearest_entry_of_the_load(installed):
    installed(layer(record(_1=entry(gemm1=gemm_of(16)), _30=entry(gemm1=gemm_of(128)))))
    widths = {t: chosen(first(2 * t)).config.block_n for t in (1, 2, 5, 6, 42)}
    assert widths == {1: 16, 2: 16, 5: 16, 6: 128, 42: 128}
    # A rank with 8 of 32 experts sees four times as many slots, most of them of other ranks.
    of_rank = routed_among(PORTABLE, 32)
    here = {t: chosen(first(8 * t, of_rank)).config.block_n for t in (3, 5, 6, 42)}
    assert here == {3: 16, 5: 16, 6: 128, 42: 128}
    other = chosen(first(2 * 60))
    assert other.source == f"{DEFAULT} ({NAME} has nothing for this load)"
    assert other.config == gemm_tiles(first(2 * 60), H200)


def test_the_row_tile_is_that_of_the_plan(installed):
    """An entry serves the plans that have the row tile it was timed with, and changes none."""
    # 8 experts, 2 a token: a load of 1.5 * 2 T / 8.
    installed(layer(record(_4=entry(32), _50=entry(32), _1000=entry(64))))
    found, nothing = f"tuned ({NAME})", f"{DEFAULT} ({NAME} has nothing for this load)"
    for tokens, rule, rows, source in (
        (4, PORTABLE, 16, nothing), (4, HOPPER[2], 16, nothing), (4, one_row_tile(32), 32, found),
        (50, PORTABLE, 32, found), (50, one_row_tile(64), 64, found),
        (1000, PORTABLE, 128, nothing), (1000, EIGHT_BIT, 64, found),
        (1000, one_row_tile(16), 16, nothing), (1000, one_row_tile(32), 32, found),
    ):  # fmt: skip
        choice = chosen(first(2 * tokens, rule))
        assert (choice.config.block_m, choice.source) == (rows, source), (tokens, rule)


def test_loads_past_a_rules_last_step_are_one(installed):
    """Since they all have its last row tile, an entry of any of them serves all of them."""
    installed(layer(record(_400=entry(128, gemm_of(32)))))  # a load of 150
    assert chosen(first(2 * 10000, PORTABLE)).config.block_n == 32
    assert "has nothing" in chosen(first(2 * 10000, HOPPER[2])).source
    installed(layer(record(_400=entry(64, gemm_of(32)))))
    assert chosen(first(2 * 600, EIGHT_BIT)).config.block_n == 32
    assert "has nothing" in chosen(first(2 * 800, EIGHT_BIT)).source


def test_half_a_class_of_loads(installed):
    """8-bit rows on Hopper: up to a load of 90 in tiles of 64, then 128, within one class."""
    content = record(_240=entry(64, gemm_of(32)), _280=entry(128, gemm_of(16)))
    installed(layer(content, scheme="fp8_channel"))
    for tokens, rows, width in ((200, 64, 32), (240, 64, 32), (241, 128, 16), (341, 128, 16)):
        choice = chosen(first(2 * tokens, HOPPER[1], 1), scheme="fp8_channel")
        assert (choice.config.block_m, choice.config.block_n) == (rows, width)
    for tokens in (170, 342):
        choice = chosen(first(2 * tokens, HOPPER[1], 1), scheme="fp8_channel")
        assert "has nothing" in choice.source


def test_both_gemms_find_theirs(installed):
    installed(layer(record(_4=entry(gemm1=gemm_of(64, 32), gemm2=gemm_of(16, 128, 2, 8, 2)))))
    second = Gemm(8, 8, 128, 64, 2, 1, PORTABLE)
    assert chosen(first(8)).config == TileConfig(16, 64, 32, 1, 4, 3)
    assert chosen(second).config == TileConfig(16, 16, 128, 2, 8, 2)
    assert chosen(second).source == f"tuned ({NAME})"


def test_who_finds_nothing(installed):
    gemm = first(8)
    installed(layer(record(_4=entry())))
    assert chosen(gemm).source == f"tuned ({NAME})"
    others = [
        (gemm._replace(num_experts=4), H200, "unquantized"),
        (gemm._replace(n=96), H200, "unquantized"),
        (gemm._replace(rule=INVARIANT), H200, "unquantized"),
        (gemm._replace(itemsize=4), H200, "unquantized"),
        (gemm, H200._replace(name="NVIDIA H100"), "unquantized"),
        (gemm, H200._replace(name=""), "unquantized"),
        (gemm, H200, "fp8_w8a16"),
    ]
    for one, device, scheme in others:
        assert chosen(one, device, scheme).source == DEFAULT


def test_what_does_not_fit_is_not_used(installed):
    installed(layer(record(_4=entry(gemm1=gemm_of(256, 128, num_stages=4)))))
    choice = chosen(first(8))
    assert choice.source.startswith(f"{DEFAULT} ({NAME} has 4 stages, must have 1 to 1)")
    assert choice.config == gemm_tiles(first(8), H200)


@given(
    entries=st.dictionaries(
        st.integers(1, 5000), st.sampled_from([16, 64, 256]), min_size=1, max_size=6
    ),
    rows=st.sampled_from(ROW_TILES),
    rule=st.sampled_from([PORTABLE, EIGHT_BIT, *map(one_row_tile, ROW_TILES)]),
    tokens=st.integers(1, 10**6),
    arch=st.sampled_from(["sm_86", "sm_90"]),
)
def test_every_choice_can_run(entries, rows, rule, tokens, arch):
    """It has the rows of the plan, and fits; what is not the file's is the default's."""
    content = {str(t): entry(rows, gemm_of(n, 128, num_stages=4)) for t, n in entries.items()}
    known = layer({"top_k": 2, **content})
    device = TARGETS[arch].facts._replace(name="NVIDIA H200")
    gemm = first(2 * tokens, rule)
    before, tuned.TABLES = tuned.TABLES, tuned.tables([known])
    try:
        choice = chosen(gemm, device)
    finally:
        tuned.TABLES = before
    assert choice.config.block_m == row_tile(rule, 2 * tokens, 8)
    assert shared_bytes(choice.config, gemm, 16) <= device.shared_memory
    assert choice.source.startswith("tuned") or choice.config == gemm_tiles(gemm, device)
