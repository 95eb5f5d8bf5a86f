"""The search for tiles and its files, on a clock that is made up."""

import json
import math
from dataclasses import replace
from multiprocessing import get_context

import pytest
from tune_trials import A100, H200, SCHEMES, Clock, kernel_of, plain_trial, subject
from tuned_entries import entry, nothing_ships

from moe_ops import FusedMoEConfig, RoutingMethodType, explain
from moe_ops.dispatch import tuned
from moe_ops.dispatch.families.many_rows import GATHERED_GROUPS
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, HopperTiles, most_stages, tile_widths
from moe_ops.dispatch.row_tiles import row_tile_rule
from moe_ops.dispatch.tiles import row_tile
from moe_ops.dispatch.tuned_file import parse_tuned_layer
from moe_ops.tuning import files
from moe_ops.tuning.search import DIMENSIONS, MARGIN, Subject, tune_tokens

pytestmark = pytest.mark.usefixtures(nothing_ships.__name__)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 64, 512, 2048, 4096])
def test_candidates_are_worth_a_compile(scheme, tokens):
    layer = subject(scheme)
    found = layer.candidates(tokens)
    assert len(set(found)) == len(found) and 6 < len(found) < 120
    group = 128 if scheme == "fp8_block128" else 256
    for trial in found:
        kernels = layer.beginnings(tokens, trial.gemm)
        assert trial in kernels or layer.allows(trial)
        assert isinstance(trial.tiles, HopperTiles) or trial.tiles.block_k <= group
    rows = row_tile(row_tile_rule(scheme, 2, 90, None, False), 8 * tokens, 128)
    assert {t.tiles.block_m for t in found} == {rows}  # that of the plan is not searched
    if scheme == "unquantized" and tokens == 2048:
        assert rows == 192 and {kernel_of(t) for t in found} == {PACKED}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_default_is_what_runs_without_files(scheme, monkeypatch):
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))
    config = FusedMoEConfig(128, 8, 2048, 768, 128, "silu", "cuda", RoutingMethodType.Renormalize)
    # Up to 16 slots may have kernels of their own, which are not tuned.
    layer, counts = subject(scheme), (3, 8, 64, 512, 4096, 30000)
    found = explain(config, scheme, num_tokens=counts, device="sm_90")
    for tokens, cost in zip(counts, found.costs, strict=True):
        assert [trial.tiles for trial in layer.starts(tokens)] == [cost.gemm1, cost.gemm2]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_takes_too_much_is_not_tried(scheme):
    layer = subject(scheme, gpu=A100)
    trial = plain_trial(layer, 4096, 1)
    for changes in ({"num_stages": 30}, {"block_n": 512}, {"num_warps": 1}, {"block_k": 16}):
        assert not layer.allows(trial._replace(tiles=replace(trial.tiles, **changes)))
    wide = {"block_n": 256, "block_k": 32, "num_warps": 4, "num_stages": 1}
    assert not layer.allows(trial._replace(tiles=replace(trial.tiles, **wide)))
    small = Subject(layer.sizes, 8, layer.scheme, A100._replace(shared_memory=1000))
    assert not small.allows(trial)
    assert all(small.neighbours(trial, size) == [] for size in DIMENSIONS)


@pytest.mark.parametrize("kernel, rows, tokens", [(PACKED, 64, 4096), (STREAM, 32, 512)])
def test_what_hoppers_kernels_lack_is_not_tried(kernel, rows, tokens):
    layer = subject(row_tile=rows)
    (trial,) = (t for t in layer.beginnings(tokens, 2) if kernel_of(t) == kernel)
    assert trial.tiles.num_stages == most_stages(trial.tiles, H200) or kernel == STREAM
    for stages in (1, 30):
        assert not layer.allows(trial._replace(tiles=replace(trial.tiles, num_stages=stages)))
    (other,) = layer.neighbours(trial, "block_n")
    assert {trial.tiles.block_n, other.tiles.block_n} == set(tile_widths(kernel, rows, 1))
    assert other.tiles.num_stages == most_stages(other.tiles, H200)
    assert not layer.neighbours(trial, "num_warps") and not layer.neighbours(trial, "block_k")
    groups = {t.tiles.group_m for t in layer.neighbours(trial, "group_m")}
    others = set(GATHERED_GROUPS) - {trial.tiles.group_m} if kernel == PACKED else set()
    assert groups == others
    other_way = replace(trial.tiles, on_demand=not trial.tiles.on_demand)
    found = [t.tiles for t in layer.neighbours(trial, "on_demand")]
    assert found == [other_way] * (kernel == PACKED)
    assert not layer.neighbours(plain_trial(layer, tokens, 2), "on_demand")


