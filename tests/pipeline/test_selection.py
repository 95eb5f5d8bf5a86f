"""Selection: the order of reasons and of preference, and an explanation that says what happens."""

from dataclasses import replace

import pytest
import torch
from selections import BATCHED, FP8, STANDARD, layer_inputs, reason
from table_items import every_row

import moe_ops
from moe_ops import FusedMoEParallelConfig, RoutingMethodType
from moe_ops.pipeline import FusedMoEActivationFormat as Format
from moe_ops.pipeline import Supports
from moe_ops.pipeline.selection import CANDIDATES


class Picky(moe_ops.pipeline.TritonExperts):
    """Supports next to nothing."""

    SUPPORTS = Supports(
        devices=("cuda",),
        activations=frozenset({moe_ops.MoEActivation.GELU}),
        gateless=False,
        parallel=frozenset(),
        routing_methods=frozenset({RoutingMethodType.Llama4}),
        router_logits_dtypes=frozenset({torch.float16}),
        hidden_multiple=128,
    )


def test_reasons_in_their_order():
    """Everything is wrong at first; each mended rule brings up the next one."""
    parallel = FusedMoEParallelConfig(tp_size=2)
    config = replace(
        STANDARD, activation="silu_no_mul", is_act_and_mul=False, moe_parallel_config=parallel
    )
    scheme, wanted, seen = FP8, Format.BatchedExperts, []

    def mend(**changes):
        nonlocal config
        seen.append(reason(Picky, config, scheme, wanted))
        config = replace(config, **changes)

    mend(device="cuda")
    mend(activation="silu", is_act_and_mul=True)
    mend(activation="gelu")
    mend()
    scheme = moe_ops.SCHEMES["unquantized"]
    mend(moe_parallel_config=FusedMoEParallelConfig())
    mend(routing_method=RoutingMethodType.Llama4)
    mend(router_logits_dtype=torch.float16)
    mend(hidden_dim=256)
    mend()
    wanted = Format.Standard
    mend()
    assert seen == [
        *(
            f"kernel does not support {text}"
            for text in (
                "current device cpu",
                "no act_and_mul MLP layer",
                "silu activation",
                "quantization scheme fp8:128x128:float32xfp8:1x128:float32",
                f"parallel config {parallel}",
                f"routing method {RoutingMethodType.Renormalize!r}",
                "router logits dtype torch.bfloat16",
                "hidden size 64",
                "batched_experts activation format",
            )
        ),
        None,
    ]


def test_4_bit_numbers_come_in_pairs():
    for scheme in ("int4_w4a16_g128", "nvfp4", "fp8_block128"):
        for sizes in ({"hidden_dim": 63}, {"intermediate_size": 33}):
            config = replace(STANDARD, **sizes)
            text = reason(moe_ops.pipeline.TritonExperts, config, moe_ops.SCHEMES[scheme])
            assert (text is None) == (scheme == "fp8_block128"), text
            assert text is None or "does not support odd sizes (" in text


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_local_experts": 9}, ValueError, "num_local_experts must be at most num_experts = 8"),
        ({"in_dtype": torch.float64}, TypeError, "in_dtype must be one of .* got torch.float64"),
        ({"is_act_and_mul": False}, ValueError, "is_act_and_mul must be True for activation silu"),
        ({"experts_per_token": 9}, ValueError, "experts_per_token must be between 1 and the 8"),
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens must be at least 1, got 0"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1, got 0"),
    ],
)
def test_configurations_that_no_layer_has(changes, error, message):
    with pytest.raises(error, match=message):
        replace(STANDARD, **changes)


def test_modes_of_parallelism():
    class Some(moe_ops.pipeline.TritonExperts):
        SUPPORTS = Supports(parallel=frozenset({"tp", "sp"}))

    def text(**sizes):
        return reason(Some, replace(STANDARD, moe_parallel_config=FusedMoEParallelConfig(**sizes)))

    assert text(tp_size=2, sp_size=2) is None
    for sizes in ({"dp_size": 2}, {"ep_size": 2, "use_ep": True}, {"tp_size": 2, "use_ep": True}):
        assert "parallel config FusedMoEParallelConfig(" in text(**sizes)


OTHER_SIZES = (
    *(
        f"{e}{a}_block64x32{s}"
        for e in ("fp8", "int8")
        for a in ("", "_w8a16")
        for s in ("", "_ue8m0")
    ),
    *(f"{name}_g64{zp}" for name in ("int4_w4a16", "int8_w8a16") for zp in ("", "_zp")),
)
"""All that `get_scheme` makes besides those that have names of their own."""


@every_row("name", [*moe_ops.SCHEMES, *OTHER_SIZES])
def test_every_scheme_has_experts_in_both_formats(name):
    scheme = moe_ops.get_scheme(name)
    for cls in CANDIDATES:
        assert reason(cls, STANDARD, scheme, cls.activation_format()) is None


