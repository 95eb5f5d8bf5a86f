"""`bench --resident`: what it measures of a small layer."""

import json

import pytest

from moe_ops.cli import main


def test_a_layer_in_host_memory(capsys):
    arguments = "bench --resident 4,1.0 --model tiny --tokens 1,8 --scheme int8_channel"
    assert main(arguments.split()) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if "int8" in line]
    assert len(table) == 4
    few, many, whole, _ = table
    assert (few[4], few[9]) == ("4", "1") and 0.5 <= float(few[8]) < 0.52  # of two experts
    assert many[6] == "-" and many[-1] == few[-1] == "True"  # they do not fit
    assert whole[4] == "8" and float(whole[8]) > 0.9


def test_what_does_not_fit(capsys):
    assert main(["bench", "--resident", "1", "--model", "tiny", "--tokens", "1"]) == 1
    assert "--resident must be an int from top_k = 2 to 8" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_code:
        main(["bench", "--resident"])
    assert exit_code.value.code == 2


def test_explain_of_experts_in_host_memory(capsys):
    sized = "explain --model qwen3-30b-a3b --device h100 --tokens 1,64"
    assert main(f"{sized} --resident 32 --host-gbps 25 --json".split()) == 0
    host = json.loads(capsys.readouterr().out)["host"]
    assert (host["resident"], host["host_gbps"], host["streams_from"]) == (32, 25.0, 5)
    assert main(f"{sized} --resident 0.25".split()) == 0
    assert "resident: 32 of 128 experts a layer: 0.302 GB" in capsys.readouterr().out
    for wrong in ("2", "x", "1GiB", "-0.5"):
        with pytest.raises(SystemExit) as exit_code:
            main(f"{sized} --resident={wrong}".split())
        assert exit_code.value.code == 2
        assert "resident must" in capsys.readouterr().err