@pytest.mark.parametrize("tokens", [1, 512, 4096])
def test_tiles_in_order_are_not_tried(tokens):
    """What is timed has uniform routing, where they win. Where it is skewed they lose."""
    layer = subject("unquantized")
    trial = plain_trial(layer, tokens, 1)
    tried = {t.tiles.group_m for t in layer.neighbours(trial, "group_m")}
    assert tried == (set() if tokens == 1 else {4, 8, 32} - {trial.tiles.group_m})


def test_hoppers_kernels_are_tried_where_they_serve():
    def tried(tokens, rows, *layer):
        found = subject(*layer, row_tile=rows).beginnings(tokens, 1)
        assert {t.tiles.block_m for t in found} == {rows}
        return [kernel_of(t) for t in found]

    assert tried(4096, 64) == [PACKED, None, STREAM]
    assert tried(512, 64) == [None, PACKED, STREAM]
    assert tried(1, 16) == [STREAM, None]
    assert tried(1, 64) == [None, STREAM]  # there is no plan to pack by
    assert tried(4096, 128, "unquantized") == [FETCH, PACKED, None]
    assert tried(4096, 192, "unquantized") == [PACKED]  # the others take powers of two
    assert tried(64, 16, "unquantized") == [None]
    for scheme in ("int8_channel", "int8_block128"):
        assert tried(4096, 64, scheme) == [PACKED, None, STREAM]
    for scheme in ("fp8_w8a16_block128", "fp8_block64x32"):
        assert tried(4096, 64, scheme) == [None]
    for sizes in ((128, 768, 2056), (128, 764, 2048)):  # no whole 16 bytes; no 8 gate rows
        assert tried(4096, 64, "fp8_channel", sizes) == [None]
    assert not subject(row_tile=192).beginnings(4096, 1)  # none has so many 8-bit rows
    for scheme in ("unquantized", "int8_w8a16"):
        on_a100 = subject(scheme, gpu=A100)
        assert [kernel_of(t) for t in on_a100.beginnings(4096, 1)] == [None]


@pytest.mark.parametrize("demand", [False, True])
def test_the_search_finds_the_fastest_kernel(demand):
    """Tiles are taken on demand in this class where nothing was timed."""
    clock = Clock(kernel=PACKED, on_demand=demand, block_n=128, group_m=8, num_stages=5)
    layer = subject()
    entry = tune_tokens(layer, 4096, clock)
    won = {"kernel": PACKED, "BLOCK_N": 128, "GROUP_M": 8, "num_stages": 5, "ON_DEMAND": demand}
    times = {"time_us": 100, "default_us": entry["gemm1"]["default_us"]}
    assert entry["gemm1"] == {**won, **times} and entry["BLOCK_M"] == 128
    known = parse_tuned_layer(layer.file, json.dumps({"top_k": 8, "4096": entry}))
    assert known.entries[0].gemm2 == HopperTiles(PACKED, 128, 128, 8, 5, demand)


