"""Explanations: what `select_kernel` chooses, and numbers that are those of the kernels."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from launches import blocks
from selections import FP8, STANDARD, layer_inputs, reason
from strategies import ACTIVATIONS
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from moe_ops.activation import kind_and_key
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import assumed, device_facts
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, TOKEN
from moe_ops.inspect.costs import math_of
from moe_ops.inspect.devices import TARGETS
from moe_ops.pipeline.selection import CANDIDATES, wanted_format
from moe_ops.support import ARCHITECTURES, SUPPORT

QWEN = FusedMoEConfig(128, 8, 2048, 768, 128, "silu", "cuda", RoutingMethodType.Renormalize)


def test_explanation_of_the_choice(monkeypatch):
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))
    found = moe_ops.explain(QWEN, FP8, device="sm_90", num_tokens=(1, 64, 4096))
    assert (found.choice, found.prepare_finalize) == ("TritonExperts", "MoEPrepareAndFinalizeNoEP")
    assert [(row.supported, row.reason is None) for row in found.rows[:3]] == [
        (True, True),
        (True, True),
        (True, False),
    ]
    assert all(row.reason.endswith("standard activation format") for row in found.rows[3:])
    text = str(found)
    assert "fp8_block128 on sm_90 (NVIDIA H200), standard format: TritonExperts" in text
    assert "analytic default" in text and "4.67 TB/s" in text
    assert (
        "hopper_token 1x64 /6" in text
        and "hopper_stream 16x128 /5" in text
        and "hopper_packed 128x256 /4" in text
    )
    assert "tiles of Hopper's own kernels: rows x weight rows / stages" in text
    passed = [both for cost in found.costs for gemm in cost.passed_over for both in gemm]
    assert passed and all(kernel in text and f": {why}: GEMM" in text for kernel, why in passed)
    assert "not hopper_token: the routing must be of one token, got 64: GEMM 1 of 64" in text
    assert [json.loads(found.to_json())["costs"][i]["gemm2"]["kernel"] for i in range(3)] == [
        TOKEN,
        STREAM,
        PACKED,
    ]
    with pytest.raises(FrozenInstanceError):
        found.choice = "GroupedGemmExperts"


def test_capabilities():
    """8-bit floats want sm_89 where kernels make them; stored ones become other numbers."""
    for name, scheme in moe_ops.SCHEMES.items():
        for device, target in TARGETS.items():
            found = moe_ops.explain(QWEN, scheme, device=device)
            made = name in (
                "fp8_tensor", "fp8_tensor_static", "fp8_channel", "mxfp8", "mxfp4_mxfp8",
                "mxfp4_w4a8", "mxfp4_w4a8_token", "nvfp4", "int4_w4a8_g128",
            ) or name.startswith("fp8_block")  # fmt: skip
            lacks = made and target.facts is not None and target.facts.arch < 89
            assert (found.choice is None) == lacks, (name, device)
            if lacks:
                text = f"kernel does not support current device {device}"
                assert {row.reason for row in found.rows} == {text}
                assert found.costs == () and found.prepare_finalize is None
                assert f"{name} does not run on {device}, 8-bit floats need sm_89" in str(found)


def test_the_support_table_says_the_same():
    for row in SUPPORT:
        config = replace(QWEN, max_num_tokens=64 if row.format == "batched" else None)
        served = tuple(
            arch
            for arch in ARCHITECTURES
            if moe_ops.explain(config, row.scheme, device=f"sm_{arch}").choice
        )
        assert served == row.architectures, row
    assert {row.scheme for row in SUPPORT} == set(moe_ops.SCHEMES)


@pytest.mark.parametrize(
    "scheme, tokens, nbytes, flops, floor",
    [
        # 8 of 128 experts of 3 * 2048 * 768 bf16 weights; a row in and out.
        ("unquantized", 1, 75497472, 75497472, 16.168236),
        # One byte each, with 12 x 16 + 16 x 6 float32 scales; the same row.
        ("fp8_block128", 1, 37757952, 75497472, 8.086969),
        # Everything active; 4096 * 8 rows of 3 * 2048 * 768 products at 758 TFLOP/s.
        ("unquantized", 4096, 1207959552, 309237645312, 407.965231),
    ],
)
def test_costs(scheme, tokens, nbytes, flops, floor):
    (cost,) = moe_ops.explain(QWEN, scheme, device="sm_90", num_tokens=(tokens,)).costs
    assert cost.weight_bytes == nbytes and cost.flops == flops
    assert cost.activation_bytes == 2 * tokens * 2048 * 2
    activated = 768 * (2 if scheme == "unquantized" else 1)
    assert cost.intermediate_bytes == 2 * 8 * tokens * (activated + 2048 * 2)
    assert cost.floor_us == pytest.approx(floor, rel=1e-6)


def test_lower_bounds_count_the_fastest_products():
    """fp8 rows under int4 weights are multiplied in fp8 by one kernel, under MXFP4 by none."""
    kinds = {"int4_w4a8_g128": "fp8", "mxfp4_w4a8_token": "bf16", "int4_w4a16_g128": "bf16"}
    assert {name: math_of(moe_ops.get_scheme(name)) for name in kinds} == kinds


def test_biases_are_read_too():
    """One number of bf16 for each weight row of the 8 experts that one token has."""
    plain, biased = (
        moe_ops.explain(c, "unquantized", device="sm_90", num_tokens=(1,)).costs[0]
        for c in (QWEN, replace(QWEN, has_bias=True))
    )
    assert biased.weight_bytes - plain.weight_bytes == 8 * (2 * 768 + 2048) * 2
    assert biased.flops == plain.flops


def test_costs_of_one_rank():
    """Half of the experts: half of the weights and products, as many tokens in and out."""
    split = FusedMoEParallelConfig(ep_size=2, use_ep=True)
    rank = replace(QWEN, num_local_experts=64, moe_parallel_config=split)
    whole, half = (
        moe_ops.explain(c, "int8_channel", device="sm_90").costs[1] for c in (QWEN, rank)
    )
    for name in ("active_experts", "weight_bytes", "flops", "intermediate_bytes"):
        assert 2 * getattr(half, name) == pytest.approx(getattr(whole, name), abs=2)
    assert half.activation_bytes == whole.activation_bytes


def test_floors_only_where_something_was_measured():
    for name, target in TARGETS.items():
        found = moe_ops.explain(QWEN, "int4_w4a16_g128", device=name)
        assert all((cost.floor_us is None) == (name != "sm_90") for cost in found.costs)
        assert ("estimate: none" in str(found)) == (name != "sm_90")
        assert all((cost.gemm1 is None) == (target.facts is None) for cost in found.costs)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"device must be one of \['cpu', .*got 'sm_10'"):
        moe_ops.explain(QWEN, FP8, device="sm_10")
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        moe_ops.explain(QWEN, FP8, num_tokens=(1, 0))
    with pytest.raises(ValueError, match="scheme must be one of"):
        moe_ops.explain(QWEN, "fp7")


@given(
    scheme=st.sampled_from(sorted(moe_ops.SCHEMES)),
    device=st.sampled_from([None, *TARGETS]),
    rows=st.sampled_from([None, 1, 100]),
    activation=st.sampled_from(ACTIVATIONS),
    tokens=st.lists(st.integers(1, 10**6), max_size=3),
)
def test_any_explanation_prints_and_is_json(scheme, device, rows, activation, tokens):
    kind, key = kind_and_key(activation)
    gated = kind.is_gated
    config = replace(STANDARD, activation=activation, is_act_and_mul=gated, max_num_tokens=rows)
    found = moe_ops.explain(config, scheme, device=device, num_tokens=tokens)
    record = json.loads(found.to_json())
    assert record["choice"] == found.choice and record["scheme"] == scheme
    assert record["config"]["activation"] == key
    assert [row["implementation"] for row in record["implementations"]] == [
        cls.__name__ for cls in CANDIDATES
    ]
    assert [cost["num_tokens"] for cost in record["costs"]] == (tokens if found.choice else [])
    lines = str(found).splitlines()
    assert all(any(line.split()[:1] == [str(n)] for line in lines) for n in tokens if found.choice)


@pytest.mark.kernel
@pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="no kernel runs")
@pytest.mark.parametrize(
    "scheme, activation",
    [
        ("unquantized", "silu"),
        ("fp8_block128", "silu"),
        ("fp8_block64x32", "swigluoai"),
        ("int8_channel", "silu"),
        ("mxfp4_w4a16", "silu"),
    ],
)
@pytest.mark.parametrize(
    "tokens, experts, rows", [(6, 8, None), (40, 2, None), (6, 8, 8), (20, 2, 20)]
)
def test_explained_tiles_are_those_that_run(
    scheme, activation, tokens, experts, rows, device, monkeypatch
):
    """The constants of the launches, for every class that multiplies with the library's kernels."""
    from moe_ops.kernels._hopper.gemm import HopperGemm
    from moe_ops.kernels._runtime.launch import Launch

    launch, seen = Launch.__call__, []

    def record(self, *arguments):
        if "GROUP_M" in self.constants:
            seen.append(self.constants)
        else:  # plans and routings decide what is launched, products do not
            launch(self, *arguments)

    def record_hoppers(self, *arguments):
        c = self.constants
        kernel = FETCH if c.FETCHES else PACKED if self.alone else STREAM
        seen.append({"kernel": kernel, "num_stages": c.STAGES, "ctas": 1, **vars(c)})

    monkeypatch.setattr(Launch, "__call__", record)
    monkeypatch.setattr(HopperGemm, "__call__", record_hoppers)
    facts = device_facts(torch.device(device))
    if not HAS_CUDA:  # there is no interpreter for Gluon
        facts = TARGETS["sm_90"].facts._replace(portable_only=True)
        monkeypatch.setitem(TARGETS, "sm_90", TARGETS["sm_90"]._replace(facts=facts))
    config = replace(
        STANDARD, device=device, num_experts=experts, num_local_experts=experts,
        max_num_tokens=rows, activation=activation,
    )  # fmt: skip
    arguments, quant = layer_inputs(config, scheme, device, tokens)
    target = None if HAS_CUDA else "sm_90"
    for cls in CANDIDATES:
        serves = reason(cls, config, quant.scheme, wanted_format(config)) is None
        if cls.ACTIVATES_IN_GEMM1 is None or cls.is_monolithic() or not serves:
            continue
        seen.clear()
        with assumed(facts):
            moe_ops.select_kernel(config, quant, experts=cls).apply(*arguments, activation)
        (cost,) = moe_ops.explain(
            config, quant, device=target, num_tokens=(tokens,), candidates=(cls,)
        ).costs
        assert [blocks(tiles) for tiles in (cost.gemm1, cost.gemm2)] == [
            {name: constants[name] for name in blocks(tiles)}
            for tiles, constants in zip((cost.gemm1, cost.gemm2), seen, strict=True)
        ]


