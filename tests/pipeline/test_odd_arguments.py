"""Arguments of another kind: named in a TypeError or ValueError before anything runs."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from good_arguments import GOOD, IDS, LOGITS, W1, W2, WEIGHTS, E, H, I, K, X
from table_items import every_row

import moe_ops
from moe_ops import checks
from moe_ops.routing import sparsemixer, topk_softmax
from moe_ops.routing.simulate import uniform_random
from moe_ops.testing import Problem, make_inputs

NAMES_IN_STRINGS = ("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name")
CASES = [
    (function, name)
    for function, arguments in GOOD.items()
    for name in arguments
    if name not in (*NAMES_IN_STRINGS, "N")
]
FLAGS = [case for case in CASES if isinstance(GOOD[case[0]][case[1]], bool)]
NUMBERS = [
    (function, name)
    for function, name in CASES
    if type(GOOD[function][name]) in (int, float) or name in ("chunk_size", "max_num_tokens")
]


@every_row("value", [[1.0], object(), "what"])
@every_row(("function", "name"), CASES)
def test_another_kind_is_named(function, name, value):
    function(**GOOD[function])
    named = {"n_local_expert": "local_expert"}.get(name, name)
    if name == "quant_config" and function is moe_ops.FusedMoE:
        named = "scheme"
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"{named}.* must"):
        function(**{**GOOD[function], name: value})


@every_row(("value", "shown"), [("yes", "str 'yes'"), (1, "int 1")])
@every_row(("function", "name"), FLAGS)
def test_flags_are_true_or_false(function, name, value, shown):
    with pytest.raises(TypeError, match=f"{name} must be a bool, got {shown}"):
        function(**{**GOOD[function], name: value})


@every_row(("function", "name"), NUMBERS)
def test_true_is_no_number(function, name):
    named = {"n_local_expert": "local_expert"}.get(name, name)
    with pytest.raises(TypeError, match=f"{named}.* must be an? (int|number), got bool True"):
        function(**{**GOOD[function], name: True})


def test_flags_and_numbers_that_are_no_arguments_of_one_function():
    experts = moe_ops.pipeline.TritonExperts(
        moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig]),
        moe_ops.FusedMoEQuantConfig("unquantized"),
    )
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    with pytest.raises(TypeError, match="inplace must be a bool, got int 1"):
        moe_ops.FusedMoEKernel(part, experts, inplace=1)
    with pytest.raises(TypeError, match="apply_router_weight_on_input must be a bool"):
        moe_ops.FusedMoEKernel(part, experts).apply(
            X, W1, W2, WEIGHTS, IDS, apply_router_weight_on_input="no"
        )
    with pytest.raises(TypeError, match="batch_invariant must be a bool"):
        moe_ops.warmup(W1, W2, K, 1, batch_invariant="yes")
    with pytest.raises(TypeError, match="strict must be a bool, got str 'no'"):
        moe_ops.load_checkpoint(moe_ops.FusedMoE(E, K, H, I), {}, strict="no")
    with pytest.raises(TypeError, match="activation alpha must be a number, got bool True"):
        moe_ops.Activation("silu", alpha=True)
    with pytest.raises(TypeError, match="enable_expert_parallel must be a bool"):
        moe_ops.FusedMoEParallelConfig.make(2, enable_expert_parallel=1)


@every_row(
    ("call", "value", "nearest"),
    [
        (moe_ops.get_scheme, "fp8_blok128", "fp8_block128"),
        (moe_ops.get_scheme, "FP8_Channel", "fp8_channel"),
        (moe_ops.MoEActivation.from_str, "swigluaoi", "swigluoai"),
        (lambda s: moe_ops.FusedMoE(E, K, H, I, scheme=s), "mxfp4_w4a1", "mxfp4_w4a16"),
        (lambda s: moe_ops.FusedMoE(E, K, H, I, activation=s), "sillu", "silu"),
        (lambda s: moe_ops.FusedMoE(E, K, H, I, scoring_func=s), "sofmax", "softmax"),
        (lambda s: moe_ops.fused_topk(X, LOGITS, K, True, scoring_func=s), "sigmod", "sigmoid"),
        (lambda s: moe_ops.FusedMoEParallelConfig(all2all_backend=s), "plx", "pplx"),
        (
            lambda s: moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig] | {"scoring_func": s}),
            "sofmax",
            "softmax",
        ),
        (
            lambda s: moe_ops.parallel.determine_expert_map(2, 0, E, expert_placement_strategy=s),
            "round-robin",
            "round_robin",
        ),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(call, value, nearest):
    with pytest.raises(ValueError, match=rf"got '{value}'; did you mean '{nearest}'\?$"):
        call(value)


def test_a_name_that_resembles_none_is_answered_with_the_list():
    with pytest.raises(ValueError, match=r"scoring_func must be one of .*, got 'tanh\(\)'$"):
        moe_ops.fused_topk(X, LOGITS, K, True, scoring_func="tanh()")


@every_row("name", ["topk_weights", "topk_ids", "w1", "w2"])
def test_none_is_no_tensor(name):
    with pytest.raises(TypeError, match=f"{name} must be a Tensor, got NoneType"):
        moe_ops.fused_experts(**{**GOOD[moe_ops.fused_experts], name: None})


def test_sparse_tensors():
    with pytest.raises(TypeError, match="hidden_states must be a dense Tensor"):
        moe_ops.fused_experts(X.to_sparse(), W1, W2, WEIGHTS, IDS)


def test_nested_tensors():
    nested = torch.nested.nested_tensor([X[:2], X[2:]])  # its layout is strided
    with pytest.raises(TypeError, match="hidden_states must be a dense Tensor"):
        moe_ops.fused_experts(nested, W1, W2, WEIGHTS, IDS)


def test_axes_are_neither_fewer_nor_more():
    for shape in ((3,), (1, 2, 3)):
        with pytest.raises(ValueError, match="x must have 2 axes"):
            checks.tensor("x", torch.zeros(shape), 2, checks.FLOATS)


def test_logits_on_another_device():
    with pytest.raises(ValueError, match="gating_output must be on the device of hidden_states"):
        moe_ops.fused_moe(X, W1, W2, LOGITS.to("meta"), K)


def test_tensors_of_a_quant_config():
    q1, q2 = (moe_ops.quantize_weight(w, "fp8_channel") for w in (W1, W2))
    good = moe_ops.FusedMoEQuantConfig.from_weights("fp8_channel", q1, q2)
    call = (X, q1.data, q2.data, WEIGHTS, IDS)
    moe_ops.fused_experts(*call, quant_config=good)
    for changes, error, message in (
        ({"w1_scale": [1.0]}, TypeError, "quant_config.w1_scale must be a Tensor, got list"),
        ({"w1_bias": 3}, TypeError, "quant_config.w1_bias must be a Tensor, got int"),
    ):
        config = moe_ops.FusedMoEQuantConfig(
            "fp8_channel", **{"w1_scale": q1.scale, "w2_scale": q2.scale, **changes}
        )
        with pytest.raises(error, match=message):
            moe_ops.fused_experts(*call, quant_config=config)


@every_row("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_weights_without_a_config(dtype):
    w1, w2 = W1.to(dtype), W2.to(dtype)
    config = moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig] | {"in_dtype": torch.float32})
    kernel = moe_ops.select_kernel(config, "unquantized")
    for call in (
        lambda: moe_ops.fused_experts(X, w1, w2, WEIGHTS, IDS),
        lambda: moe_ops.fused_moe(X, w1, w2, LOGITS, K),
        lambda: moe_ops.warmup(w1, w2, K, [1]),
        lambda: kernel.apply(X, w1, w2, WEIGHTS, IDS),
    ):
        with pytest.raises(TypeError, match=f"w1 must .* FusedMoEQuantConfig.* got {dtype}"):
            call()


def test_weights_of_a_quant_config():
    """What `quantize_weight` returns makes a config; its data goes to the layer."""
    q = moe_ops.quantize_weight(W1, "fp8_channel")
    for w1, w2, name in ((W1, W2, "w1"), (q, W2, "w2"), (q.data, q, "w1")):
        with pytest.raises(TypeError, match=f"{name} must be a QTensor, as quantize_weight"):
            moe_ops.FusedMoEQuantConfig.from_weights("fp8_channel", w1, w2)
    for call, rest in ((moe_ops.fused_experts, (WEIGHTS, IDS)), (moe_ops.fused_moe, (LOGITS, K))):
        with pytest.raises(TypeError, match=r"w1 must be a Tensor, got QTensor \(pass its data\)"):
            call(X, q, q, *rest)
    with pytest.raises(TypeError, match="quant_config must be .*from_weights.* got str"):
        moe_ops.fused_moe(X, W1, W2, LOGITS, K, quant_config="fp8_channel")
    with pytest.raises(TypeError, match="scheme must be a Scheme or its name, got Fus"):
        config = moe_ops.FusedMoEQuantConfig("fp8_channel")
        moe_ops.FusedMoE(E, K, H, I, scheme=config)


def test_the_signature_of_a_quant_config():
    parameters = inspect.signature(moe_ops.FusedMoEQuantConfig).parameters
    assert list(parameters)[:3] == ["scheme", "w1_scale", "w2_scale"]
    assert parameters["w2_bias"].default is None
    assert parameters["w2_bias"].kind is inspect.Parameter.KEYWORD_ONLY
    assert moe_ops.scheme.QTensor is moe_ops.QTensor


@every_row(
    ("settings", "error"),
    [({"alpha": "x"}, TypeError), ({"beta": float("nan")}, ValueError), ({"kind": 3}, TypeError)],
)
def test_settings_of_an_activation(settings, error):
    with pytest.raises(error, match=f"{next(iter(settings))} must be"):
        moe_ops.Activation(**{"kind": "silu", **settings})


@every_row(
    ("options", "error", "message"),
    [
        ({"params_dtype": torch.float64}, TypeError, "params_dtype must be one of"),
        ({"e_score_correction_bias": torch.zeros(E + 1)}, ValueError, "number of logits = 4"),
        ({"e_score_correction_bias": torch.zeros(E).half()}, TypeError, "must have a dtype"),
        ({"ep_size": E + 1}, ValueError, "ep_size must be at most the 4 experts, got 5"),
        ({"ep_size": -2}, ValueError, "ep_size must be at least 1, got -2"),
        ({"intermediate_size": -1}, ValueError, "intermediate_size must be at least 1"),
        ({"quant_config": "mxfp4", "hidden_size": 33}, ValueError, "hidden_size must be even"),
        ({"shared_experts": 3}, TypeError, "shared_experts must be callable, got int"),
        ({"prefix": torch.tensor(3)}, TypeError, "prefix must be a str, got Tensor"),
        ({"quant_config": ""}, ValueError, "scheme must be one of"),
        ({"all2all_backend": ""}, ValueError, "all2all_backend must be one of"),
        ({"all2all_backend": 0}, TypeError, "all2all_backend must be one of"),
        ({"routed_scaling_factor": float("nan")}, ValueError, "routed_scaling_factor must be"),
        ({"num_experts": 4097}, ValueError, "num_experts must be in 1..4096, got 4097"),
        ({"zero_expert_num": 1}, ValueError, "zero_expert_type must be one of"),
    ],
)
def test_options_of_a_layer(options, error, message):
    with pytest.raises(error, match=message):
        moe_ops.FusedMoE(**{**GOOD[moe_ops.FusedMoE], **options})


def test_leading_axes_of_tokens_and_logits():
    """Flat logits are those of all tokens."""
    layer = moe_ops.FusedMoE(E, K, H, I)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x, logits = torch.randn(2, 3, H), torch.randn(2, 3, E)
    with torch.no_grad():
        assert torch.equal(layer(x, logits), layer(x, logits.view(6, E)))
    for x in (torch.zeros(2, 3, H), torch.zeros(2, H)):
        with pytest.raises(ValueError, match=r"router_logits.shape\[0\] must be .* = 2, got 3"):
            layer(x, torch.zeros(3, *x.shape[1:-1], E))
    with pytest.raises(ValueError, match="must have the 6 tokens of hidden_states, got 4"):
        layer(torch.zeros(2, 3, H), torch.zeros(4, E))
    for x, logits in ((torch.tensor(1.0),) * 2, (torch.zeros(2, 3, H), torch.zeros(1, 2, 3, E))):
        with pytest.raises(ValueError, match="router_logits must be .* axes of hidden_states"):
            layer(x, logits)
    with pytest.raises(TypeError, match="hidden_states must be a Tensor, got NoneType"):
        layer(None, None)


def test_tokens_without_numbers():
    layer = moe_ops.FusedMoE(E, K, H, I)
    for shape in ((0,), (2, 3, 0), (2, 0)):
        with pytest.raises(ValueError, match="hidden_states.* must be"):
            layer(torch.zeros(shape), torch.zeros(*shape[:-1], E))


def counts_of(counts, device="cpu"):
    return moe_ops.pipeline.ExpertTokensMetadata.make_from_list(counts, device)


def kernel_of(parallel):
    config = moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig])
    experts = moe_ops.pipeline.TritonExperts(config, moe_ops.FusedMoEQuantConfig("unquantized"))
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    return moe_ops.FusedMoEKernel(part, experts, moe_parallel_config=parallel)


FP8 = moe_ops.quantize_weight(W1, "fp8_channel")
ADAPTER = (torch.zeros(1, E, 2, H), torch.zeros(1, E, I, 2))


@every_row(
    ("call", "error", "message"),
    [
        (lambda: counts_of(3), TypeError, "expert_num_tokens_list must be a Sequence, got int"),
        (lambda: counts_of([-1]), ValueError, "expert_num_tokens_list must be at least 0"),
        (lambda: counts_of([2**31]), ValueError, "expert_num_tokens_list must be at most"),
        (lambda: counts_of([1.5]), TypeError, "expert_num_tokens_list must be an int"),
        (lambda: counts_of([1], "what"), ValueError, "device must be a torch.device"),
        (lambda: kernel_of(3), TypeError, "moe_parallel_config must be a FusedMoEParallelConfig"),
        (
            lambda: moe_ops.dequantize_weight(FP8, "fp8_channel", torch.int8),
            TypeError,
            "dtype must be a torch.dtype of floats, got torch.int8",
        ),
        (
            lambda: moe_ops.quantize_(moe_ops.FusedMoE(E, K, H, I), "fp8_channel", modules=3),
            TypeError,
            "modules must be a Iterable, got int",
        ),
        (
            lambda: moe_ops.explain(
                moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig]), "unquantized", device=[]
            ),
            TypeError,
            "device must be one of",
        ),
        (
            lambda: moe_ops.parallel.get_compressed_expert_map(IDS[0].to("meta")),
            ValueError,
            "expert_map must hold numbers",
        ),
        (
            lambda: moe_ops.parallel.compute_logical_maps(IDS.to("meta"), E),
            ValueError,
            "physical_to_logical_map must hold numbers",
        ),
        (
            lambda: moe_ops.parallel.remap_topk_to_local(IDS, None, torch.int32),
            TypeError,
            "expert_map must be a Tensor, got NoneType",
        ),
        (lambda: make_inputs(Problem(routing="skew")), ValueError, "mean 'skewed'"),
        (lambda: uniform_random(None, LOGITS, K), TypeError, "hidden_states must be a Tensor"),
        (lambda: uniform_random(X, LOGITS[..., None], K), ValueError, "gating_output must have 2"),
        (lambda: topk_softmax(None, LOGITS, K, True, IDS), TypeError, "hidden_states must be a T"),
        (lambda: topk_softmax(X, LOGITS, 3, True, IDS), ValueError, r"topk_ids.shape\[1\] must be"),
        (lambda: sparsemixer(X, LOGITS, renormalize=0), TypeError, "renormalize must be a bool"),
    ],
)
def test_calls_of_another_kind(call, error, message):
    with pytest.raises(error, match=message):
        call()


@every_row(
    ("call", "name"),
    [
        (lambda: moe_ops.training.load_balance_loss(LOGITS, IDS.to("meta")), "topk_ids"),
        (
            lambda: moe_ops.training.router_z_loss(
                LOGITS, is_padding=torch.zeros(len(X), dtype=torch.bool, device="meta")
            ),
            "is_padding",
        ),
        (
            lambda: moe_ops.training.update_expert_bias(
                torch.zeros(E), torch.zeros(E, device="meta")
            ),
            "expert_num_tokens",
        ),
        (lambda: moe_ops.expert_lora(X, *ADAPTER, IDS.to("meta")), "topk_ids"),
        (lambda: moe_ops.expert_lora(X, ADAPTER[0], ADAPTER[1].to("meta"), IDS), "lora_b"),
        (
            lambda: moe_ops.fused_experts(
                *(X, W1, W2, WEIGHTS, IDS),
                lora=moe_ops.training.ExpertLora(
                    (torch.zeros(1, E, 2, H).to("meta"), torch.zeros(1, E, 2 * I, 2)), None
                ),
            ),
            "lora.w1",
        ),
        (
            lambda: moe_ops.expert_lora(X, *ADAPTER, IDS, scaling=torch.ones(1, device="meta")),
            "scaling",
        ),
        (
            lambda: moe_ops.select_experts(*(X, LOGITS.to("meta"), K, False, True), topk_ids=IDS),
            "topk_ids",
        ),
    ],
)
def test_tensors_on_another_device(call, name):
    with pytest.raises(ValueError, match=f"{name} must be on the device of"):
        call()


def test_numbers_of_numpy():
    """They make the layer that Python's numbers make, also for a compiler."""
    sizes = [np.int64(n) for n in (E, K, H, I)]
    options = dict(routed_scaling_factor=np.float32(2.5), chunk_size=np.int64(2))
    layer = moe_ops.FusedMoE(*sizes, **options, n_shared_experts=np.int64(0))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(X, LOGITS), layer(X, LOGITS))
    part = moe_ops.FusedMoE(*sizes, ep_size=np.int64(2))
    assert part.moe_parallel_config.use_ep is True


