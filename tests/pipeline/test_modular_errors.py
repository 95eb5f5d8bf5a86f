"""What the modular kernel refuses: parts, calls, configurations; and what it reports when asked."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from modular import BATCHED, EXPERTS, build_experts, layer_config, setup, twice
from table_items import every_row

import moe_ops
from moe_ops import FusedMoEKernel, FusedMoEQuantConfig
from moe_ops.pipeline import Call, MonolithicExperts
from moe_ops.testing import Problem, make_inputs

PLAIN = FusedMoEQuantConfig("unquantized")
STANDARD = tuple(e for e in EXPERTS if e.activation_format() is not BATCHED)
BATCH = tuple(e for e in EXPERTS if e.activation_format() is BATCHED)
NO_EP = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP
MONOLITHIC = moe_ops.pipeline.MoEPrepareAndFinalizeNoEPMonolithic


@every_row("experts", STANDARD)
@every_row("numbers", [(4, None), (None, 1), (4, 1)])
def test_standard_experts_take_no_capacity(experts, numbers):
    rule = "max_num_tokens and num_dispatchers should only be set for BatchedExperts activation"
    with pytest.raises(ValueError, match=rule):
        experts(layer_config(Problem()), PLAIN, *numbers)


@every_row("experts", BATCH)
@every_row("numbers", [(4, None), (None, 1), ()])
def test_batched_experts_need_a_capacity(experts, numbers):
    rule = "max_num_tokens and num_dispatchers must be set for BatchedExperts activation format"
    with pytest.raises(ValueError, match=rule):
        experts(layer_config(Problem()), PLAIN, *numbers)


@every_row("experts", BATCH)
@every_row("numbers", [(0, 1), (4, -1), (4, True), (2.5, 1)])
def test_the_capacity_of_batched_experts_is_positive(experts, numbers):
    with pytest.raises((ValueError, TypeError), match="(max_num_tokens|num_dispatchers) must be a"):
        experts(layer_config(Problem()), PLAIN, *numbers)


def parts(experts=moe_ops.pipeline.TritonExperts, prepare=NO_EP):
    return prepare(), build_experts(experts, Problem(), PLAIN)


def batched_parts(**sizes):
    sizes = dict(max_num_tokens=80, num_local_experts=8, num_dispatchers=1, rank=0) | sizes
    experts = build_experts(moe_ops.pipeline.BatchedTritonExperts, Problem(), PLAIN)
    return moe_ops.pipeline.BatchedPrepareAndFinalize(**sizes), experts


BAD_PARTS = [
    (
        lambda: parts(moe_ops.pipeline.TritonExperts, MONOLITHIC), {}, ValueError,
        "must both be either monolithic or non-monolithic but got "
        "MoEPrepareAndFinalizeNoEPMonolithic and TritonExperts",
    ),
    (
        lambda: parts(moe_ops.pipeline.MonolithicExperts), {}, ValueError,
        "but got MoEPrepareAndFinalizeNoEP and MonolithicExperts",
    ),
    (
        lambda: parts(moe_ops.pipeline.BatchedTritonExperts), {}, ValueError,
        r"fused_experts must take the format of prepare_finalize, standard \(MoEPrepare.*NoEP\), "
        r"got batched_experts \(BatchedTritonExperts\)",
    ),
    (
        lambda: (batched_parts()[0], parts()[1]), {}, ValueError,
        r"must take the format of prepare_finalize, batched_experts .* got standard",
    ),
    (
        lambda: (NO_EP(), moe_ops.pipeline.TritonExperts), {}, TypeError,
        "fused_experts must be an instance of FusedMoEExperts, got TritonExperts",
    ),
    (
        lambda: parts()[::-1], {}, TypeError,
        "prepare_finalize must be an instance of FusedMoEPrepareAndFinalize, got TritonExperts",
    ),
    (parts, {"inplace": True, "shared_experts": twice}, ValueError, "inplace must be False with"),
    (parts, {"shared_experts": 3}, TypeError, "shared_experts must be callable, got int"),
    (parts, {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    (batched_parts, {"chunk_size": 4}, ValueError, "chunk_size must be None for BatchedTriton"),
    (
        lambda: parts(MonolithicExperts, MONOLITHIC), {"inplace": True}, ValueError,
        "inplace must be False and shared_experts None with monolithic experts",
    ),
    (
        lambda: parts(MonolithicExperts, MONOLITHIC), {"shared_experts": twice}, ValueError,
        "inplace must be False and shared_experts None with monolithic experts",
    ),
    (
        lambda: parts(MonolithicExperts, MONOLITHIC), {"chunk_size": 4}, ValueError,
        "chunk_size must be None for MonolithicExperts",
    ),
]  # fmt: skip


@every_row(("make", "options", "error", "message"), BAD_PARTS)
def test_parts_that_do_not_fit(make, options, error, message):
    with pytest.raises(error, match=message):
        FusedMoEKernel(*make(), **options)


@every_row("name", ["max_num_tokens", "num_local_experts", "num_dispatchers", "rank"])
def test_batched_prepare_needs_sizes(name):
    with pytest.raises(ValueError, match=f"{name}.* must be at least [01], got -1"):
        batched_parts(**{name: -1})


X = torch.zeros(33, 64)
BAD_CALLS = [
    ({"hidden_states": X.half()}, TypeError, "w1 must have the dtype of hidden_states"),
    (
        {n: make_inputs(Problem(dtype=torch.float16))._asdict()[n]
         for n in ("hidden_states", "w1", "w2")},
        TypeError, "hidden_states must have the in_dtype of moe_config, torch.float32, got .*16",
    ),
    ({"topk_ids": torch.zeros(33, 2)}, TypeError, "topk_ids must have a dtype"),
    ({"topk_weights": torch.zeros(32, 2)}, ValueError, "topk_weights must have the 33 tokens"),
    ({"global_num_experts": 9}, ValueError, "global_num_experts must be w1.shape"),
    ({"activation": "swish2"}, ValueError, "activation must be one of"),
    ({"activation": "relu2_no_mul"}, ValueError, r"w1.shape\[1\] must be w2.shape\[2\] = 48"),
    ({"w1": torch.zeros(8, 96, 63)}, ValueError, r"w1.shape\[2\] must be hidden_states.shape"),
]  # fmt: skip


@every_row("experts", [e for e in EXPERTS if not e.is_monolithic()])
@every_row(("changes", "error", "message"), BAD_CALLS)
def test_calls_that_do_not_fit(experts, changes, error, message):
    with pytest.raises(error, match=message):
        setup(Problem(), experts).apply(**changes)


def test_calls_of_the_other_kind():
    with pytest.raises(ValueError, match="apply_monolithic needs monolithic parts"):
        setup(Problem(), moe_ops.pipeline.TritonExperts).kernel.apply_monolithic(
            *make_inputs(Problem())[:3], torch.zeros(33, 8), "silu", -1, None, False
        )
    with pytest.raises(ValueError, match="apply needs modular parts: call apply_monolithic"):
        setup(Problem(), moe_ops.pipeline.MonolithicExperts).apply()


@every_row(
    ("logits", "num_experts", "message"),
    [
        (torch.zeros(33, 9), -1, r"router_logits.shape\[1\] must be E = 8, got 9"),
        (torch.zeros(32, 8), -1, "router_logits must have the 33 tokens of hidden_states, got 32"),
        (torch.zeros(33, 8), 9, "global_num_experts must be E = 8, got 9"),
    ],
)
def test_logits_that_do_not_fit(logits, num_experts, message):
    s = setup(Problem(), moe_ops.pipeline.MonolithicExperts)
    with pytest.raises(ValueError, match=message):
        s.kernel.apply_monolithic(*s.inputs[:3], logits, "silu", num_experts, None, False)


def test_logits_and_maps_of_another_kind():
    s = setup(Problem(), moe_ops.pipeline.MonolithicExperts)
    call = (*s.inputs[:3], torch.zeros(33, 8), "silu", -1)
    with pytest.raises(TypeError, match="router_logits must have a dtype"):
        s.kernel.apply_monolithic(*call[:3], torch.zeros(33, 8).int(), *call[4:], None, False)
    with pytest.raises(TypeError, match="expert_map must have a dtype"):
        s.kernel.apply_monolithic(*call, torch.zeros(8), False)
    with pytest.raises(ValueError, match="router_logits must be on the device of hidden_states"):
        s.kernel.apply_monolithic(*call[:3], call[3].to("meta"), *call[4:], None, False)
    with pytest.raises(TypeError, match="apply_router_weight_on_input must be a bool, got str 'n"):
        s.kernel.apply_monolithic(*call, None, "no")
    config = dataclasses.replace(s.kernel.fused_experts.moe_config, has_bias=True)
    s.kernel.fused_experts.moe_config = config
    with pytest.raises(ValueError, match="must have w1_bias or w2_bias when moe_config.has_bias"):
        s.kernel.apply_monolithic(*call, None, False)


@every_row("local", [4, 16])
def test_prepare_for_another_number_of_experts(local):
    """Rows of experts that are not there would be read past the weights' end."""
    s = setup(Problem(), moe_ops.pipeline.BatchedTritonExperts)
    part, _ = batched_parts(num_local_experts=local)
    kernel = FusedMoEKernel(part, s.kernel.fused_experts)
    with pytest.raises(ValueError, match=rf"hidden_states.shape\[0\] .* = 8, got {local}"):
        kernel.apply(**s.arguments())