def test_the_search_finds_the_fastest():
    clock = Clock(block_n=32, num_warps=8, num_stages=2, block_k=64, group_m=8)
    entry = tune_tokens(subject(), 512, clock)
    won = {"BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 2}
    assert entry["BLOCK_M"] == 64
    for gemm in ("gemm1", "gemm2"):
        assert {size: entry[gemm][size] for size in won} == won
    assert entry["time_us"] == 300 < entry["default_us"]
    assert entry["gemm1"]["time_us"] == 100 and entry["gemm2"]["time_us"] == 200


@pytest.mark.parametrize(("given", "rows"), [(None, 64), (32, 32)])
def test_the_row_tile_is_that_of_the_plan(given, rows):
    """Row tiles are not searched: the load gives one, unless the device's plans have another."""
    clock = Clock(block_n=32)
    assert tune_tokens(subject(row_tile=given), 512, clock)["BLOCK_M"] == rows
    assert {t.tiles.block_m for t in clock.trials} == {rows}


def test_hopeless_kernels_are_left_alone():
    layer, trials = subject(), []

    def time(trial):
        trials.append(trial)
        return 100.0 if kernel_of(trial) is None else 200.0

    assert "kernel" not in tune_tokens(layer, 512, time)["gemm1"]
    begin = [t for which in (1, 2) for t in layer.beginnings(512, which)]
    hoppers = [t for t in trials if kernel_of(t) is not None]
    assert hoppers == [t for t in begin if kernel_of(t) is not None] != []


def test_the_default_stays_where_nothing_is_clearly_faster():
    layer = subject()
    first, second = (trial.tiles for trial in layer.starts(64))

    def time(trial):
        return 100.0 if trial.tiles in (first, second) else 100.0 * (1 - MARGIN / 2)

    entry = tune_tokens(layer, 64, time)
    assert entry["BLOCK_M"] == 16 and entry["gemm1"]["BLOCK_N"] == first.block_n
    assert entry["time_us"] == entry["default_us"] == 200


def test_tiles_that_fail_do_not_win():
    layer = subject()
    starts = layer.starts(64)

    def time(trial):
        return 100.0 if trial in starts else math.inf

    assert tune_tokens(layer, 64, time)["time_us"] == 200
    with pytest.raises(RuntimeError, match="the default tiles do not run"):
        tune_tokens(layer, 64, lambda trial: math.inf)


# Files


def test_what_was_stopped_goes_on(tmp_path):
    layer, counts = subject(), [1, 64, 4096]
    whole = Clock(block_n=32)
    assert files.tune(layer, counts, tmp_path / "whole", whole, made_with="x") == [4096, 64, 1]
    of_largest = sum(trial.num_tokens == 4096 for trial in whole.trials)
    with pytest.raises(KeyboardInterrupt):
        files.tune(layer, counts, tmp_path, Clock(of_largest + 5, block_n=32), made_with="x")
    assert list(files.read(layer, tmp_path)) == ["4096"]
    rest = Clock(block_n=32)
    assert files.tune(layer, counts, tmp_path, rest, made_with="x") == [64, 1]
    assert {trial.num_tokens for trial in rest.trials} == {1, 64}
    assert files.tune(layer, counts, tmp_path, Clock(stop_after=0)) == []
    path = tmp_path / layer.file
    assert path.read_text() == (tmp_path / "whole" / layer.file).read_text()
    assert [p.name for p in tmp_path.glob("*.*")] == [layer.file]
    again = Clock(block_n=64)
    assert files.tune(layer, [64], tmp_path, again, again=True) == [64]
    assert list(files.read(layer, tmp_path)) == ["1", "64", "4096"]


def write_every_other(folder, first, last):
    for tokens in range(first, last, 2):
        files.write(subject(), folder, {str(tokens): entry()})


def test_processes_that_write_one_file(tmp_path):
    """Readers never see half of a file, and entries of both are kept."""
    fork = get_context("fork")
    both = [fork.Process(target=write_every_other, args=(tmp_path, n, 81)) for n in (1, 2)]
    for process in both:
        process.start()
    torn = []
    while any(process.is_alive() for process in both):
        torn += tuned.look_into(tmp_path).problems
    assert [process.exitcode for process in both] == [0, 0] and not torn
    assert list(files.read(subject(), tmp_path)) == [str(n) for n in range(1, 81)]
    assert [path.name for path in tmp_path.iterdir()] == [subject().file]


def test_entries_that_are_written_meanwhile_stay(tmp_path):
    """An entry replaces the one of the same number of tokens alone."""
    layer, others = subject(), {"64": entry(), "8": entry()}
    files.write(layer, tmp_path, others)

    def late(tokens, _):
        files.write(layer, tmp_path, {"100": entry(), "8": entry(32)})

    hooks = files.Hooks(report=late)
    assert files.tune(layer, [64], tmp_path, Clock(), again=True, hooks=hooks) == [64]
    now = files.read(layer, tmp_path)
    assert list(now) == ["8", "64", "100"] and now["8"] == entry(32) and "time_us" in now["64"]


def test_a_lock_that_was_left(tmp_path):
    """A process that died holds none; its file is used, and removed."""
    (tmp_path / f"{subject().file}.lock").write_text("")
    files.write(subject(), tmp_path, {"8": entry()})
    assert [path.name for path in tmp_path.iterdir()] == [subject().file]


def test_a_folder_without_locks(tmp_path, monkeypatch):
    def none(*given):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.warns(match="has no locks: .*Operation not supported"):
        files.write(subject(), tmp_path, {"8": entry()})
    assert list(files.read(subject(), tmp_path)) == ["8"]


def test_a_draft_that_cannot_be_written_leaves_the_file(tmp_path, monkeypatch):
    files.write(subject(), tmp_path, {"8": entry()})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(subject(), tmp_path, {"64": entry()})
    assert list(files.read(subject(), tmp_path)) == ["8"]
    assert [path.name for path in tmp_path.iterdir()] == [subject().file]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """Nothing is timed before the error, which says what to do."""
    rule = r"the folder must be writable, got .*--output or MOE_OPS_TUNED_DIR names another"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rule):
        files.tune(subject(), [8], tmp_path / "file" / "below", Clock(stop_after=0))

    def refused(**given):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "TemporaryFile", refused)  # root may write anywhere
    with pytest.raises(ValueError, match=rule):
        files.tune(subject(), [8], tmp_path, Clock(stop_after=0))


