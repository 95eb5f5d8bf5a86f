"""The operators of windows with sizes that do not fit, copies of tensors, and symbolic sizes."""

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from operator_samples import I32, OF_WINDOWS, called, overload, samples, symbolic_tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.optests import generate_tests as optests
from torch.utils._pytree import tree_map_only
from windows_here import Ranks, alone

from moe_ops import ops
from moe_ops.reference import symmetric as reference
from moe_ops.scheme import parse_quant
from moe_ops.windows import FAILED, MOST_PROGRAMS, WindowLayout

pytestmark = pytest.mark.kernel
R, E, H = 3, 6, 96
BF16, F32 = torch.bfloat16, torch.float32


def refused(run):
    """Whether ValueError names an argument."""
    try:
        run()
    except ValueError as error:
        assert " must " in str(error)
        return True
    return False


def resized(x):
    """``x`` with an axis more, and with less or more along each of its ends."""
    yield x[None]
    yield x[:-1]
    if x.dim() > 1:
        yield x[..., :-1]
    yield torch.cat([x, x])


@pytest.mark.parametrize("qualified", OF_WINDOWS)
def test_other_sizes(qualified, device):
    """What a fake refuses, a call refuses too. Only a call knows the sizes of its windows."""
    for call in called(qualified, device):
        window = windows_of(call)
        for name, x in call.items():
            for other in resized(x) if torch.is_tensor(x) else ():
                changed = {**call, name: other}
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fake = tree_map_only(torch.Tensor, mode.from_tensor, changed)
                    expected = refused(lambda f=fake: overload(qualified)(**f))
                actual = refused(lambda c=changed: overload(qualified)(**c))
                at, most = window.layout.parts, window.layout.max_num_tokens
                rows = other.shape[0] if name == "sums" else 0
                more = name == "held" and other.shape[0] > window.layout.num_local_experts
                wanted = expected or more or name == "peers" or rows > most
                assert actual == wanted, (name, other.shape)
                assert not window.own[at.end :].any()


def windows_of(call):
    return reference.windows_of(call["peers"])


def send_call(device, **changes):
    """A send of one rank that fits `alone`, with other arguments."""
    ranks = alone(device)
    (window,) = ranks.windows
    call = {
        "x": torch.ones(4, 32, device=device), "scale": None,
        "topk_weights": torch.ones(4, 2, device=device),
        "topk_ids": torch.zeros(4, 2, dtype=I32, device=device), "expert_ranks": None,
        "peers": window.peers, "state": window.state, "rows_per_rank": 5, "num_experts": 3,
        "on_input": False, "quant": "",
    }  # fmt: skip
    return {**call, **changes}, ranks


NO_ROOM = {
    "rows_per_rank must be at most 8": {"rows_per_rank": 9},
    "top_k must be at most 2": {
        "topk_weights": torch.ones(4, 3), "topk_ids": torch.zeros(4, 3, dtype=I32)
    },
    "bytes of a row of x must be at most 128": {"x": torch.ones(4, 33)},
    "bytes of a row of x must be at most 128.* got 256": {"x": torch.ones(4, 32).double()},
    "bytes of a row's scales must be at most 8": {"scale": torch.ones(4, 3)},
    "bytes of a row's scales must be .* got 16": {"quant": "fp8:1x8:float32"},
}  # fmt: skip


@pytest.mark.parametrize("message", NO_ROOM)
def test_no_room_in_the_windows(message, device):
    """A call writes nothing outside of its windows: here it writes nothing at all."""
    changes = tree_map_only(torch.Tensor, lambda a: a.to(device), NO_ROOM[message])
    call, ranks = send_call(device, **changes)
    with pytest.raises(ValueError, match=message):
        ops.symmetric_send(**call)
    assert not ranks.windows[0].own.any()


@pytest.mark.parametrize(
    ("message", "sums", "top_k"),
    [
        ("rows_per_rank must be at most 8 .* got 9", torch.ones(9, 32), 2),
        ("bytes of a row of sums must be at most 128 .* got 132", torch.ones(8, 33), 2),
        ("top_k must be at most 2 .* got 3", torch.ones(8, 32), 3),
    ],
)
def test_no_room_for_sums(message, sums, top_k, device):
    (window,) = (ranks := alone(device)).windows
    with pytest.raises(ValueError, match=message):
        ops.symmetric_return(sums.to(device), None, window.peers, window.state, top_k)
    assert not ranks.windows[0].own.any()


