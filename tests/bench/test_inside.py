"""Layers inside a serving engine, on stand-ins of SGLang."""

import json
import sys

import inside
import inside_sglang
import peers
import pytest
import sglang_stand_ins as stand_ins
import torch
from peers import IN_SGLANG, PEERS, SGLANG_TRITON, installed

from moe_ops import fused_experts
from moe_ops.bench import layer, problems

SMALL = problems.Problem("small", 8, 2, 256, 128, timed=False)
CPU = torch.device("cpu")


@pytest.fixture
def engine(monkeypatch):
    """SGLang's stand-ins, whose Triton runner computes a layer that is not quantized."""
    for probe in (peers.sglang.started, installed.lacks):
        probe.cache_clear()
    monkeypatch.delenv("MOE_OPS_SGLANG", raising=False)
    monkeypatch.setattr(installed, "find_spec", lambda name: name == "sglang")
    yield stand_ins.install(monkeypatch)
    for probe in (peers.sglang.started, installed.lacks):
        probe.cache_clear()


def triton(dispatch_output, quant_info, runner_config):
    """What SGLang's Triton kernels compute of a layer that is not quantized."""
    assert runner_config.num_experts == runner_config.num_local_experts == 8
    assert runner_config.top_k == 2 and not runner_config.inplace
    assert dispatch_output.hidden_states_pre_quant is None
    weights, ids, _ = dispatch_output.topk_output
    w1, w2 = quant_info.w13_weight, quant_info.w2_weight
    out = fused_experts(dispatch_output.hidden_states, w1, w2, weights, ids)
    return stand_ins.StandardCombineInput(out)


def rows_of(monkeypatch, capsys, *options):
    arguments = ["inside_sglang.py", "--sizes=8,2,256,128", "--tokens=1,7", "--json", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    status = inside.main(inside_sglang.SGLANG)
    return status, json.loads(capsys.readouterr().out)["rows"]


def test_both_runners_are_timed(engine, monkeypatch, capsys):
    """On the same weights, with the versions of both and SGLang's tiles; hooks are not applied."""
    versions = {"sglang": "0.5.23", "sglang-kernel": "0.4"}
    made = [type("D", (), {"metadata": {"Name": k}, "version": v}) for k, v in versions.items()]
    monkeypatch.setattr(inside.metadata, "distributions", lambda: made)
    monkeypatch.setitem(engine.pool.functions, ("none", "triton"), triton)
    status, rows = rows_of(monkeypatch, capsys, "--scheme=bf16")
    assert status == 0 and [(row["M"], row["impl"]) for row in rows] == [
        (1, IN_SGLANG), (1, SGLANG_TRITON), (7, IN_SGLANG), (7, SGLANG_TRITON),
    ]  # fmt: skip
    assert all(row["rel_err"] < 0.02 for row in rows)
    for row in rows:
        tuned = {"tuned": False} if row["impl"] == SGLANG_TRITON else {}
        del row["config"]["active_experts"]
        assert row["config"] == versions | tuned
    assert list(engine.factories) == ["moe_ops"]
    assert engine.pool.get_fused_func("none", "triton") is not None
    assert not hasattr(engine.pool.get_fused_func("none", "triton"), "__wrapped__")


@pytest.mark.parametrize("scheme", PEERS[IN_SGLANG].makers)
def test_every_scheme_inside_sglang(engine, scheme):
    """The runner of the plug-in computes the layer from what SGLang's methods pass, bit for bit."""
    assert PEERS[IN_SGLANG].missing() is None and PEERS[IN_SGLANG].takes(scheme, SMALL, 7)
    experts = problems.make_experts(SMALL, scheme, CPU)
    inputs = problems.make_inputs(SMALL, 7, "uniform", CPU)
    before = inputs.x.clone()
    actual = PEERS[IN_SGLANG](experts, inputs)()
    assert torch.equal(actual, layer.plain_layer(experts, inputs)())
    assert torch.equal(inputs.x, before), "a replay takes the same tokens"
    assert peers.sglang.has_tuned_tiles(experts) == (scheme == "fp8_block128")


def test_mxfp4_beside_dequantized_weights(engine, monkeypatch, capsys):
    """SGLang's kernels get bf16; both are held to the weights in MXFP4."""
    monkeypatch.setitem(engine.pool.functions, ("none", "triton"), triton)
    status, rows = rows_of(monkeypatch, capsys, "--schemes=mxfp4_w4a16")
    assert status == 0 and len(rows) == 4 and all(row["rel_err"] < 0.02 for row in rows)


def test_what_sglang_lacks(engine, monkeypatch, capsys):
    monkeypatch.delattr(engine.modules[f"{stand_ins.MOE}.token_dispatcher.standard"],
                        "StandardCombineInput")  # fmt: skip
    monkeypatch.delitem(sys.modules, f"{stand_ins.RUNNERS}.triton_utils.fused_moe")
    monkeypatch.setattr(sys, "argv", ["inside_sglang.py", "--sizes=8,2,256,128", "--tokens=1"])
    assert inside.main(inside_sglang.SGLANG) == 1
    said = capsys.readouterr().err.splitlines()
    assert f"{IN_SGLANG} is left out, it needs {stand_ins.MOE}" in said[0]
    assert "StandardCombineInput as the plug-in knows it" in said[0]
    assert f"{SGLANG_TRITON} is left out, it needs ModuleNotFoundError" in said[1]
