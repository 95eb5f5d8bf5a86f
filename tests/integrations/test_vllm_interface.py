"""The plug-in and its stand-ins against vLLM's recorded signatures of the two newest versions.

`vllm_signatures.py` makes the record from vLLM's Python sources; here nothing of vLLM is needed.
"""

import dataclasses
import inspect

import pytest
import torch
import vllm_stand_ins as vllm
from vllm_signatures import LAYERS, record

from moe_ops.integrations.vllm import VERSIONS
from moe_ops.integrations.vllm import _interface as interface

RECORDED = record()
OF_PARALLEL = {"pcp_rank", "pcp_size", "sp_size", "is_sequence_parallel",
               "needs_round_robin_routing_tables", "defer_moe_finalize",
               "limit_deferred_moe_finalize"}  # fmt: skip
"""Methods of a layer's configuration, and what it has from that of its ranks."""


def plain(parameters):
    return [x.rstrip("=") for x in parameters]


def test_the_two_newest_minor_versions_are_recorded():
    assert [name.rpartition(".")[0] for name in RECORDED] == VERSIONS.split(", ")


@pytest.mark.parametrize("version", RECORDED)
def test_vllm_has_what_the_plug_in_uses(version):
    """Every name; every parameter that is read or passed; of overridden methods all parameters.

    A wrapped function of a new version may have no parameter that nobody has looked at.
    """
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
    for name, parameters in (x for own in interface.FORMATS.values() for x in own.items()):
        unknown = {*plain(has.get(name, ()))} - {*parameters} - interface.UNREAD
        wrong += [f"{name}: {x}" for x in unknown]
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


@pytest.mark.parametrize("version", RECORDED)
def test_settings_are_vllms(version):
    """Each known field of a layer is vLLM's; a new version's fields must be sorted anew."""
    members = set(RECORDED[version][f"{LAYERS}.config.FusedMoEConfig"])
    assert not interface.SETTINGS & interface.AROUND
    known = interface.SETTINGS | interface.AROUND
    assert known - members <= {"require_decomposed_backend"}  # in 0.33 alone
    properties = {"is_act_and_mul", "w13_num_shards", "should_defer_moe_finalize"}
    others = {x for x in members - known if not x.startswith(("use_", "__", "dp_", "ep_", "tp_"))}
    assert others <= properties | OF_PARALLEL


def test_a_setting_that_is_not_known():
    """A field of another version counts once it is set."""

    @dataclasses.dataclass
    class Newer(vllm.FusedMoEConfig):
        top_k_of_rows: int = 0
        more: list = dataclasses.field(default_factory=list)
        bias: object = None

    sizes = (4, 2, 64, 64, 4, vllm.MoEActivation.SILU)
    assert interface.unknown_setting(Newer(*sizes, has_bias=True)) is None
    assert interface.unknown_setting(Newer(*sizes, top_k_of_rows=1)) == "top_k_of_rows"
    assert interface.unknown_setting(Newer(*sizes, more=[1])) == "more"
    assert interface.unknown_setting(Newer(*sizes, bias=torch.zeros(4))) == "bias"
    with pytest.MonkeyPatch.context() as patch:
        engine = vllm.install(patch)
        ours, form = engine.experts.MoeOpsExperts, vllm.FusedMoEActivationFormat.Standard
        newer = Newer(*sizes, top_k_of_rows=1)
        supported, reason = ours.is_supported_config(ours, newer, None, None, form)
        assert not supported and "a layer with top_k_of_rows, which this plug-in" in reason


def test_a_missing_parameter_is_seen(monkeypatch):
    """A function that lacks one parameter counts as missing, and only its format."""
    with pytest.MonkeyPatch.context() as patch:
        engine = vllm.install(patch)
        assert [engine.interface.missing_of(x) for x in interface.FORMATS] == [None] * 7
        name = f"{LAYERS}.oracle.mxfp8.select_mxfp8_moe_backend"
        engine.oracles["mxfp8"].select_mxfp8_moe_backend = lambda layer: None
        seen = {x: engine.interface.missing_of(x) for x in interface.FORMATS}
        assert {x for x, missing in seen.items() if missing} == {"MXFP8"} and seen["MXFP8"] == name


def test_a_parameter_that_is_not_known_is_seen():
    """vLLM 0.29 converts int4 with an order of columns, and returns tensors for it.

    A wrapper would ignore the arguments, and return too few results.
    """
    name = "int_wna16.convert_to_wna16_moe_kernel_format"
    with pytest.MonkeyPatch.context() as patch:
        engine = vllm.install(patch)
        function = engine.oracles["int_wna16"].convert_to_wna16_moe_kernel_format
        form = inspect.signature(function)
        more = inspect.Parameter("w13_g_idx", inspect.Parameter.KEYWORD_ONLY, default=None)
        function.__signature__ = form.replace(parameters=[*form.parameters.values(), more])
        seen = {x: engine.interface.missing_of(x) for x in interface.FORMATS}
        assert {x: at for x, at in seen.items() if at} == {
            "int4 and int8 in groups": f"{LAYERS}.oracle.{name}"
        }