WRONG = {
    "topk_ids.shape": {"on_input": True},
    "on_input must be False": {"on_input": True, "scale": torch.ones(4, 1)},
    "x.shape.0. must be in 0..3, got 4": {"rows_per_rank": 3},
    "rows_per_rank must": {"rows_per_rank": -1},
    "num_experts must": {"num_experts": 2**31},
    "expert_ranks.shape": {"expert_ranks": torch.zeros(4, dtype=I32)},
    "scale.shape.0. must be 4, got 3": {"scale": torch.ones(3, 1)},
    "scale must have 2 axes": {"scale": torch.ones(4)},
    "scale must be given": {"quant": "fp8:*x*:float32"},
    "scale must have 1 entries": {"quant": "fp8:1x*:float32:static", "scale": torch.ones(4)},
    "scale must be None": {"quant": "fp8:1x32:float32", "scale": torch.ones(1)},
    "quant must": {"quant": "fp9:1x*:float32"},
    "peers must be in|peers.shape.0. must": {"peers": torch.zeros(1, dtype=torch.int64)},
    "peers must have 1 axes": {"peers": torch.zeros(1, 2, dtype=torch.int64)},
    "state.shape": {"state": torch.zeros(FAILED, dtype=I32)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message, device):
    """Refused by a fake and by a call."""
    changes = tree_map_only(torch.Tensor, lambda a: a.to(device), WRONG[message])
    call, ranks = send_call(device, **changes)
    if "on_input must" in message:
        call |= {name: call[name][:, :1] for name in ("topk_weights", "topk_ids")}
    with pytest.raises(ValueError, match=message):
        ops.symmetric_send(**call)
    with pytest.raises(ValueError, match=message), FakeTensorMode() as mode:
        ops.symmetric_send(**tree_map_only(torch.Tensor, mode.from_tensor, call))
    assert not ranks.windows[0].own.any()


def test_windows_are_found_by_their_own_tensor(device):
    """Not by a copy of it, which would have to be read, nor once they are closed."""
    call, ranks = send_call(device)
    copy, peers = call["peers"].clone(), call["peers"]
    with pytest.raises(ValueError, match="peers must be the tensor `peers` of open Windows"):
        ops.symmetric_send(**{**call, "peers": copy})
    ops.symmetric_send(**call)
    three = Ranks.of(3, device, 8, 32, 2, 4)
    with pytest.raises(ValueError, match="of open Windows, got another tensor"):
        ops.symmetric_send(**{**call, "peers": three.windows[0].peers[:-1]})
    del ranks, call
    with pytest.raises(ValueError, match="of open Windows, got another"):
        reference.windows_of(peers)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are called past the registry")
@pytest.mark.parametrize("qualified", OF_WINDOWS)
def test_gradients_are_refused(qualified, device):
    """A backward pass raises, as that of every operator."""
    call = dict(called(qualified, device)[0])
    first = next(iter(call))
    call[first] = call[first].clone().requires_grad_()
    out = overload(qualified)(**call)
    out = out[0] if isinstance(out, tuple) else out
    with pytest.raises(NotImplementedError):
        out.sum().backward()


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("unbacked", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_fakes_add_no_guard_on_the_tokens(fake_device, unbacked, equal):
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = symbolic_tokens(mode, env, unbacked)
    rows = tokens if equal else 64
    with mode:

        def empty(*shape, dtype=BF16):
            return torch.empty(shape, dtype=dtype, device=fake_device)

        where = (empty(R + 1, dtype=torch.int64), empty(FAILED + 1, dtype=I32))
        routing = (empty(tokens, 2, dtype=F32), empty(tokens, 2, dtype=I32), empty(E, dtype=I32))
        x = empty(tokens, H)
        for scale, quant in ((None, ""), (None, "fp8:1x32:float32"), (empty(tokens, 3), "")):
            out = ops.symmetric_send(x, scale, *routing, *where, rows, E, False, quant)
            assert str(out[0].shape[0]) == str(R * rows)
        sums = ops.symmetric_return(out[0], routing[2], *where, 2)
    assert not env.guards
    assert equal or sums.shape == (rows, H)


@pytest.mark.parametrize("qualified", OF_WINDOWS)
@pytest.mark.parametrize("check", [optests.safe_fake_check, optests.safe_schema_check])
def test_opcheck(qualified, check, device):
    """Parts of `torch.library.opcheck`, which would copy ``peers``."""
    for arguments in samples(device)[qualified]:
        check(overload(qualified), arguments, {}, copy_inputs=False)


def test_samples_are_of_open_windows(device):
    for qualified in OF_WINDOWS:
        assert samples(device)[qualified]
        assert all(windows_of(call) for call in called(qualified, device))


def test_parts_do_not_overlap():
    """Room for the largest call, in the order of the offsets, which vectors are aligned to."""
    layout = WindowLayout(3, 7, 100, 5, 2)
    at = layout.parts
    assert list(at) == sorted(at) and all(offset % 256 == 0 for offset in at)
    room = dict(zip(at._fields, (b - a for a, b in zip(at, at[1:], strict=False)), strict=False))
    assert room["ids"] >= 3 * 7 * 5 * 4 and room["weights"] >= 3 * 7 * 5 * 4
    assert room["rows"] >= 3 * 7 * 100 * 2 and room["sums"] >= 3 * 7 * 100 * 2
    assert room["scales"] >= 3 * 7 * 7 * 4 and room["sizes"] >= 12
    flags = 3 * 4 * MOST_PROGRAMS
    assert room["sent"] >= flags and room["returned"] >= flags
    keys = ("fp8:1x16:float32", "fp4:1x16:e4m3:global_scale", "fp8:1x32:e8m0")
    for rule in map(parse_quant, keys):
        _, columns = rule.row_scale_shape(1, 100)
        assert columns * rule.scale_dtype.itemsize <= layout.scale_bytes


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_no_wait_for_the_host(device):
    call, _windows = send_call(device)  # which close as soon as nobody holds them
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows = ops.symmetric_send(**call)[0]
            ops.symmetric_return(rows, None, call["peers"], call["state"], 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
