"""The plug-in of vLLM on stand-ins of vLLM's classes; `make test-vllm` serves with vLLM itself."""

import itertools
import logging
import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
import vllm_stand_ins as vllm
from vllm_layers import AG, BATCH, FP8, INT8, KEYS, exchange, key, layer

from moe_ops.integrations import _engines, engines
from moe_ops.integrations.vllm import register
from moe_ops.scheme import get_scheme
from moe_ops.version import __version__

PLUGIN = "moe_ops.integrations.vllm"
STANDARD = vllm.FusedMoEActivationFormat.Standard
BATCHED = vllm.FusedMoEActivationFormat.BatchedExperts

OTHER_KEYS = {
    "rows without weights": (None, key(FP8, (1, -1), static=False)),
    "int4": (key(torch.int32, (1, 32), scale=torch.float16), None),
    "fp8 weights alone": (key(FP8, (-1, 1)), None),
    "mxfp8": (key(FP8, (1, 32), scale=torch.uint8), key(FP8, (1, 32), False, torch.uint8)),
    "e8m0 blocks": (key(FP8, (128, 128), scale=torch.float8_e8m0fnu), KEYS["fp8_block128"][1]),
    "mxfp4": (key(torch.uint8, (1, 32), scale=torch.uint8), None),
    "mxfp4 rows": (
        key(torch.uint8, (1, 32), scale=torch.uint8),
        key(torch.uint8, (1, 32), False, torch.uint8),
    ),
    "zero points": (KEYS["int8_channel"][0]._replace(symmetric=False), KEYS["int8_channel"][1]),
    "two scales": (KEYS["int8_channel"][0]._replace(scale2=0), KEYS["int8_channel"][1]),
    "int8 tensor": (key(INT8, (-1, -1)), key(INT8, (-1, -1), static=False)),
    "mixed": (KEYS["fp8_channel"][0], KEYS["int8_channel"][1]),
    "static rows": (KEYS["fp8_channel"][0], key(FP8, (1, -1))),
    "odd blocks": (key(FP8, (96, 96)), KEYS["fp8_block128"][1]),
    "static blocks": (KEYS["fp8_block128"][0], key(FP8, (1, 128))),
    "dynamic weights": (key(FP8, (-1, 1), static=False), KEYS["fp8_channel"][1]),
}


def test_names_of_blocks():
    """The log has the names that the documentation has."""
    assert _engines.block_name("fp8", (128, 128)) == "fp8_block128"
    assert _engines.block_name("int8", (64, 128)) == "int8_block64x128"


@pytest.fixture
def engine(monkeypatch):
    """The plug-in on stand-ins, its log empty."""
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_VLLM", raising=False)
    return vllm.install(monkeypatch)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="vllm.moe_ops")
    return caplog


def classes(engine, name, backend):
    module = engine.oracles[name]
    return module.backend_to_kernel_cls(getattr(module, vllm.BACKENDS[name][0])[backend])


