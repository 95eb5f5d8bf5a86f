"""Bad input to the layer: the argument, the rule and the value are named, before anything runs."""

import pytest
import torch
from table_items import every_row
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import checks
from moe_ops.pipeline import layer_checks

T, H, I, E, K = 6, 16, 12, 4, 2  # noqa: E741


def arguments(**changes):
    good = {
        "hidden_states": torch.zeros(T, H),
        "w1": torch.zeros(E, 2 * I, H),
        "w2": torch.zeros(E, H, I),
        "topk_weights": torch.zeros(T, K),
        "topk_ids": torch.zeros(T, K, dtype=torch.int32),
    }
    return {**good, **changes}


BAD = [
    ({"hidden_states": [1.0]}, TypeError, "hidden_states must be a Tensor, got list"),
    ({"hidden_states": torch.zeros(T)}, ValueError, r"hidden_states must have 2 axes.*\(6,\)"),
    ({"hidden_states": torch.zeros(T, H).double()}, TypeError, "hidden_states must have a dtype"),
    ({"hidden_states": torch.zeros(T, H, device="meta")}, ValueError, "must be on the device of"),
    ({"w1": torch.zeros(2 * I, H)}, ValueError, "w1 must have 3 axes"),
    ({"w1": torch.zeros(E, 2 * I, H).half()}, TypeError, "w1 must have the dtype of hidden_states"),
    ({"w2": torch.zeros(E, H, I).bfloat16()}, TypeError, "w2 must have the dtype of hidden_states"),
    ({"w1": torch.zeros(E, 2 * I, H + 1)}, ValueError, r"w1.shape\[2\] must be .* 16, got 17"),
    ({"w2": torch.zeros(E, H + 1, I)}, ValueError, r"w2.shape\[1\] must be .* 16, got 17"),
    ({"w2": torch.zeros(E + 1, H, I)}, ValueError, r"w2.shape\[0\] must be .* 4, got 5"),
    (
        {"w2": torch.zeros(E, H, I + 1)},
        ValueError,
        r"w1.shape\[1\] must be 2 \* w2.shape\[2\] = 26",
    ),
    ({"w1": torch.zeros(E, 2 * I + 1, H)}, ValueError, "w1 must have an even number of rows"),
    ({"activation": "relu2_no_mul"}, ValueError, r"w1.shape\[1\] must be w2.shape\[2\] = 12"),
    (
        {"w1": torch.zeros(E, 2 * I, 2 * H)[..., ::2].transpose(1, 2).transpose(1, 2)},
        ValueError,
        "w1 must have stride 1 on one of its last two axes",
    ),
    (
        {"w1": torch.zeros(0, 2 * I, H), "w2": torch.zeros(0, H, I)},
        ValueError,
        "w1 must hold at least one expert, got shape .0, ",
    ),
    (
        {"expert_map": torch.zeros(0).int()},
        ValueError,
        "expert_map must hold at least one expert, got shape .0,.$",
    ),
    ({"topk_ids": torch.zeros(T, K)}, TypeError, "topk_ids must have a dtype"),
    ({"topk_ids": torch.zeros(T).int()}, ValueError, "topk_ids must have 2 axes"),
    ({"topk_weights": torch.zeros(T, K + 1)}, ValueError, r"topk_weights.shape\[1\] must be"),
    ({"topk_weights": torch.zeros(T + 1, K)}, ValueError, "topk_weights must have the 6 tokens"),
    ({"topk_weights": torch.zeros(T, K).int()}, TypeError, "topk_weights must have a dtype"),
    (
        {"topk_ids": torch.zeros(T + 1, K).int(), "topk_weights": torch.zeros(T + 1, K)},
        ValueError,
        "topk_ids must have the 6 tokens of hidden_states, got 7",
    ),
    (
        {"topk_ids": torch.zeros(T, 5).int(), "topk_weights": torch.zeros(T, 5)},
        ValueError,
        r"topk_ids.shape\[1\] must be between 1 and the 4 experts, got 5",
    ),
    ({"expert_map": torch.zeros(8)}, TypeError, "expert_map must have a dtype"),
    ({"expert_map": torch.zeros(2, 4).int()}, ValueError, "expert_map must have 1 axes"),
    (
        {"expert_map": torch.zeros(8).int(), "global_num_experts": 9},
        ValueError,
        r"expert_map.shape\[0\] must be the number of experts = 9, got 8",
    ),
    ({"global_num_experts": 9}, ValueError, "global_num_experts must be w1.shape.* = 4 .* got 9"),
    (
        {"topk_ids": torch.zeros(T, 0).int(), "topk_weights": torch.zeros(T, 0)},
        ValueError,
        r"topk_ids.shape\[1\] must be between 1 and the 4 experts, got 0",
    ),
    (
        {
            "topk_ids": torch.zeros(T, K, dtype=torch.int32, device="meta"),
            "topk_weights": torch.zeros(T, K, device="meta"),
        },
        ValueError,
        "topk_ids must be on the device of hidden_states",
    ),
    (
        {"w1_bias": torch.zeros(E, 2 * I, device="meta")},
        ValueError,
        "w1_bias must be on the device of hidden_states",
    ),
    ({"w1_bias": torch.zeros(E, I)}, ValueError, r"w1_bias.shape\[1\] must be"),
    ({"w2_bias": torch.zeros(E + 1, H)}, ValueError, r"w2_bias.shape\[0\] must be"),
    ({"w2_bias": torch.zeros(E, H).int()}, TypeError, "w2_bias must have a dtype"),
    ({"activation": "swish2"}, ValueError, "activation must be one of .*'swish2'"),
    ({"activation": None}, TypeError, "activation must be a MoEActivation"),
    ({"quant_config": "fp8"}, TypeError, "quant_config must be a FusedMoEQuantConfig"),
]