def test_experts_that_ranks_cannot_share_evenly():
    """Without replicas some ranks hold one expert more."""
    inputs = make_inputs(Problem(num_experts=9, hidden_size=H, intermediate_size=I))
    logits = torch.randn(inputs.hidden_states.shape[0], 9)
    whole = moe_ops.FusedMoE(9, K, H, I)
    parts = [moe_ops.FusedMoE(9, K, H, I, ep_size=2, ep_rank=rank) for rank in range(2)]
    assert [len(part.w13_weight) for part in parts] == [5, 4]
    source = {"w13_weight": inputs.w1, "w2_weight": inputs.w2}
    for layer in (whole, *parts):
        moe_ops.load_checkpoint(layer, source, progress=False)
    x = inputs.hidden_states
    torch.testing.assert_close(sum(part(x, logits) for part in parts), whole(x, logits))


def test_arguments_of_the_loader():
    layer = moe_ops.FusedMoE(E, K, H, I)
    good = dict(
        param=layer.w13_weight, loaded_weight=torch.zeros(I, H), weight_name="0.gate_proj.weight",
        shard_id="w1", expert_id=0,
    )  # fmt: skip
    layer.weight_loader(**good)
    for changes, error in (
        ({"param": None}, TypeError),
        ({"param": torch.zeros(E)}, ValueError),
        ({"loaded_weight": [1.0]}, TypeError),
        ({"loaded_weight": torch.zeros(I, H, device="meta")}, ValueError),
        ({"weight_name": 3}, TypeError),
        ({"expert_id": "0"}, TypeError),
    ):
        with pytest.raises(error, match="(param|loaded_weight|weight_name|expert_id) must"):
            layer.weight_loader(**{**good, **changes})
    with pytest.raises(TypeError, match="layer must be a FusedMoE, got int"):
        moe_ops.load_checkpoint(3, {})


