"""``python -m moe_ops tune``: the search, its files and the command, on a clock that is made up."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from test_cli import ROOT, exit_code

from moe_ops import cli, get_scheme
from moe_ops.pipeline.devices import TARGETS
from moe_ops.tiles import ROW_TILES, pick_row_tile
from moe_ops.tuned import default_row_tiles, parse
from moe_ops.tuning import files
from moe_ops.tuning.search import DIMENSIONS, MARGIN, Subject, Trial, tune_tokens

H200 = TARGETS["sm_90"].facts
SCHEMES = ("unquantized", "fp8_block128", "fp8_channel", "int8_w8a16", "mxfp4_w4a16", "mxfp4")


def subject(scheme="fp8_block128", sizes=(128, 768, 2048), top_k=8):
    return Subject(sizes, top_k, get_scheme(scheme), H200)


class Clock:
    """Microseconds that tell how far tiles are from some that were made up."""

    def __init__(self, row_tile=None, stop_after=math.inf, **best):
        self.row_tile, self.best, self.stop_after = row_tile, best, stop_after
        self.trials = []

    def __call__(self, trial):
        if len(self.trials) >= self.stop_after:
            raise KeyboardInterrupt
        self.trials.append(trial)
        steps = [
            abs(math.log2(getattr(trial.tiles, size) / value)) for size, value in self.best.items()
        ]
        if self.row_tile:
            steps.append(abs(math.log2(trial.tiles.block_m / self.row_tile)) / 2)
        return 100 * trial.gemm + 20 * sum(steps)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 64, 512, 4096])
def test_candidates_are_worth_a_compile(scheme, tokens):
    layer = subject(scheme)
    found = layer.candidates(tokens)
    assert len(set(found)) == len(found) and 10 < len(found) < 80
    group = 128 if scheme == "fp8_block128" else 256
    for trial in found:
        near = [t for t in found if t.gemm == trial.gemm and t.tiles.block_m == trial.tiles.block_m]
        assert trial == near[0] or layer.allows(trial)
        assert trial.tiles.block_k <= group
    default = layer.row_tile(tokens)
    assert found[0].tiles.block_m == default
    assert default == pick_row_tile(default_row_tiles(layer.scheme), 8 * tokens, 128)
    assert {t.tiles.block_m for t in found} <= set(ROW_TILES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_takes_too_much_is_not_tried(scheme):
    layer = subject(scheme)
    trial = layer.starts(4096, 128)[0]
    for changes in ({"num_stages": 30}, {"block_n": 512}, {"num_warps": 1}, {"block_k": 16}):
        assert not layer.allows(trial._replace(tiles=replace(trial.tiles, **changes)))
    small = Subject(layer.sizes, 8, layer.scheme, H200._replace(shared_memory=1000))
    assert not small.allows(trial)
    assert all(small.neighbours(trial, size) == [] for size in DIMENSIONS)


def test_the_search_finds_the_fastest():
    clock = Clock(64, block_n=32, num_warps=8, num_stages=2, block_k=64, group_m=8)
    layer = subject()
    entry = tune_tokens(layer, 512, layer.row_tiles(512), clock)
    won = {"BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 2}
    assert entry["BLOCK_M"] == 64
    for gemm in ("gemm1", "gemm2"):
        assert {size: entry[gemm][size] for size in won} == won
    assert entry["time_us"] == 300 < entry["default_us"]
    assert entry["gemm1"]["time_us"] == 100 and entry["gemm2"]["time_us"] == 200


def test_the_row_tile_is_searched_too_unless_it_is_given():
    layer, clock = subject(), Clock(32)
    assert tune_tokens(layer, 512, layer.row_tiles(512), clock)["BLOCK_M"] == 32
    assert tune_tokens(layer, 512, [128], Clock(32))["BLOCK_M"] == 128
    seen = {t.tiles.block_m for t in clock.trials}
    assert seen == {32, 64, 128}


def test_hopeless_row_tiles_are_left_alone():
    layer, trials = subject(), []

    def time(trial):
        trials.append(trial)
        return 100.0 if trial.tiles.block_m == 64 else 200.0

    assert tune_tokens(layer, 512, layer.row_tiles(512), time)["BLOCK_M"] == 64
    assert sum(t.tiles.block_m == 128 for t in trials) == 2


def test_the_default_stays_where_nothing_is_clearly_faster():
    layer = subject()
    first, second = (trial.tiles for trial in layer.starts(64, 16))

    def time(trial):
        return 100.0 if trial.tiles in (first, second) else 100.0 * (1 - MARGIN / 2)

    entry = tune_tokens(layer, 64, layer.row_tiles(64), time)
    assert entry["BLOCK_M"] == 16 and entry["gemm1"]["BLOCK_N"] == first.block_n
    assert entry["time_us"] == entry["default_us"] == 200


def test_tiles_that_fail_do_not_win():
    layer = subject()
    starts = layer.starts(64, 16)

    def time(trial):
        return 100.0 if trial in starts else math.inf

    assert tune_tokens(layer, 64, layer.row_tiles(64), time)["time_us"] == 200
    with pytest.raises(RuntimeError, match="the default tiles do not run"):
        tune_tokens(layer, 64, layer.row_tiles(64), lambda trial: math.inf)


# Files


def test_what_was_stopped_goes_on(tmp_path):
    layer, counts = subject(), [1, 64, 4096]
    whole = Clock(32, block_n=32)
    assert files.tune(layer, counts, tmp_path / "whole", whole, made_with="x") == [4096, 64, 1]
    of_largest = sum(trial.num_tokens == 4096 for trial in whole.trials)
    with pytest.raises(KeyboardInterrupt):
        files.tune(layer, counts, tmp_path, Clock(32, of_largest + 5, block_n=32), made_with="x")
    assert list(files.read(layer, tmp_path)) == ["4096"]
    rest = Clock(32, block_n=32)
    assert files.tune(layer, counts, tmp_path, rest, made_with="x") == [64, 1]
    assert {trial.num_tokens for trial in rest.trials} == {1, 64}
    assert files.tune(layer, counts, tmp_path, Clock(stop_after=0)) == []
    path = tmp_path / layer.file
    assert path.read_text() == (tmp_path / "whole" / layer.file).read_text()
    assert [p.name for p in tmp_path.glob("*.*")] == [layer.file]
    again = Clock(32, block_n=64)
    assert files.tune(layer, [64], tmp_path, again, again=True) == [64]
    assert list(files.read(layer, tmp_path)) == ["1", "64", "4096"]


def test_one_load_has_one_row_tile(tmp_path):
    layer = subject()
    files.tune(layer, [64], tmp_path, Clock(32))
    files.tune(layer, [1, 8], tmp_path, Clock(16))
    entries = files.read(layer, tmp_path)
    assert {entry["BLOCK_M"] for entry in entries.values()} == {32}
    known = parse(layer.file, (tmp_path / layer.file).read_text())
    assert known.row_tiles[0] == 32 and len(known.entries) == 3


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


# The command

COMMAND = ["tune", "--model", "qwen3-30b-a3b", "--scheme", "fp8_block128", "--device", "sm_90"]


@pytest.fixture
def clock(monkeypatch):
    """The GPU that a command finds."""
    made = Clock(32, block_n=32)
    monkeypatch.setattr(cli, "_gemm_clock", lambda problem, layer: made)
    return made


def test_tune_prints_json_and_resumes(clock, tmp_path, capsys):
    command = [*COMMAND, "--tokens", "1,512", "--output", str(tmp_path), "--json"]
    assert exit_code(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["gpu"], record["scheme"], record["top_k"]) == ("NVIDIA H200", "fp8_block128", 8)
    assert record["timed"] == [512, 1] and list(record["entries"]) == ["1", "512"]
    assert "torch" not in record["entries"]["1"]["made_with"].split(", ")[0]
    assert torch.__version__ in record["entries"]["1"]["made_with"]
    name = "E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json"
    assert record["file"] == str(tmp_path / name)
    parse(name, (tmp_path / name).read_text())
    before = len(clock.trials)
    assert exit_code(command) == 0
    assert json.loads(capsys.readouterr().out)["timed"] == [] and len(clock.trials) == before
    assert exit_code([*command, "--again"]) == 0
    assert json.loads(capsys.readouterr().out)["timed"] == [512, 1] and len(clock.trials) > before


def test_tune_prints_a_table(clock, tmp_path, capsys):
    assert exit_code([*COMMAND, "--tokens", "1,512", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["1", "512"]
    entry = files.read(subject(), tmp_path)["512"]
    ratio = f"{entry['default_us'] / entry['time_us']:.2f}"
    assert lines[3].endswith(ratio)
    assert lines[-1].startswith("the analytic default takes at most ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_gpu(tmp_path, capsys):
    command = [*COMMAND, "--tokens", "1", "--output", str(tmp_path)]
    assert exit_code(command) == 2
    error = capsys.readouterr().err
    assert "NVIDIA H200" in error and "this machine has none" in error and "--dry-run" in error
    files.tune(subject(), [1], tmp_path, Clock())
    assert exit_code(command) == 0  # there is nothing to time


def test_dry_run(capsys):
    assert exit_code([*COMMAND, "--tokens", "8,512", "--dry-run", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = [trial for tokens in (8, 512) for trial in subject().candidates(tokens)]
    assert len(record["candidates"]) == len(found)
    assert record["candidates"][0]["tiles"]["block_n"] == found[0].tiles.block_n
    assert exit_code([*COMMAND, "--tokens", "8,512", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found)


@pytest.mark.parametrize(
    "option, value, known",
    [
        ("--model", "qwen4-1b", ["tiny", "mixtral", "qwen3-30b-a3b"]),
        ("--scheme", "fp7", ["unquantized", "fp8_block128"]),
        ("--device", "sm_10", ["sm_80", "sm_90", "sm_120"]),
        ("--device", "cpu", ["sm_80"]),
        ("--tokens", "0", ["positive integer"]),
    ],
)
def test_unknown_values(option, value, known, capsys):
    assert exit_code([*COMMAND, option, value]) == 2
    error = capsys.readouterr().err
    assert option in error and all(name in error for name in known)


def test_a_broken_file_is_an_error(clock, tmp_path, capsys):
    (tmp_path / subject().file).write_text('{"top_k": 8, "one": {}}')
    assert exit_code([*COMMAND, "--tokens", "1", "--output", str(tmp_path)]) == 2
    assert "a key must be top_k or a token count, got 'one'" in capsys.readouterr().err


# The clock


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gemm_clock(scheme, monkeypatch):
    """Every kind of scheme runs both GEMMs; a wrong result or an error takes forever."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gemm_clock
    from harness import Timing
    from problems import Problem

    problem = Problem("small", 4, 2, 128, 128, timed=False)
    layer = subject(scheme, (4, 128, 128), 2)
    wrong = []

    def timer(call, device, budget_s):
        output = call()
        if wrong:
            output = wrong[0](output)
        return Timing(7.0, 7.0, 7.0, 1, output)

    clock = gemm_clock.GemmClock(problem, layer, timer)
    trials = [Trial(5, start.gemm, start.tiles) for start in layer.starts(5, 16)]
    assert [clock(trial) for trial in trials] == [7.0, 7.0]
    wrong.append(lambda output: output * 1.1)
    assert [clock(trial) for trial in trials] == [math.inf, math.inf]
    wrong[0] = lambda output: output * math.nan
    assert clock(trials[0]) == math.inf
    wrong[0] = lambda output: 1 / 0
    assert clock(trials[1]) == math.inf
    sys.modules.pop("gemm_clock")
