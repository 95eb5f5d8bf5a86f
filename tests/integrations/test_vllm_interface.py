"""The plug-in and its stand-ins against vLLM's recorded signatures of the two newest versions.

`vllm_signatures.py` makes the record from vLLM's Python sources; here nothing of vLLM is needed.
"""

import dataclasses
import inspect

import pytest
import vllm_stand_ins as vllm
from vllm_signatures import LAYERS, record

from moe_ops.integrations.vllm import VERSIONS
from moe_ops.integrations.vllm import _interface as interface

RECORDED = record()


def plain(parameters):
    return [x.rstrip("=") for x in parameters]


def test_the_two_newest_minor_versions_are_recorded():
    assert [name.rpartition(".")[0] for name in RECORDED] == VERSIONS.split(", ")


@pytest.mark.parametrize("version", RECORDED)
def test_vllm_has_what_the_plug_in_uses(version):
    """Every name; every parameter that is read or passed; of overridden methods all parameters."""
    has, wrong = RECORDED[version], []
    for module, names in interface.NAMES.items():
        for name in names:
            owner, _, last = f"{module}.{name}".rpartition(".")
            if f"{module}.{name}" not in has and last not in has.get(owner, ()):
                wrong.append(f"{module}.{name}")
    for module, functions in interface.PARAMETERS.items():
        for name, parameters in functions.items():
            if plain(has.get(f"{module}.{name}", ())) != list(parameters):
                wrong.append(f"{module}.{name}")
    for functions in (*interface.FORMATS.values(), interface.MAKERS):
        for name, parameters in functions.items():
            lacks = set(parameters) - set(plain(has.get(name, ())))
            wrong += [f"{name}: {x}" for x in lacks]
    assert not wrong


@pytest.mark.parametrize("version", RECORDED)
def test_arguments_that_are_passed_are_enough(version):
    """Functions that the plug-in calls need no parameter that it does not pass."""
    for name, parameters in interface.MAKERS.items():
        needed = {x for x in RECORDED[version][name] if not x.endswith("=")} - {"self"}
        assert needed <= set(parameters), name


@pytest.mark.parametrize("version", RECORDED)
def test_replaced_backends_are_vllms(version):
    """Each name of a backend that the plug-in goes before is one of vLLM's."""
    theirs = {
        x for name, some in RECORDED[version].items() if "moebackend" in name.lower() for x in some
    }
    with pytest.MonkeyPatch.context() as patch:
        assert theirs >= vllm.install(patch).choice.REPLACED


@pytest.mark.parametrize("version", RECORDED)
def test_stand_ins_are_vllms(version):
    """Fields of configurations, backends, and parameters of methods."""
    has, wrong = RECORDED[version], []
    for module, values in vllm.FIELDS.items():
        for value in values:
            names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
            wrong += [
                f"{value.__name__}.{x}" for x in set(names) - set(has[f"{module}.{value.__name__}"])
            ]
    for name, (enum, members) in vllm.BACKENDS.items():
        oracle = "fp8" if name == "mxfp8" else name
        wrong += set(members) - set(has[f"{LAYERS}.oracle.{oracle}.{enum}"])
    for owner in (vllm.FusedMoEExpertsModular, vllm.FusedMoEKernel):
        for name, function in inspect.getmembers(owner, inspect.isfunction):
            known = has.get(f"{LAYERS}.modular_kernel.{owner.__name__}.{name}")
            if known is not None and list(inspect.signature(function).parameters) != plain(known):
                wrong.append(f"{owner.__name__}.{name}")
    assert not wrong


def test_a_missing_parameter_is_seen(monkeypatch):
    """A function that lacks one parameter counts as missing, and only its format."""
    with pytest.MonkeyPatch.context() as patch:
        engine = vllm.install(patch)
        assert [engine.interface.missing_of(x) for x in interface.FORMATS] == [None] * 7
        name = f"{LAYERS}.oracle.mxfp8.select_mxfp8_moe_backend"
        engine.oracles["mxfp8"].select_mxfp8_moe_backend = lambda layer: None
        seen = {x: engine.interface.missing_of(x) for x in interface.FORMATS}
        assert {x for x, missing in seen.items() if missing} == {"MXFP8"} and seen["MXFP8"] == name