def test_a_budget_of_time(tmp_path):
    assert files.tune(subject(), [1, 8], tmp_path, Clock(), budget_s=-1) == []
    assert not (tmp_path / subject().file).exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_tuned_is_found(scheme, tmp_path, monkeypatch):
    """Plans of the timed token counts find it, whichever count of a load was timed first."""
    layer, clock = subject(scheme), Clock(block_n=32)
    counts = [5, 64, 100, 512, 1200, 1365, 1366, 2048, 4096]
    assert files.tune(layer, [64], tmp_path, clock) == [64]
    files.tune(layer, counts, tmp_path, clock)
    known = parse_tuned_layer(layer.file, (tmp_path / layer.file).read_text())
    assert [entry.num_tokens for entry in known.entries] == counts
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([known]))
    for num_tokens, *both in known.entries:
        for which, tiles in enumerate(both, start=1):
            plan = plan_gemm(layer.problem(num_tokens, which), layer.device)
            assert (plan.config, plan.source) == (tiles, f"tuned ({layer.file})")


def test_a_file_of_another_layer_is_refused(tmp_path):
    files.tune(subject(), [1], tmp_path, Clock())
    with pytest.raises(ValueError, match=r"E=128.*top_k must be 4, got 8"):
        files.tune(subject(top_k=4), [1], tmp_path, Clock())


@pytest.mark.parametrize("bar", [True, False])
def test_progress_is_shown(bar, tmp_path, monkeypatch, capsys):
    if bar:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr(files, "tqdm", None)
    layer = subject()
    files.tune(layer, [1, 64], tmp_path, Clock())
    total = sum(len(layer.candidates(tokens)) for tokens in (1, 64))
    shown = capsys.readouterr().err
    assert "fp8_block128, 2 counts" in shown
    assert (f"{total}/{total}" if bar else f"{total} of {total}\n") in shown
