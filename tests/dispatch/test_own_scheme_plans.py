"""Kernels, costs and tuned tiles of schemes of a caller's own."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from modular import layer_config
from own_schemes import OWN, E, H, I, K, each, name_of
from planning import problem_of_layer
from plans import planned
from products import weight_of
from strategies import schemes
from table_items import every_row

import moe_ops
from moe_ops import SCHEMES, Scheme, get_scheme, ops, quantize_weight
from moe_ops.dispatch import tuned
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.row_tiles import HOPPER, row_tile_rule
from moe_ops.dispatch.tuned_file import SPELLED, file_name, parse_tuned_layer
from moe_ops.inspect.devices import TARGETS
from moe_ops.testing import Problem, make_inputs
from moe_ops.tuning import files
from moe_ops.tuning.search import Subject

QWEN3 = (128, 1536, 2048)
"""The first weight of a layer of Qwen3-30B-A3B."""


def first(weight, scheme, facts, tokens, top_k=K, **how):
    """The first GEMM of a gated layer."""
    rule = row_tile_rule(scheme.key, 2, facts.arch, None, False)
    how |= {"num_tokens": tokens, "top_k": top_k, "activation": "silu"}
    return problem_of_layer(weight, scheme, rule, top_k * tokens, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("scheme", [s for s in OWN.values() if "fp8" not in s.key], ids=name_of)
def test_opcheck(scheme, device):
    """(opcheck cannot compare fp8 with what it was.)"""
    problem = Problem(5, 3, 2, 64, 32, scheme=scheme)
    x, w, _, _, ids, *_ = make_inputs(problem, device)
    q, tiles = quantize_weight(w, scheme), ([*planned(ids, None, 3, scheme.key)], K)
    rows = x, None
    if scheme.activation is not None:
        given_scale = torch.ones(1, device=x.device) if scheme.activation.static else None
        rows = ops.moe_quantize(x, given_scale, None, None, None, 0, scheme.activation.key)
    arguments = (*rows, weight_of(q), None, *tiles, scheme.key, x.dtype, "silu")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.expert_product, arguments, test_utils=tests)


GPUS = [name for name, target in TARGETS.items() if target.facts is not None]


@every_row("device", GPUS)
@each
def test_plans_follow_the_meaning(scheme, device):
    """A kernel that takes the formats; registered schemes' own kernels only by meaning."""
    facts = TARGETS[device].facts
    for tokens in (1, 64, 4096):
        problem = first((E, 256, 256), scheme, facts, tokens)
        assert problem.scheme == scheme.key
        kernel = plan_gemm(problem, facts).kernel
        dequantizes = scheme.activation is None or scheme.dequantizes_both
        assert ("dequantize" in kernel) == dequantizes, kernel


def test_hoppers_kernels_read_floats_as_scales():
    """Scales in another form go to the portable kernel, and so do their plans' row tiles."""
    known, facts = get_scheme("fp8_block128"), TARGETS["sm_90"].facts
    for scale, hopper in (("float32", True), ("pow2", True), ("e8m0", False), ("input", False)):
        scheme = Scheme("fp8_block128", known.activation, replace(known.weight, scale=scale))
        problem = first(QWEN3, scheme, facts, 4096, 8)
        plan = plan_gemm(problem, facts)
        assert plan.kernel.startswith("hopper") == (problem.sizes.rule is HOPPER[1]) == hopper


def test_a_registered_meaning_has_a_registered_plan():
    """Block-scaled instructions, Hopper's kernels and tuned files serve it under any name."""
    for name, device in (
        ("mxfp8", "sm_100"), ("fp8_block128", "sm_90"), ("fp8_channel", "sm_90"),
        ("int8_channel", "sm_90"),
    ):  # fmt: skip
        known, facts = get_scheme(name), TARGETS[device].facts
        mine = Scheme("mine", known.activation, known.weight)
        for tokens in (1, 4096):
            plans = [plan_gemm(first(QWEN3, s, facts, tokens, 8), facts) for s in (mine, known)]
            assert plans[0] == plans[1]


@each
def test_explain_and_workspace(scheme):
    config = layer_config(Problem())
    told = moe_ops.explain(config, scheme, num_tokens=(1, 64), device="sm_90")
    assert told.choice and scheme.name in str(told)
    assert json.loads(told.to_json())["scheme"] == scheme.key
    sizes = (64, H, I, E, K, torch.bfloat16)
    nbytes = [
        moe_ops.workspace_nbytes(*sizes, scheme=s, device="sm_90") for s in (scheme, scheme.key)
    ]
    assert nbytes[0] == nbytes[1] > 0


class Clock:
    """Tiles of 32 columns win."""

    def __call__(self, trial):
        return 100.0 + abs(trial.tiles.block_n - 32)


@each
def test_tuned_under_its_key(scheme, tmp_path, monkeypatch):
    """Written by `tune`, read back, and chosen by `plan_gemm`."""
    facts, sizes = TARGETS["sm_90"].facts, (E, I, H)
    subject = Subject(sizes, K, scheme, facts)
    assert files.tune(subject, [64], tmp_path, Clock()) == [64]
    (layer,) = tuned.read_folder(tmp_path)
    assert layer.scheme == scheme.key and layer.file == subject.file
    assert re.fullmatch(r"[\w=,.+@-]+", layer.file, re.ASCII)
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([layer]))
    weight, fragments = (E, 2 * I, H), subject.in_fragments(1)
    plan = plan_gemm(first(weight, scheme, facts, 64, fragments=fragments), facts)
    assert plan.source == f"tuned ({layer.file})"
    assert fragments or plan.config.block_n == 32  # kernels have one number of weight rows
    if scheme.name in SCHEMES:
        other = first(weight, get_scheme(scheme.name), facts, 64)
        assert "tuned" not in plan_gemm(other, facts).source


@given(schemes())
def test_names_of_files_have_one_key(scheme):
    name = file_name((1, 2, 3), "NVIDIA H200", scheme.key)
    assert parse_tuned_layer(name, '{"top_k": 1}').scheme == scheme.key
    assert not set(scheme.key) & set(SPELLED.values()) and not set(name) & set('<>:"/\\|?* ')
