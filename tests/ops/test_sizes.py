"""Operators called by themselves with sizes that do not fit: refused, or harmless.

In the interpreter every access of what runs is checked.
"""

from collections import Counter

import pytest
import torch
from conftest import INTERPRETED
from operator_samples import COPIED, OF_WINDOWS, called, keywords, overload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from moe_ops import ops
from moe_ops.dispatch.tiles import is_direct
from moe_ops.ops import STAGES
from moe_ops.tensors import ExpertWeight

pytestmark = pytest.mark.kernel


def resized(x):
    """``x`` with an axis more, and with less or more along each of its ends."""
    yield x[None]
    if x.dim():
        yield x[:-1]
    if x.dim() > 1:
        yield x[..., :-1]
    if x.dim() and not INTERPRETED:
        yield x[:0]
        yield x.repeat(2, *[1] * (x.dim() - 1)) if x.itemsize > 1 else x[[*range(len(x))] * 2]


def changed(qualified, device):
    """A sample of an operator with one tensor of another size, and what shall be written."""
    for call in of_each_scheme(called(qualified, device), 1 if INTERPRETED else 3):
        extra = keywords(qualified, tuple(call.values()))
        for name, x in call.items():
            if torch.is_tensor(x):
                for other in resized(x):
                    yield {**call, name: other}, extra
        for name in ("tiles", "weight"):
            for at, x in enumerate(call.get(name, ())):
                for other in () if x is None else resized(x):
                    yield {**call, name: replaced(call[name], at, other)}, extra


def of_each_scheme(calls, count):
    """The first calls of each scheme; without one, the first calls."""
    schemes = Counter()
    for call in calls:
        schemes[call.get("scheme")] += 1
        if schemes[call.get("scheme")] <= count:
            yield call


def replaced(values, at, other):
    """A list with another value at one place."""
    return [*values[:at], other, *values[at + 1 :]]


def refused(run):
    """Whether ValueError names an argument; any other error is none that a user can act on."""
    try:
        run()
    except ValueError as error:
        assert " must " in str(error)
        return True
    return False


@pytest.mark.parametrize("qualified", COPIED)
def test_other_sizes(qualified, device):
    """What a fake refuses a call refuses, too, and nothing else."""
    for call, extra in changed(qualified, device):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = tree_map_only(torch.Tensor, mode.from_tensor, call)
            out = {name: mode.from_tensor(x) for name, x in extra.items()}
            expected = refused(lambda f=faked, o=out: overload(qualified)(**f, **o))
        assert refused(lambda c=call, e=extra: overload(qualified)(**c, **e)) == expected
        if device == "cuda":
            torch.cuda.synchronize()  # an illegal access fails this test, not another