@every_row("experts", BATCH)
def test_rows_that_nobody_has_counted(experts):
    """Without counts, or with those of other experts, rows past the used ones would be read."""
    s = setup(Problem(), experts)
    rows, counts = torch.zeros(8, 4, 64), torch.zeros(7, dtype=torch.int32)
    call = (rows, *s.inputs[1:5], "silu", 8, None, None)
    with pytest.raises(ValueError, match="expert_tokens_meta must be given in the Batched format"):
        s.kernel.fused_experts.apply(*call, None, False)
    if experts is not moe_ops.pipeline.NaiveBatchedExperts:  # which looks at every row
        with pytest.raises(ValueError, match=r"expert_num_tokens.shape\[0\] must be .* 8, got 7"):
            s.kernel.fused_experts.apply(
                *call, moe_ops.pipeline.ExpertTokensMetadata(counts), False
            )


def test_shared_experts_must_return():
    s = setup(Problem(), moe_ops.pipeline.TritonExperts, shared_experts=lambda x: None)
    with pytest.raises(ValueError, match="shared_experts must return a Tensor, got None"):
        s.apply()


class Int64Only(NO_EP):
    def topk_indices_dtype(self):
        return torch.int64


def test_prepare_may_ask_for_a_dtype_of_ids():
    s = setup(Problem(), moe_ops.pipeline.TritonExperts)
    kernel = FusedMoEKernel(Int64Only(), s.kernel.fused_experts)
    with pytest.raises(TypeError, match="topk_ids must have dtype torch.int64, got torch.int32"):
        kernel.apply(**s.arguments())
    changes = {"topk_ids": s.inputs.topk_ids.long()}
    assert torch.equal(kernel.apply(**s.arguments(**changes)), s.apply())