@every_row(("changes", "error", "message"), BAD)
def test_fused_experts(changes, error, message):
    moe_ops.fused_experts(**arguments())  # what passed is remembered, and excuses nothing else
    with pytest.raises(error, match=message):
        moe_ops.fused_experts(**arguments(**changes))


ROUTED = [
    row
    for row in BAD
    if not {"topk_ids", "topk_weights", "hidden_states"} & {*row[0]}
    and "at least one expert" not in row[2]
]


@every_row(("changes", "error", "message"), ROUTED)
def test_fused_moe(changes, error, message):
    """It checks what `fused_experts` does before it routes; logits are for as many experts."""
    given = arguments(**changes)
    experts = len(given["expert_map"]) if "expert_map" in changes else given["w1"].shape[0]
    for name in ("topk_weights", "topk_ids"):
        del given[name]
    with pytest.raises(error, match=message):
        moe_ops.fused_moe(**given, gating_output=torch.zeros(T, max(experts, K)), topk=K)


def test_an_expert_past_32_bit_offsets():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = 2**16
    with pytest.raises(NotImplementedError, match="w1 must reach over fewer than"):
        moe_ops.fused_experts(
            meta(T, wide), meta(E, wide, wide), meta(E, wide, wide // 2),
            meta(T, K, dtype=torch.float32), meta(T, K, dtype=torch.int32),
        )  # fmt: skip


@every_row(("stride", "refused"), [(93368854, True), (93368853, False)])
def test_the_last_offset_of_32_bits(stride, refused):
    """23 rows and 6 columns further is 2**31, the first offset that an int32 lacks."""
    w1 = torch.empty_strided((E, 24, 7), (24 * stride, stride, 1), device="meta")
    x, w2 = torch.zeros(T, 7, device="meta"), torch.zeros(E, 7, 12, device="meta")
    if refused:
        with pytest.raises(NotImplementedError, match="w1 must reach over fewer than"):
            layer_checks.check_weights(x, w1, w2, None, None, moe_ops.MoEActivation.SILU)
    else:
        layer_checks.check_weights(x, w1, w2, None, None, moe_ops.MoEActivation.SILU)


def test_good_arguments_are_good():
    assert moe_ops.fused_experts(**arguments()).shape == (T, H)


def counting_check():
    calls = []

    @checks.remembered
    def check(x, name):
        calls.append(name)
        checks.tensor(name, x, 2, checks.FLOATS)

    return check, calls


def test_a_check_runs_once_for_what_looks_the_same():
    check, calls = counting_check()
    x = torch.zeros(4, 4)
    different = (x[:2], x.t()[:, :2], x.half(), x.to("meta"))
    for _ in range(2):
        check(x, "x")
        check(torch.ones(4, 4), "x")
        for other in different:
            check(other, "x")
        check(x, "y")
        check(x.clone().requires_grad_(), "x")
    assert len(calls) == 1 + len(different) + 1


def test_a_check_runs_for_other_lists_names_and_types():
    calls = []

    @checks.remembered
    def check(tensors, flag=True, **named):
        calls.append(named)

    x = torch.zeros(4, 4)
    for _ in range(2):
        for tensors in ([x, None], [None, x], [x, x[:2]], [x], (), [[x]]):
            check(tensors)
        for flag in (True, 1, 1.0, "1"):
            check([], flag)
        for named in ({"a": 1, "b": 2}, {"b": 1, "a": 2}, {"a": x, "b": x[:2]}, {"a": x, "b": x}):
            check([], **named)
    assert len(calls) == 6 + 4 + 4


@every_row("bad", [torch.zeros(3), torch.zeros(3, 3).int(), [1.0], None])
def test_a_check_that_raised_raises_again(bad):
    check, calls = counting_check()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="x must"):
            check(bad, "x")
    assert len(calls) == 2


def test_symbolic_sizes_are_checked_every_time():
    check, calls = counting_check()

    def run(x):
        check(x, "x")
        check(x, "x")
        return x + 1

    make_fx(run, tracing_mode="symbolic")(torch.zeros(5, 7))
    assert len(calls) == 2


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(checks, "REMEMBERED", 3)
    check, calls = counting_check()
    for _ in range(2):
        for tokens in range(4):
            check(torch.zeros(tokens, 2), "x")
    assert len(calls) == 8  # the fourth count forgets the first three


def test_fused_moe_names_logits_of_other_experts():
    x, w1, w2 = (arguments()[name] for name in ("hidden_states", "w1", "w2"))
    with pytest.raises(ValueError, match=r"gating_output.shape\[1\] must be .* = 4, got 5"):
        moe_ops.fused_moe(x, w1, w2, torch.zeros(T, 5), 2)


def test_scheme_names():
    assert moe_ops.get_scheme("unquantized") is moe_ops.SCHEMES["unquantized"]
    with pytest.raises(ValueError, match="scheme must be one of .* got 'fp3'"):
        moe_ops.get_scheme("fp3")