def test_experts_in_host_memory():
    """Bytes on both sides, the link's time by hits, and where streaming begins."""
    found = moe_ops.explain(QWEN, FP8, device="sm_90", num_tokens=(1, 64, 128), resident=0.25)
    one = found.costs[0].weight_bytes // 8
    host = found.host
    assert (host.resident, host.num_experts, host.host_gbps) == (32, 128, 50.0)
    assert host.device_bytes == pytest.approx(32 * one, rel=1e-6)
    assert host.host_bytes == pytest.approx(128 * one, rel=1e-6)
    first, many, streams = host.times
    assert first.us_per_token[0] == pytest.approx(8 * one / 50e3 / 2, rel=1e-6)
    assert many.us_per_token[-1] == pytest.approx(
        found.costs[1].weight_bytes / 50e3 / 64 / 100, rel=1e-6
    )
    assert (first.waves, many.waves, streams.waves, host.streams_from) == (1, 4, 8, 5)
    assert first.no_hits_us_per_token == pytest.approx(8 * one / 50e3, rel=1e-6)
    assert first.most_hits == 1 and many.most_hits == pytest.approx(32 / many.wanted_experts)
    text = str(host).splitlines()
    assert text[1].split()[-1] == f"{first.us_per_token[-1]:.4g}"
    assert text[2].split()[3] == f"{many.no_hits_us_per_token:.4g}"
    assert text[2].split()[4:] == ["-"] * 5  # 32 slots are 25 % of what 64 tokens want
    assert "expect 25% hits if all experts are equally likely" in str(host)
    assert f"all experts once at most ({128 * one / 50e6:.4g} ms)" in str(host)
    everything = moe_ops.explain(QWEN, FP8, device="sm_90", resident=1.0).host
    assert (everything.streams_from, everything.host_bytes, everything.times) == (None, 0, ())
    assert str(everything).startswith("resident: all 128 experts of the layer, ")
    layer = moe_ops.FusedMoE(8, 2, 32, 32)
    assert moe_ops.explain(layer).host is None
    moe_ops.offload_(layer, resident=4, progress=False)
    assert moe_ops.explain(layer).host == moe_ops.explain(layer, resident=4).host
    assert moe_ops.explain(layer, resident=6).host.resident == 6
    with pytest.raises(ValueError, match="resident must be an int from top_k = 8 to 128"):
        moe_ops.explain(QWEN, FP8, device="sm_90", resident=4)
    with pytest.raises(ValueError, match="host_gbps must be positive"):
        moe_ops.explain(QWEN, FP8, device="sm_90", resident=32, host_gbps=0)