def test_parts_that_are_not_asynchronous_say_so():
    inputs = make_inputs(Problem())
    with pytest.raises(NotImplementedError, match="NoEP does not prepare asynchronously"):
        NO_EP().prepare_async(*inputs[:1], *inputs[3:5], 8, None, False, PLAIN)
    with pytest.raises(NotImplementedError, match="NoEP does not finalize asynchronously"):
        NO_EP().finalize_async(X, X, X, False, moe_ops.pipeline.TopKWeightAndReduceNoOP())


@every_row("logits", [(X[:, :8], X[:, :8]), [X[:, :8]] * 2, None])
def test_logits_are_one_tensor(logits):
    s = setup(Problem(), moe_ops.pipeline.MonolithicExperts)
    with pytest.raises(TypeError, match="router_logits must be a Tensor, got (tuple|list|None)"):
        s.kernel.apply_monolithic(*s.inputs[:3], logits, "silu", -1, None, False)


@every_row("name", ["TopK", "Custom", "Simulated"])
def test_routing_methods_that_monolithic_experts_lack(name):
    method = moe_ops.RoutingMethodType[name]
    config = dataclasses.replace(
        layer_config(Problem()), routing_method=method, max_num_tokens=None
    )
    reason = f"kernel does not support routing method {method!r}"
    kind = moe_ops.pipeline.MonolithicExperts
    format_ = kind.activation_format()
    assert kind.is_supported_config(kind, config, None, None, format_) == (False, reason)
    with pytest.raises(ValueError, match=reason):
        moe_ops.select_kernel(config, "unquantized", experts=kind)
    with pytest.raises(NotImplementedError, match="routing_method must be one of Default, Renorm"):
        kind(config, PLAIN)


