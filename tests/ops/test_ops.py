"""Every operator: values, replays, opcheck, and fakes that allocate without asking sizes."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from graphs import capture
from operator_cases import cases_of, copied
from operator_samples import (
    COPIED,
    FP8,
    I32,
    E,
    H,
    I,
    K,
    keywords,
    outputs,
    overload,
    samples,
    symbolic_tokens,
)
from products import plain_product
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_ops import ops
from moe_ops.ops import STAGES


def test_every_operator_has_samples(device):
    assert set(samples(device)) == set(STAGES)


@pytest.mark.kernel
@pytest.mark.skipif(not (INTERPRETED or HAS_CUDA), reason="runs kernels")
@pytest.mark.parametrize("qualified", COPIED)
def test_values(qualified, device):
    """Kernels give what references give, with its strides, and change no other argument."""
    for case in cases_of(qualified):
        inputs = case.inputs()
        case.check(inputs, copied(case.run(copied(inputs, device)), "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("qualified", COPIED)
def test_replays(qualified):
    """A CUDA graph of a call writes the bits that the call writes."""
    for case in cases_of(qualified):
        inputs = case.inputs()
        expected = case.run(copied(inputs, "cuda"))
        graph, result = capture(case.run, copied(inputs, "cuda"))
        graph.replay()
        for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            if torch.is_tensor(a):
                a, b = (x.reshape(-1).view(torch.uint8) for x in (a, b))
                assert torch.equal(a, b), case.name


@pytest.mark.parametrize("qualified", COPIED)
def test_opcheck(qualified, device):
    seen = set()
    for arguments in samples(device)[qualified]:
        tests = ["test_faketensor", "test_autograd_registration"]
        kind = next((x for x in arguments if isinstance(x, str)), None)  # such as the scheme
        if kind not in seen:
            tests.append("test_aot_dispatch_dynamic")
        seen.add(kind)
        if FP8 not in [getattr(x, "dtype", None) for x in tree_leaves(arguments)]:
            tests.append("test_schema")  # which cannot compare these with what they were
        more = keywords(qualified, arguments)
        torch.library.opcheck(overload(qualified), arguments, more, test_utils=tests)


@pytest.mark.kernel
@pytest.mark.parametrize("qualified", STAGES)
def test_fakes_return_what_runs_return(qualified, device):
    """Shape, stride and dtype, on fake tensors of the device."""
    for arguments in samples(device)[qualified]:
        real = overload(qualified)(*arguments, **keywords(qualified, arguments))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            extra = {k: mode.from_tensor(v) for k, v in keywords(qualified, arguments).items()}
            fake = overload(qualified)(*faked, **extra)
        for a, b in zip(outputs(real), outputs(fake), strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            assert a.dtype == b.dtype and a.device == b.device
            assert a.is_contiguous()


@pytest.mark.parametrize("qualified", COPIED)
def test_autocast_changes_no_operator(qualified, device):
    """Products of references would be rounded to its dtype."""
    for case in cases_of(qualified):
        inputs = copied(case.inputs(), device)
        expected = case.run(copied(inputs, device))
        with torch.autocast(device, torch.bfloat16):
            result = case.run(copied(inputs, device))
        for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            if torch.is_tensor(a):
                a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
                assert torch.equal(a, b), case.name


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("unbacked", [False, True])
def test_fakes_add_no_guard_on_the_tokens(fake_device, unbacked):
    """The stages one after another, with a number of tokens that nobody may ask for."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = symbolic_tokens(mode, env, unbacked)
    with mode:

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=fake_device)

        x, w1, w2 = empty(tokens, H), empty(E, 2 * I, H), empty(E, H, I)
        weights, ids = ops.fused_topk(empty(tokens, E), None, K, True, "softmax", 1.0)
        count = empty(E, dtype=I32)
        ops.moe_align_block_size(ids, count, 16, E, True, True)
        plan = [ops.plan_slots(ids, count, E, "unquantized", torch.bfloat16), ids, count]
        h = plain_product(ops, x, w1, None, None, plan, K, "silu")
        y = plain_product(ops, h, w2, None, None, plan, 1)
        out = ops.moe_fused_mul_sum(y.view(tokens, K, H), weights, ids, None, None, E)
        order = ops.moe_permutation(ids, None, E)
        rows = ops.gather_rows(x, order[2], order[0], K)
        back = ops.moe_unpermute(ops.activation(rows, "silu_no_mul"), weights, order[1], order[0])
        ops.count_expert_num_tokens(ids, None, E)
        load, replicas = empty(E + 2, dtype=I32), empty(E, 3, dtype=I32)
        ops.eplb_map_to_physical_and_record(ids, load, replicas, count, None, None, I32, 0)
    assert not env.guards
    assert out.shape[0] is tokens or str(out.shape[0]) == str(tokens)
    assert back.shape == out.shape


@pytest.mark.gpu
@pytest.mark.parametrize("qualified", COPIED)
def test_tensors_of_another_device_than_the_current_one(qualified):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for arguments in samples("cuda:1")[qualified]:
        there = overload(qualified)(*arguments, **keywords(qualified, arguments))
        moved = tree_map_only(torch.Tensor, lambda x: x.to("cuda:0"), arguments)
        here = overload(qualified)(*moved, **keywords(qualified, moved))
        for a, b in zip(outputs(there), outputs(here), strict=True):
            assert a.device.index == 1 and torch.equal(a.to("cuda:0"), b)