@every_row("layer", [2, -1, "0"])
def test_a_layer_that_is_not_balanced(layer):
    state = moe_ops.EplbState.make(2, E, 0)
    with pytest.raises((TypeError, ValueError), match="moe_layer_idx must be"):
        moe_ops.FusedMoE(E, K, H, I, enable_eplb=True).set_eplb_state(
            layer, state.expert_load, state.logical_to_physical_map, state.logical_replica_count
        )


def test_configurations_of_another_kind():
    for call in (moe_ops.select_kernel, moe_ops.explain):
        with pytest.raises(TypeError, match="config must be a FusedMoEConfig, got str"):
            call("qwen", "unquantized")
    with pytest.raises(ValueError, match="device must be a torch.device or its name"):
        moe_ops.FusedMoEConfig(**GOOD[moe_ops.FusedMoEConfig] | {"device": 2**70})
    with pytest.raises(TypeError, match="moe_config must be a FusedMoEConfig, got NoneType"):
        moe_ops.pipeline.TritonExperts(None, moe_ops.FusedMoEQuantConfig("unquantized"))
    for counts in (["1"], [-1], -1, 1.5, None):
        for warm_up in (partial(moe_ops.warmup, W1, W2, K), moe_ops.FusedMoE(E, K, H, I).warmup):
            with pytest.raises((TypeError, ValueError), match="num_tokens must be"):
                warm_up(counts)
    with pytest.raises(ValueError, match="w1 must hold at least one expert"):
        moe_ops.warmup(W1[:0], W2[:0], K, 1)


def test_reductions_of_another_kind():
    reduce = moe_ops.pipeline.TopKWeightAndReduceContiguous()
    for rows, ids, name in ((None, IDS, "fused_expert_output"), (X, None, "topk_ids")):
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, got NoneType"):
            reduce.apply(None, rows, WEIGHTS, ids, False)


def test_rows_that_are_not_there_are_skipped():
    """An offset table of more rows than were given."""
    rows, inverse = torch.arange(4.0).view(2, 2), torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    total = moe_ops.moe_unpermute(rows, None, inverse, torch.tensor([0, 2, 4]))
    assert total.tolist() == rows.tolist()
