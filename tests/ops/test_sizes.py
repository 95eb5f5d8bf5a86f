"""Operators called by themselves with sizes that do not fit: refused, or harmless.

In the interpreter every access of what runs is checked.
"""

import pytest
import torch
from conftest import INTERPRETED
from operator_samples import called, keywords, overload
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ops import ops
from moe_ops.ops import STAGES

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
    for call in called(qualified, device)[: 1 if INTERPRETED else 3]:
        extra = keywords(qualified, tuple(call.values()))
        for name, x in call.items():
            if torch.is_tensor(x):
                for other in resized(x):
                    yield {**call, name: other}, extra


def refused(run):
    """Whether ValueError names an argument; any other error is none that a user can act on."""
    try:
        run()
    except ValueError as error:
        assert " must " in str(error)
        return True
    return False


@pytest.mark.parametrize("qualified", STAGES)
def test_other_sizes(qualified, device):
    """What a fake refuses a call refuses, too, and nothing else."""
    for call, extra in changed(qualified, device):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = {k: mode.from_tensor(x) if torch.is_tensor(x) else x for k, x in call.items()}
            out = {name: mode.from_tensor(x) for name, x in extra.items()}
            expected = refused(lambda f=faked, o=out: overload(qualified)(**f, **o))
        assert refused(lambda c=call, e=extra: overload(qualified)(**c, **e)) == expected
        if device == "cuda":
            torch.cuda.synchronize()  # an illegal access fails this test, not another


WRONG = {
    "moe_quantize": ("scale", "topk_weights"),
    "activation_quantize": ("x",),
    "batched_quantize": ("expert_num_tokens",),
    "expert_matmul": ("a", "w", "bias", "topk_weights", "plan"),
    "scaled_matmul": ("a", "a_scale", "w", "w_scale", "bias", "plan"),
    "weight_only_matmul": ("a", "w", "w_scale", "bias", "topk_weights", "plan"),
    "moe_fused_mul_sum": ("inputs", "topk_weights"),
    "moe_unpermute": ("topk_weights", "inv_permuted_idx"),
    "order_columns": ("x", "topk_ids"),
    "batched_dispatch": ("x", "topk_weights", "topk_ids"),
    "hash_topk": ("input_ids",),
    "adjust_routing": ("topk_weights", "topk_ids", "per_expert_scale", "is_padding"),
    "eplb_map_to_physical_and_record": ("logical_to_physical_map", "logical_replica_count"),
}


@pytest.mark.parametrize(
    ("qualified", "name"), [(q, n) for q, names in WRONG.items() for n in names]
)
def test_fewer_rows_than_the_others_have(qualified, name, device):
    several = [call for call in called(qualified, device) if call.get(name) is not None]
    call = several[-1] if name == "scale" else several[0]
    shorter = torch.cat([call[name]] * 2)[:3] if name == "scale" else call[name][:-1]
    with pytest.raises(ValueError, match="must"):
        overload(qualified)(**{**call, name: shorter})


TILED = [q for q in STAGES if "row_tiles" in [a.name for a in overload(q)._schema.arguments]]


@pytest.mark.parametrize("tiles", [[], [0], [3], [-16], [16, 0], [2**13], [2**40]], ids=str)
@pytest.mark.parametrize("qualified", TILED)
def test_row_tiles(qualified, tiles, device):
    """Refused by a kernel's launcher, not by its compiler; and so they are by a fake."""
    call = {**called(qualified, device)[0], "row_tiles": tiles}
    with pytest.raises(ValueError, match=r"row_tiles must be .* got \["):
        overload(qualified)(**call)
    with pytest.raises(ValueError, match=r"row_tiles must be"), FakeTensorMode() as mode:
        faked = {k: mode.from_tensor(x) if torch.is_tensor(x) else x for k, x in call.items()}
        overload(qualified)(**faked)


@pytest.mark.parametrize("tiles", [[8], [1], [256]])
def test_row_tiles_that_only_plans_have(tiles):
    """Matrix units multiply 16 rows and more."""
    ids = torch.zeros(40, 1, dtype=torch.int32)
    plan, x = ops.plan_slots(ids, None, tiles, 2), torch.ones(40, 16)
    with pytest.raises(ValueError, match="row_tiles must be of"):
        ops.expert_matmul(x, torch.ones(2, 16, 16), None, None, plan, ids, None, tiles, 1)


NUMBERS = {
    "fused_topk": "topk", "grouped_topk": "num_expert_group",
    "adjust_routing": "num_shared_experts",
    "zero_experts": "skipped_id", "moe_align_block_size": "num_experts",
    "plan_slots": "num_experts", "topk_plan": "num_local_experts",
    "count_expert_num_tokens": "num_local_experts", "plan_batched": "max_num_tokens",
    "plan_permuted": "num_rows", "moe_permutation": "num_local_experts", "gather_rows": "top_k",
    "batched_dispatch": "max_num_tokens", "batched_rows": "first_expert", "expert_matmul": "top_k",
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
        ops.plan_slots(ids, None, [16], 8)