def test_without_vllm_nothing_happens(log, monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert len(log.records) == 1 and "vllm" in log.text


def failures():
    """What importing an engine may raise; a panic of compiled Rust is no `Exception`."""
    panic = type("PanicException", (BaseException,), {})
    kinds = (
        ImportError, ModuleNotFoundError, AttributeError, TypeError, ValueError, KeyError,
        IndexError, NameError, UnboundLocalError, OSError, RuntimeError, NotImplementedError,
        RecursionError, AssertionError, MemoryError, SyntaxError, SystemExit, GeneratorExit, panic,
    )  # fmt: skip
    return [kind("no\nsuch thing") for kind in kinds]


def test_what_fails_is_one_line(engine, log, monkeypatch):
    """Whatever is raised, and wherever: vLLM goes on with its own experts, and its log says why."""

    class Broken(ModuleType):
        def __getattr__(self, name):
            raise failure

    places = {"vllm.platforms": Broken("vllm.platforms"), f"{PLUGIN}._oracles": Broken("ours")}
    for failure, (name, module) in itertools.product(failures(), places.items()):
        _engines.say_once.cache_clear()
        log.clear()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            register()
        (record,) = log.records
        assert "vLLM's own experts run: " in record.message, (name, failure)
        assert "\n" not in record.message
        assert classes(engine, "fp8", "TRITON") == [vllm.Theirs]
    failure = KeyboardInterrupt()
    monkeypatch.setitem(sys.modules, "vllm.platforms", places["vllm.platforms"])
    with pytest.raises(KeyboardInterrupt):
        register()


def test_our_classes_go_first_once(engine, log):
    register()
    register()
    ours = [engine.experts.MoeOpsExperts, engine.experts.BatchedMoeOpsExperts]
    first = {
        (name, backend)
        for name, (_, backends) in vllm.BACKENDS.items()
        for backend in backends
        if classes(engine, name, backend) == [*ours, vllm.Theirs]
    }
    assert first == {
        ("unquantized", "TRITON"), ("unquantized", "BATCHED_TRITON"), ("unquantized", "CPU"),
        ("fp8", "TRITON"), ("fp8", "BATCHED_TRITON"), ("int8", "TRITON"),
    }  # fmt: skip
    for name, backend in (("fp8", "CPU"), ("int8", "CPU"), ("mxfp4", "TRITON")):
        assert classes(engine, name, backend) == [vllm.Theirs]
    assert not log.records


def test_compiled_graphs_are_kept_apart(engine, monkeypatch):
    """vLLM's cache of compiled graphs has its variables in the key: one says that we are here."""
    monkeypatch.setenv("MOE_OPS_VLLM", "0")
    register()
    assert not engine.envs.environment_variables
    monkeypatch.delenv("MOE_OPS_VLLM")
    register()
    (getter,) = engine.envs.environment_variables.values()
    assert getter() == __version__


def test_switched_off(engine, monkeypatch, log):
    monkeypatch.setenv("MOE_OPS_VLLM", "0")
    register()
    assert classes(engine, "fp8", "TRITON") == [vllm.Theirs] and not log.records


def test_what_would_be_taken(engine, monkeypatch):
    """The doctor's answer: every kind of layer, or why not."""
    kinds = ["not quantized, fp8, int8 per row", *engine.interface.FORMATS]
    answer = engines.ask("vllm")
    assert (answer.version, answer.takes, answer.leaves) == ("0.33.0", kinds, {})
    monkeypatch.setattr(engine.oracles["w4a8"], "select_w4a8_moe_backend", lambda layer: None)
    answer = engines.ask("vllm")
    assert len(answer.takes) == 7 and "select_w4a8" in str(answer)
    monkeypatch.setenv("MOE_OPS_VLLM", "0")
    answer = engines.ask("vllm")
    assert not answer.takes and set(answer.leaves.values()) == {"MOE_OPS_VLLM is 0"}


def interface():
    from moe_ops.integrations.vllm._interface import NAMES, PARAMETERS

    return sorted(
        (module, name)
        for table in (NAMES, PARAMETERS)
        for module in table
        for name in table[module]
    )


@pytest.mark.parametrize(("module", "name"), interface())
def test_another_interface(engine, log, monkeypatch, module, name):
    """Whatever is missing: one line that names it, and nothing is changed."""
    owner = engine.modules[module]
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if last == "TRITON":  # a member of an enumeration
        others = [member.name for member in owner if member.name != last]
        monkeypatch.setattr(engine.modules[module], outer[0], Enum("Other", others))
    elif outer and isinstance(owner, type):
        monkeypatch.setattr(owner, last, lambda self, other: None)
    elif outer:
        monkeypatch.setattr(type(owner), last, property())
    else:
        monkeypatch.delattr(owner, last)
    register()
    (record,) = log.records
    assert f"{module}.{name}" in record.message and "0.33.0" in record.message
    for oracle in engine.oracles.values():
        assert not hasattr(getattr(oracle, "backend_to_kernel_cls", None), "__wrapped__")


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_schemes(engine, name):
    assert engine.schemes.scheme_of_keys(*KEYS[name]).key == get_scheme(name).key


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_other_keys(engine, name):
    assert engine.schemes.scheme_of_keys(*OTHER_KEYS[name]) is None
    ours = engine.experts.MoeOpsExperts
    assert not ours.is_supported_config(ours, layer(), *OTHER_KEYS[name], STANDARD)[0]


@pytest.mark.parametrize(
    ("change", "scheme", "reason"),
    [
        ({}, "fp8_channel", None),
        ({"moe_parallel_config": AG}, "fp8_block32", None),
        ({"moe_parallel_config": AG}, "fp8_tensor", "one scale for rows of several ranks"),
        ({"moe_parallel_config": exchange()}, "unquantized", "parallel config"),
        ({"moe_parallel_config": BATCH}, "unquantized", "parallel config"),
        ({"is_lora_enabled": True}, "unquantized", "LoRA"),
        ({"width": 80}, "fp8_block32", "intermediate_size must be a multiple of 32"),
        ({"in_dtype": torch.float64}, "unquantized", "in_dtype"),
        ({"activation": vllm.MoEActivation.SITU}, "unquantized", "needs beta"),
        ({"activation": vllm.MoEActivation.RELU2_NO_MUL}, "unquantized", None),
        ({"num_experts": 4, "local": 5}, "unquantized", None),
    ],
)
def test_support(engine, log, change, scheme, reason):
    """A refusal is one line of the log, however often vLLM asks; an acceptance is none."""
    ours, config = engine.experts.MoeOpsExperts, layer(**change)
    for _ in range(2):
        supported, said = ours.is_supported_config(ours, config, *KEYS[scheme], STANDARD)
        assert supported == (reason is None) and (reason is None or reason in said)
    assert [reason in record.message for record in log.records] == [True] * (reason is not None)


def test_a_hook_on_the_rows_of_gemm_2_is_declined(engine):
    """vLLM 0.33 sets it on the experts that it has made; ours would not call it."""
    made = engine.experts.MoeOpsExperts(layer(), vllm.FusedMoEQuantConfig())
    assert made.post_gemm2_hook is None
    made.post_gemm2_hook = None
    with pytest.raises(NotImplementedError, match="post_gemm2_hook must be None.*MOE_OPS_VLLM=0"):
        made.post_gemm2_hook = lambda rows, output: None


def test_formats(engine, log):
    standard, batched = engine.experts.MoeOpsExperts, engine.experts.BatchedMoeOpsExperts
    for ours, theirs in ((standard, BATCHED), (batched, STANDARD)):
        assert not ours.is_supported_config(ours, layer(), None, None, theirs)[0]
    assert not log.records
    config = layer(moe_parallel_config=BATCH)
    assert batched.is_supported_config(batched, config, *KEYS["fp8_channel"], BATCHED)[0]


def test_batch_invariant_mode(engine):
    engine.envs.VLLM_BATCH_INVARIANT = True
    ours = engine.experts.MoeOpsExperts
    assert ours.is_supported_config(ours, layer(), *KEYS["fp8_channel"], STANDARD)[0]
    supported, reason = ours.is_supported_config(ours, layer(), *KEYS["fp8_tensor"], STANDARD)
    assert not supported and "batch invariance" in reason
    made = ours(layer(), vllm.FusedMoEQuantConfig())
    assert made.experts.moe_config.batch_invariant


@pytest.mark.parametrize(
    ("activation", "model", "quant", "key"),
    [
        ("SILU", {}, {}, "silu"),
        ("SILU", {"swiglu_limit": 7.0, "swiglu_alpha": 2.0}, {}, "silu(clamp_limit=7.0)"),
        ("SILU", {"swiglu_limit": 7.0}, {"gemm1_clamp_limit": 5.0}, "silu(clamp_limit=5.0)"),
        ("SWIGLUOAI", {}, {}, "swigluoai"),
        ("SWIGLUOAI", {}, {"gemm1_alpha": 1.5}, "swigluoai(alpha=1.5)"),
        ("GELU", {"swiglu_limit": 7.0}, {}, "gelu"),
        ("SITU", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": -1.0}, {},
         "situ(beta=4.0)"),
    ],
)  # fmt: skip
def test_numbers_of_activations(engine, activation, model, quant, key):
    config = layer(activation=vllm.MoEActivation[activation], **model)
    made = engine.experts.MoeOpsExperts(config, vllm.FusedMoEQuantConfig(**quant))
    assert made.library_activation.key == key