def test_rows_that_do_not_fit_raise_in_checking_mode():
    """As many tokens as there is room for, but each twice to one expert. Outside of that mode rows
    are dropped and counted, and nobody waits for the device."""
    s = setup(Problem(), moe_ops.pipeline.BatchedTritonExperts)
    part, experts = batched_parts(max_num_tokens=33)[0], s.kernel.fused_experts
    kernel = FusedMoEKernel(part, experts)
    twice_to_0 = s.arguments(topk_ids=torch.zeros_like(s.inputs.topk_ids))
    out = kernel.apply(**twice_to_0)
    assert (out[17:] == 0).all() and (out[:17] != 0).any(1).all()
    message = "max_num_tokens must be at least the rows of the busiest expert, got 33: 33 rows did"
    with moe_ops.checking(), pytest.raises(ValueError, match=message):
        kernel.apply(**twice_to_0)
    with moe_ops.checking():
        assert torch.equal(kernel.apply(**s.arguments()), s.apply())
        assert moe_ops.workspace_nbytes(4, 64, 48, 8, 2, torch.float32, format="batched") > 0
        with ThreadPoolExecutor() as pool:  # a thread that did not ask for checks
            dropped = pool.submit(lambda: kernel.apply(**twice_to_0)).result()
            assert torch.equal(dropped, out)
    assert torch.equal(kernel.apply(**twice_to_0), out)


@every_row("experts", BATCH)
def test_tokens_that_do_not_fit_at_once_run_in_parts(experts):
    """All to the same experts: nothing is dropped, in checking mode or not."""
    s = setup(Problem(routing="one_expert"), experts, shared_experts=twice)
    part = batched_parts(max_num_tokens=20)[0]
    kernel = FusedMoEKernel(part, s.kernel.fused_experts, shared_experts=twice)
    with moe_ops.checking():
        shared, out = kernel.apply(**s.arguments())
    torch.testing.assert_close((shared, out), s.apply())
    many = dict(activation="silu", global_num_experts=8)
    calls = [Call(*s.inputs[:5], **many)]
    with pytest.raises(ValueError, match="at most max_num_tokens = 20 tokens.* got 33"):
        moe_ops.pipeline.run_micro_batches(kernel, calls)
    part = batched_parts(max_num_tokens=20, num_dispatchers=2)[0]
    with pytest.raises(ValueError, match="at most max_num_tokens = 20 tokens.* got 33"):
        FusedMoEKernel(part, s.kernel.fused_experts).apply(**s.arguments())


@every_row("scheme", [n for n, s in moe_ops.SCHEMES.items() if s.weight])
@every_row("experts", [e for e in EXPERTS if not e.is_monolithic()])
def test_weights_of_another_scheme(experts, scheme):
    """Not stored at all, or incomplete: what is missing is named."""
    problem = Problem(scheme=scheme)
    s = setup(problem, experts)
    with pytest.raises(TypeError, match=r"w1 must have a dtype of \[torch\..*int8.*|w1 .*float8"):
        s.apply(w1=make_inputs(problem).w1)
    empty = build_experts(experts, problem, FusedMoEQuantConfig(scheme))
    kernel = FusedMoEKernel(s.kernel.prepare_finalize, empty)
    with pytest.raises(ValueError, match=f"w1_scale must be a Tensor for scheme {scheme}, got"):
        kernel.apply(**s.arguments())
    plain = FusedMoEKernel(s.kernel.prepare_finalize, build_experts(experts, Problem(), PLAIN))
    with pytest.raises(TypeError, match="w1 must have a dtype of"):
        plain.apply(**s.arguments())