WRONG = {
    "moe_quantize": ("scale", "topk_weights"),
    "activation_quantize": ("x",),
    "batched_quantize": ("expert_num_tokens",),
    "expert_product": (
        "a", "a_scale", "weight.data", "weight.scale", "weight.bias", "topk_weights",
    ),
    "moe_fused_mul_sum": ("inputs", "topk_weights"),
    "moe_unpermute": ("topk_weights", "inv_permuted_idx"),
    "order_columns": ("x", "topk_ids"),
    "batched_dispatch": ("x", "topk_weights", "topk_ids"),
    "hash_topk": ("input_ids",),
    "adjust_routing": ("topk_weights", "topk_ids", "per_expert_scale", "is_padding"),
    "eplb_map_to_physical_and_record": ("logical_to_physical_map", "logical_replica_count"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("qualified", "name"), [(q, n) for q, names in WRONG.items() for n in names]
)
def test_fewer_rows_than_the_others_have(qualified, name, device):
    name, _, field = name.partition(".")

    def given(call):
        return getattr(ExpertWeight(*call[name]), field) if field else call.get(name)

    several = [call for call in called(qualified, device) if given(call) is not None]
    several = several[-1:] if name == "scale" else of_each_scheme(several, 1)
    for call in several:
        x = given(call)
        shorter = torch.cat([x] * 2)[:3] if name == "scale" else x[:-1]
        if field:
            shorter = ExpertWeight(*call[name])._replace(**{field: shorter})
        with pytest.raises(ValueError, match="must"):
            overload(qualified)(**{**call, name: shorter})


TILED = [
    q
    for q in STAGES
    if "tiles" in [a.name for a in overload(q)._schema.arguments] and q not in OF_WINDOWS
]


@pytest.mark.parametrize("qualified", TILED)
def test_a_plan_of_another_length(qualified, device):
    call = next(
        call
        for call in called(qualified, device)
        if call["tiles"][0] is not None and not few_slots(call)
    )
    tiles, more = call["tiles"], keywords(qualified, tuple(call.values()))
    for plan in (tiles[0][:-1], torch.cat([tiles[0]] * 2)):
        with pytest.raises(ValueError, match=r"plan.numel\(\) must be"):
            overload(qualified)(**{**call, "tiles": replaced(tiles, 0, plan)}, **more)


def few_slots(call):
    """Whether a GEMM is told its tiles by the ids of few slots, and reads no plan."""
    ids, weight = call["tiles"][1], call.get("weight") or [call.get("w")]
    return ids is not None and is_direct(ids.numel(), call.get("num_experts") or len(weight[0]))


@pytest.mark.parametrize("qualified", TILED)
def test_tiles_are_three(qualified, device):
    call = called(qualified, device)[0]
    more = keywords(qualified, tuple(call.values()))
    for tiles in (call["tiles"][:2], [*call["tiles"], None], []):
        with pytest.raises(ValueError, match=r"tiles must be \[plan, topk_ids, expert_map\]"):
            overload(qualified)(**{**call, "tiles": tiles}, **more)


SCHEMED = [q for q in STAGES if "scheme" in [a.name for a in overload(q)._schema.arguments]]


@pytest.mark.parametrize("qualified", SCHEMED)
def test_unknown_schemes(qualified, device):
    call = {**called(qualified, device)[0], "scheme": "fp8_chanel"}
    with pytest.raises(ValueError, match="scheme must"):
        overload(qualified)(**call)
    with pytest.raises(ValueError, match="scheme must"), FakeTensorMode() as mode:
        overload(qualified)(**tree_map_only(torch.Tensor, mode.from_tensor, call))


@pytest.mark.parametrize("rows", [0, 3, -16, 192, 2**13, 2**40])
def test_block_sizes(rows, device):
    """Refused by a kernel's launcher, not by its compiler; and so they are by a fake."""
    call = {**called("moe_align_block_size", device)[0], "block_size": rows}
    with pytest.raises(ValueError, match=r"block_size must be .* got "):
        ops.moe_align_block_size(**call)
    with pytest.raises(ValueError, match=r"block_size must be"), FakeTensorMode() as mode:
        ops.moe_align_block_size(**tree_map_only(torch.Tensor, mode.from_tensor, call))


@pytest.mark.parametrize("name", ["fused_topk", "grouped_topk", "hash_topk", "topk_backward"])
def test_scoring_functions(name, device):
    call = {**called(name, device)[0], "scoring_func": "softmaxx"}
    with pytest.raises(ValueError, match="scoring_func must be .*did you mean 'softmax'"):
        overload(name)(**call)


NUMBERS = {
    "fused_topk": "topk", "grouped_topk": "num_expert_group",
    "adjust_routing": "num_shared_experts",
    "zero_experts": "skipped_id", "moe_align_block_size": "num_experts",
    "plan_slots": "num_experts", "adapter_ids": "num_adapters",
    "count_expert_num_tokens": "num_local_experts", "plan_batched": "max_num_tokens",
    "plan_permuted": "num_rows", "moe_permutation": "num_local_experts", "gather_rows": "top_k",
    "batched_dispatch": "max_num_tokens", "batched_rows": "first_expert", "expert_product": "top_k",
}  # fmt: skip


@pytest.mark.parametrize("value", [-2, 2**31, 2**40])
@pytest.mark.parametrize(("qualified", "name"), NUMBERS.items())
def test_numbers_of_things(qualified, name, value, device):
    call = {**called(qualified, device)[0], name: value}
    with pytest.raises(ValueError, match=" must "):
        overload(qualified)(**call)


def test_a_plan_that_kernels_cannot_count():
    ids = torch.empty(2**25, 2**6, dtype=torch.int32, device="meta")
    with pytest.raises(NotImplementedError, match="so few slots"):
        ops.plan_slots(ids, None, 8, "unquantized", torch.bfloat16)