def test_shared_experts_are_experts_of_every_token():
    layer = moe_ops.FusedMoE(8, 2, 64, 32, n_shared_experts=2)
    found = moe_ops.explain(layer, num_tokens=(1, 2, 64), device="h100")
    assert "10 experts, 4 a token (2 of them shared), hidden 64" in str(found)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(64, 64), torch.randn(64, 8))
    assert found.costs[2].flops == counter.get_total_flops()
    active = [cost.active_experts for cost in found.costs]
    assert active == pytest.approx([4, 2 + 8 * (1 - 0.75**2), 10])
    same = moe_ops.explain(replace(layer.moe_config, experts_per_token=4), layer.scheme,
                           num_tokens=(64,), device="h100").costs[0]  # fmt: skip
    assert found.costs[2].workspace_bytes == same.workspace_bytes
    with pytest.raises(ValueError, match="top_k = 4 to 10"):
        moe_ops.explain(layer, resident=2)


def test_calls_in_parts():
    """Every part reads its experts; tiles and workspace are those of one part."""
    plain, chunked = (moe_ops.FusedMoE(8, 2, 64, 32, chunk_size=size) for size in (None, 4))
    batched = replace(plain.moe_config, max_num_tokens=4)
    for config in (chunked, (batched, plain.scheme)):
        config = config if isinstance(config, tuple) else (config,)
        one, many, rest = moe_ops.explain(*config, num_tokens=(4, 64, 6), device="h100").costs
        (few,) = moe_ops.explain(*config, num_tokens=(2,), device="h100").costs
        assert (one.parts, many.parts, rest.parts) == (1, 16, 2)
        for name in ("weight_bytes", "activation_bytes", "flops", "floor_us"):
            assert getattr(many, name) == pytest.approx(16 * getattr(one, name))
            assert getattr(rest, name) == pytest.approx(getattr(one, name) + getattr(few, name))
        for name in ("gemm1", "gemm2", "workspace_bytes", "active_experts"):
            assert getattr(many, name) == getattr(rest, name) == getattr(one, name)
    assert "64 tokens: in 16 parts" in str(moe_ops.explain(chunked, device="h100"))
    assert "parts" not in str(moe_ops.explain(plain, device="h100"))


