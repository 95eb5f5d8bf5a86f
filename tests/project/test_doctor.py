"""``moe-ops doctor``: what it finds, here and on GPUs that are not here."""

import json
import os
import re

import pytest
import torch
from command_line import exit_code

from moe_ops import doctor
from moe_ops.bench.problems import find_problem
from moe_ops.dispatch import tuned
from moe_ops.scheme import SCHEMES


def test_all_is_well_here(capsys):
    assert exit_code(["doctor"]) == 0
    captured = capsys.readouterr()
    assert torch.__version__ in captured.out and captured.out.endswith("all is well\n")
    assert "self-test of unquantized" in captured.err
    if not torch.cuda.is_available():
        assert "the CPU: the references" in captured.out and "GPU          none" in captured.out


def test_json(capsys):
    assert exit_code(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["problems"] == []
    assert set(found["self_test"].values()) == {"passed"} and "unquantized" in found["self_test"]
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["extras"]) == set(doctor.EXTRAS)
    assert bool(found["kernels"]) is bool(found["gpus"]) is torch.cuda.is_available()
    assert found["tuned"]["all"] > 0


def test_a_wrong_result_is_a_problem(capsys, monkeypatch):
    right = doctor.fused_experts
    monkeypatch.setattr(doctor, "fused_experts", lambda *given, **more: right(*given, **more) * 1.5)
    assert exit_code(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: self-test of unquantized: AssertionError" in printed
    assert "all is well" not in printed


def test_a_failing_layer_is_a_problem(monkeypatch):
    def fails(*arguments, **more):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(doctor, "fused_experts", fails)
    found = doctor.diagnose()
    assert set(found.self_test.values()) == {"RuntimeError: no compiler"}
    assert len(found.problems) == len(found.self_test)


def test_tuned_files_that_are_not_used_are_problems(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuned, "FOLDER", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert exit_code(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"PROBLEM: a file in {tmp_path} is not used: config.json: the name must" in printed
    assert f"yours are looked for in {tmp_path}" in printed
    monkeypatch.setattr(tuned, "FOLDER", str(tmp_path / "none"))
    found = doctor.diagnose()
    assert "MOE_OPS_TUNED_DIR must name a folder" in found.problems[0] and found.tuned["all"] > 0


ENGINES = {
    "another": ("__version__ = '9.9'", "9.9", "vLLM's own experts run: vLLM 9.9 has no "),
    "ends": ("import os; os._exit(3)", "cannot be imported", "leaves everything: exit 3"),
}


@pytest.mark.parametrize("case", ENGINES)
def test_engines_say_what_they_take(monkeypatch, tmp_path, case):
    """Each is asked in a process of its own: whatever it does there, the doctor goes on."""
    source, version, line = ENGINES[case]
    monkeypatch.setattr(doctor.engines, "ENGINES", ("vllm",))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = doctor.Diagnosis({}, [], "", tuned={"for_this_gpu": 0, "all": 0, "folder": None})
    found.engines = doctor.engines.installed()
    engine = found.engines["vllm"]
    assert not engine.takes and engine.leaves
    assert re.search(f"^vllm +{version}", str(found), re.MULTILINE) and line in str(found)
    assert json.loads(found.to_json())["engines"]["vllm"]["leaves"] == engine.leaves


def test_an_old_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert "torch must be at least 2.10, got 2.9.1+cpu" in doctor.diagnose().problems
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert not doctor.diagnose().problems


def without(monkeypatch, *packages):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p in packages else version(p))


def test_missing_packages_are_named(monkeypatch):
    without(monkeypatch, "matplotlib", "safetensors")
    found = doctor.diagnose()
    assert "safetensors none (pip install 'torch-moe-ops[safetensors]')" in str(found)
    assert found.extras["bench"]["matplotlib"] is None and not found.problems


def test_a_gpu_without_triton_is_a_problem(monkeypatch):
    without(monkeypatch, "triton")
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_gpu", lambda n: {"name": "G", "arch": "sm_90", "memory_gb": 80})
    found = doctor.diagnose()
    assert found.problems[0] == "the GPU needs Triton: pip install triton"
    assert "G, sm_90, 80 GB" in str(found) and "kernels of qwen3-30b" in str(found)


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
def test_kernels_that_serve(device):
    found = doctor.kernels_of(find_problem("qwen3-30b"), device)
    assert list(found) == list(SCHEMES)
    assert all(isinstance(k, str) or len(k) == len(doctor.LOADS) for k in found.values())
    fp8 = found["fp8_block128"]
    assert "does not run on sm_80" in fp8 if device == "sm_80" else isinstance(fp8, list)
    assert ("hopper_fetch + hopper_packed" in found["unquantized"]) is (device == "sm_90")
    assert ("block_scaled" in found["mxfp8"]) is (device == "sm_100")


def test_options():
    assert exit_code(["doctor", "--gpu"]) == 2