def test_schemes_that_nobody_makes():
    odd = moe_ops.Scheme("odd", FP8.activation, moe_ops.get_scheme("fp8_channel").weight)
    text = "kernel does not support quantization scheme fp8:1x*:float32xfp8:1x128:float32"
    assert reason(moe_ops.pipeline.TritonExperts, STANDARD, odd) == text
    for function in (moe_ops.select_kernel, moe_ops.explain):
        with pytest.raises(NotImplementedError, match="scheme.weight.group must have 128 columns"):
            function(STANDARD, odd)


def test_preference():
    names = [cls.__name__ for cls in CANDIDATES]
    assert names == [
        "TritonExperts",
        "GroupedGemmExperts",
        "MonolithicExperts",
        "BatchedTritonExperts",
        "BatchedGroupedGemmExperts",
        "NaiveBatchedExperts",
    ]
    public = [getattr(moe_ops.pipeline, name) for name in moe_ops.pipeline.__all__]
    assert {cls for cls in public if _can_be_built(cls)} == set(CANDIDATES)
    for config, expected in ((STANDARD, names[:2]), (BATCHED, names[3:])):
        left = CANDIDATES
        for name in expected:
            kernel = moe_ops.select_kernel(config, "fp8_channel", candidates=left)
            assert type(kernel.fused_experts).__name__ == name
            left = tuple(cls for cls in left if cls.__name__ != name)
        with pytest.raises(
            NotImplementedError, match="no experts serve scheme fp8_channel"
        ) as raised:
            moe_ops.select_kernel(config, "fp8_channel", candidates=left)
        for cls in left:
            assert f"\n  {cls.__name__}: " in str(raised.value)


def _can_be_built(cls):
    concrete = isinstance(cls, type) and not getattr(cls, "__abstractmethods__", True)
    return concrete and issubclass(cls, moe_ops.pipeline.FusedMoEExperts)


def test_parts_of_the_batched_kernel():
    parallel = FusedMoEParallelConfig(ep_size=4, ep_rank=3, use_ep=True)
    config = replace(BATCHED, num_local_experts=2, moe_parallel_config=parallel)
    kernel = moe_ops.select_kernel(config, "unquantized")
    part, experts = kernel.prepare_finalize, kernel.fused_experts
    assert isinstance(part, moe_ops.pipeline.BatchedPrepareAndFinalize)
    assert (part.max_num_tokens, part.num_local_experts, part.rank) == (16, 2, 3)
    assert part.num_dispatchers() == 1 == experts.num_dispatchers
    assert experts.max_num_tokens == 16 and kernel.moe_parallel_config is parallel


def test_demanded_experts():
    kernel = moe_ops.select_kernel(
        STANDARD, "unquantized", experts=moe_ops.pipeline.GroupedGemmExperts
    )
    assert type(kernel.fused_experts) is moe_ops.pipeline.GroupedGemmExperts
    kernel = moe_ops.select_kernel(
        STANDARD, "unquantized", experts=moe_ops.pipeline.MonolithicExperts
    )
    assert kernel.is_monolithic
    text = "NaiveBatchedExperts: kernel does not support standard activation format"
    with pytest.raises(ValueError, match=f"^experts must be .*, got {text}$"):
        moe_ops.select_kernel(STANDARD, "unquantized", experts=moe_ops.pipeline.NaiveBatchedExperts)
    with pytest.raises(ValueError, match="got Picky: kernel does not support current device cpu"):
        moe_ops.select_kernel(STANDARD, "unquantized", experts=Picky)


@pytest.mark.parametrize("config", [STANDARD, BATCHED], ids=["standard", "batched"])
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", "int8_channel", "mxfp4_w4a16"])
def test_what_is_selected_computes_the_layer(config, scheme):
    arguments, quant = layer_inputs(config, scheme)
    actual = moe_ops.select_kernel(config, quant).apply(*arguments)
    expected = moe_ops.fused_experts(*arguments, quant_config=quant)
    torch.testing.assert_close(actual, expected)


def test_a_name_alone_has_no_scales():
    (x, w1, w2, weights, ids), _ = layer_inputs(STANDARD, "fp8_channel")
    kernel = moe_ops.select_kernel(STANDARD, "fp8_channel")
    with pytest.raises(ValueError, match="w1_scale must be a Tensor for scheme fp8_channel"):
        kernel.apply(x, w1, w2, weights, ids)
    with pytest.raises(ValueError, match="scheme must be one of"):
        moe_ops.select_kernel(STANDARD, "fp7")


def test_biases_are_not_left_out():
    config = replace(STANDARD, has_bias=True)
    with pytest.raises(ValueError, match="w1_bias or w2_bias when config.has_bias"):
        moe_ops.select_kernel(config, "unquantized")
    bias = torch.zeros(8, 64)
    quant = moe_ops.FusedMoEQuantConfig("unquantized", w2_bias=bias)
    assert moe_ops.select_kernel(config, quant).fused_experts.w2_bias is bias
    assert moe_ops.explain(config, "unquantized").choice == "TritonExperts"