def test_a_kernel_that_was_set():
    """It is what runs: its experts, its format and its parts are explained, and not a choice."""
    layer = moe_ops.FusedMoE(8, 2, 64, 32, chunk_size=48)
    quant, parts = moe_ops.FusedMoEQuantConfig("unquantized"), moe_ops.pipeline
    own = parts.GroupedGemmExperts(layer.moe_config, quant)
    layer.kernel = moe_ops.FusedMoEKernel(parts.MoEPrepareAndFinalizeNoEP(), own, chunk_size=40)
    found = moe_ops.explain(layer, num_tokens=(40, 100), device="h100")
    assert [row.implementation for row in found.rows] == [found.choice] == ["GroupedGemmExperts"]
    assert [cost.parts for cost in found.costs] == [1, 3]
    assert "standard format: GroupedGemmExperts behind MoEPrepareAndFinalizeNoEP" in str(found)
    with pytest.raises(
        ValueError, match=r"candidates must be left out.*got \['GroupedGemmExperts'\]"
    ):
        moe_ops.explain(layer, candidates=[parts.GroupedGemmExperts])

    batched = parts.BatchedTritonExperts(layer.moe_config, quant, 30, 1)
    layer.kernel = moe_ops.FusedMoEKernel(parts.BatchedPrepareAndFinalize(30, 8, 1, 0), batched)
    found = moe_ops.explain(layer, num_tokens=(30, 31))
    assert found.activation_format == "batched_experts" and found.rows[0].supported
    assert [cost.parts for cost in found.costs] == [1, 2]
