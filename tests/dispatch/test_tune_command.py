"""``python -m moe_ops tune``, and the clock that it times GEMMs with."""

import json
import math

import pytest
import torch
from command_line import exit_code
from conftest import HAS_CUDA, INTERPRETED
from plans import row_tile
from tune_trials import A100, H200, PACKED_SCHEMES, SCHEMES, Clock, kernel_of, plain_trial, subject
from tuned_entries import entry, nothing_ships, own

from moe_ops import cli
from moe_ops.dispatch.hopper import FETCH, STREAM
from moe_ops.dispatch.tuned_file import parse_tuned_layer
from moe_ops.inspect.devices import TARGETS
from moe_ops.scheme import is_packed
from moe_ops.tuning import files
from moe_ops.tuning.search import Trial

pytestmark = pytest.mark.usefixtures(nothing_ships.__name__)
COMMAND = ["tune", "--model", "qwen3-30b-a3b", "--scheme", "fp8_block128", "--device", "h200"]


@pytest.fixture
def clock(monkeypatch):
    """The GPU that a command finds, which is an H200 on every machine."""
    made = Clock(block_n=32)
    monkeypatch.setattr(cli, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(cli, "_gemm_clock", lambda problem, layer, jobs: (made, list))
    return made


def test_tune_prints_json_and_resumes(clock, tmp_path, capsys):
    command = [*COMMAND, "--tokens", "8,512", "--output", str(tmp_path), "--json"]
    assert exit_code(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["gpu"], record["scheme"], record["top_k"]) == ("NVIDIA H200", "fp8_block128", 8)
    assert record["timed"] == [512, 8] and list(record["entries"]) == ["8", "512"]
    assert "torch" not in record["entries"]["8"]["made_with"].split(", ")[0]
    assert torch.__version__ in record["entries"]["8"]["made_with"]
    name = "E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json"
    assert record["file"] == str(tmp_path / name)
    parse_tuned_layer(name, (tmp_path / name).read_text())
    before = len(clock.trials)
    assert exit_code(command) == 0
    assert json.loads(capsys.readouterr().out)["timed"] == [] and len(clock.trials) == before
    assert exit_code([*command, "--again"]) == 0
    assert json.loads(capsys.readouterr().out)["timed"] == [512, 8] and len(clock.trials) > before


def test_tune_records_defaults_beside_the_best(clock, tmp_path):
    """A row per GEMM, merged with rows of other runs; times and configs are those of the file."""
    command = [*COMMAND, "--output", str(tmp_path), "--record", str(tmp_path / "records")]
    assert exit_code([*command, "--tokens", "512"]) == 0
    (path,) = (tmp_path / "records").glob("*/tuning.json")
    assert exit_code([*command, "--tokens", "2"]) == 0
    sizes = ["tune", "--sizes", "64,4,2048,640", "--scheme", "fp8_block128", "--device", "h200"]
    assert exit_code([*sizes, *command[7:], "--tokens", "2"]) == 0
    record = json.loads(path.read_text())
    keys = [(row["shape"], row["M"], row["gemm"]) for row in record["rows"]]
    other = "E64-k4-H2048-I640"
    assert keys == [(other, 2, 1), (other, 2, 2), *(
        ("qwen3-30b", tokens, which) for tokens in (2, 512) for which in (1, 2)
    )]  # fmt: skip
    layer = subject()
    entry = files.read(layer, tmp_path)["512"]
    for row in record["rows"][-2:]:
        found = entry[f"gemm{row['gemm']}"]
        assert (row["default_us"], row["best_us"]) == (found["default_us"], found["time_us"])
        assert row["best"].items() <= found.items() and row["sizes"] == [128, 8, 2048, 768]
        assert row["default"]["block_n"] == layer.starts(512)[row["gemm"] - 1].tiles.block_n
        assert 1 < row["ratio"] == round(entry["default_us"] / entry["time_us"], 4)


def test_tune_prints_a_table(clock, tmp_path, capsys):
    assert exit_code([*COMMAND, "--tokens", "8,512", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["8", "512"]
    entry = files.read(subject(), tmp_path)["512"]
    ratio = f"{entry['default_us'] / entry['time_us']:.2f}"
    assert lines[3].endswith(ratio)
    assert lines[-1].startswith("the analytic default takes at most ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_gpu(tmp_path, capsys):
    command = [*COMMAND, "--tokens", "8", "--output", str(tmp_path)]
    assert exit_code(command) == 2
    error = capsys.readouterr().err
    assert "NVIDIA H200" in error and "this machine has none" in error and "--dry-run" in error
    files.tune(subject(), [8], tmp_path, Clock())
    assert exit_code(command) == 0  # there is nothing to time
    for more in ([], ["--dry-run"]):
        assert exit_code(["tune", "--model", "tiny", *more]) == 2
        error = capsys.readouterr().err
        assert "--device must name a GPU" in error and "NVIDIA" not in error


@pytest.mark.parametrize("scheme", ["fp8_block128", "int4_w4a16_g128"])
def test_one_token_has_no_tiles(scheme, tmp_path, capsys):
    """Its kernels' tiles follow from the sizes: nothing is timed, and the user is told."""
    command = [*COMMAND, "--scheme", scheme, "--output", str(tmp_path)]
    for more in ([], ["--json"], ["--dry-run"], ["--dry-run", "--json"]):
        assert exit_code([*command, "--tokens", "1", *more]) == 0
        assert "1 token: no tiles to tune" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    assert exit_code([*command, "--tokens", "1,8", "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    assert "1 token: no" in captured.err and "8 tokens" not in captured.err
    assert {trial["num_tokens"] for trial in json.loads(captured.out)["candidates"]} == {8}


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


def test_tiles_that_are_not_looked_up_are_not_tuned(capsys):
    command = ["tune", "--model", "tiny", "--scheme", "mxfp4", "--device", "sm_100", "--dry-run"]
    assert exit_code(command) == 2
    assert "got mxfp4 on sm_100" in capsys.readouterr().err


def test_a_broken_file_is_an_error(clock, tmp_path, capsys):
    (tmp_path / subject().file).write_text('{"top_k": 8, "one": {}}')
    assert exit_code([*COMMAND, "--tokens", "1", "--output", str(tmp_path)]) == 2
    assert "a key must be top_k or a token count, got 'one'" in capsys.readouterr().err


def test_files_that_were_written_by_hand(clock, tmp_path, capsys):
    """Times and defaults may be left out, or be no times; what is no text names its file."""
    path, command = tmp_path / subject().file, [*COMMAND, "--tokens", "2", "--output"]
    tiles = own(STREAM, 128, 1, 8)
    by_hand = {"2": entry(16, tiles, tiles), "8": {**entry(), "time_us": 0, "default_us": 1.0}}
    path.write_text(json.dumps({"top_k": 8, **by_hand}))
    assert exit_code([*command, str(tmp_path)]) == 0
    *_, stream, portable, last = capsys.readouterr().out.splitlines()
    assert stream.split()[2] == STREAM and "on demand" not in stream
    assert stream.split()[-3:] == portable.split()[-3:] == ["-"] * 3 and " 1.00 times" in last
    path.write_bytes(b"\xff")
    assert exit_code([*command, str(tmp_path)]) == 2
    assert f"{path.name}: it must be text in UTF-8, got" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(clock, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    command = [*COMMAND, "--tokens", "8", "--output"]
    wrong = str(tmp_path / "file")
    with monkeypatch.context() as patch:  # before the weights are made, which takes a while
        patch.setattr(cli, "_gemm_clock", None)
        for options in ([wrong], [str(tmp_path), "--record", wrong + "/below"]):
            assert exit_code([*command, *options]) == 2
            assert f"the folder must be writable, got {options[-1]}" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["file"], "a check makes nothing"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert exit_code([*command, str(tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err


# The clock

BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")


@pytest.fixture
def made():
    """Makes a clock of a small layer, with a timer that runs a call once."""
    from moe_ops.bench import gemm_clock
    from moe_ops.bench.harness import Timing
    from moe_ops.bench.problems import Problem

    def make(scheme, change=lambda output: output, row_tile=None, gpu=H200):
        def timer(call, device, budget_s):
            return Timing(7.0, 7.0, 7.0, 1, change(call()))

        sizes, problem = (4, 128, 128), Problem("small", 4, 2, 128, 128, timed=False)
        return gemm_clock.GemmClock(problem, subject(scheme, sizes, 2, row_tile, gpu), timer)

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gemm_clock(scheme, made):
    """Every kind of scheme runs both GEMMs; a wrong result or an error takes forever."""
    changes = []
    clock = made(scheme, lambda output: changes[0](output) if changes else output)
    trials = clock.subject.starts(5)
    for weight in clock.gemms.weights[:2]:
        assert is_packed(weight.data) == (scheme in PACKED_SCHEMES)
    assert [clock(trial) for trial in trials] == [7.0, 7.0]
    for change in (lambda y: y * 1.1, lambda y: y * math.nan, lambda y: 1 / 0):
        changes[:] = [change]
        assert [clock(trial) for trial in trials] == [math.inf, math.inf]


@pytest.mark.kernel
@pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="no kernel runs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trials_launch_their_tiles(scheme, made, monkeypatch):
    from moe_ops.kernels._runtime.launch import Launch

    launch, seen = Launch.__call__, []

    def record_constants(self, *given):
        if "GROUP_M" in self.constants:
            seen.append(tuple(self.constants[size] for size in BLOCKS))
        launch(self, *given)

    monkeypatch.setattr(Launch, "__call__", record_constants)
    clock = made(scheme, row_tile=32, gpu=A100)  # weights are plain
    clock.launches = True  # in the interpreter, too
    for start in (plain_trial(clock.subject, 5, which) for which in (1, 2)):
        for trial in [start, *clock.subject.neighbours(start, "block_k")]:
            seen.clear()
            with row_tile(32, portable_only=False):
                assert clock(Trial(5, trial.gemm, trial.tiles)) == 7.0
            tiles = trial.tiles
            assert seen[-1] == (
                32, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel", "fp8_block128"])
@pytest.mark.parametrize(("tokens", "rows"), [(5, 32), (400, 64), (400, 128)])
def test_trials_launch_hoppers_kernels(scheme, tokens, rows, made, monkeypatch):
    from moe_ops.kernels._hopper import gemm as hopper_gemm

    if not HAS_CUDA or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    run, seen = hopper_gemm.HopperGemm.__call__, []

    def record_constants(self, *given):
        c = self.constants
        seen.append((c.BLOCK_M, c.BLOCK_N, c.GROUP_M, c.STAGES, self.alone, c.FETCHES))
        run(self, *given)

    monkeypatch.setattr(hopper_gemm.HopperGemm, "__call__", record_constants)
    clock, tried = made(scheme, row_tile=rows), 0
    for start in (t for which in (1, 2) for t in clock.subject.beginnings(tokens, which)):
        tiles, own = start.tiles, kernel_of(start)
        expected = own and (rows, tiles.block_n, tiles.group_m, tiles.num_stages)
        with row_tile(rows, portable_only=False):
            assert clock(start) == 7.0  # and its result is right
            seen.clear()
            clock(start)
        assert seen == ([(*expected, tiles.alone, own == FETCH)] if own else [])
        tried += own is not None
    assert tried >= (0 if scheme == "unquantized" and rows == 32 else 2)
