"""Rows that are written into the Batched format of a rank: places, sizes, and what is compiled."""

import pytest
import torch
from conftest import INTERPRETED
from operator_samples import called
from windows_here import Ranks

from moe_ops import ops

pytestmark = pytest.mark.kernel
E, K, H = 4, 2, 48
I32 = torch.int32


def sent(ids, device, quant="", room=None, on_input=False, dtype=torch.bfloat16, scale=None):
    """A send of one rank's tokens to its own experts, and what a dispatch on one rank gives."""
    tokens = ids.shape[0]
    room = room or max(tokens, 1)
    (window,) = Ranks.of(1, device, room, H, ids.shape[1], 4, E).windows
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, H, generator=g).to(device, dtype)
    weights, ids = torch.rand(ids.shape, generator=g).to(device), ids.to(device)
    experts = torch.arange(E, dtype=I32, device=device)
    placement = torch.stack([experts * 0, experts])
    where = (placement, experts, window.peers, window.state, room)
    out = ops.symmetric_send_batched(x, scale, weights, ids, *where, on_input, quant)
    given = weights if on_input else None
    known = torch.where((ids >= 0) & (ids < E), ids, -1)
    expected = ops.batched_dispatch(x, scale, given, known, 0, E, room, quant)
    return out, expected, weights, known


def check(out, expected, weights, known):
    rows, scale, counts, dropped, local, there = out
    wanted, wanted_scale, wanted_counts, num_dropped = expected
    assert torch.equal(counts, wanted_counts)
    assert int(dropped.sum()) == int(num_dropped)
    tokens = known.shape[0]
    assert torch.equal(local[:tokens], known.int()) and (local[tokens:] == -1).all()
    routed = (known >= 0).any(1)
    assert torch.equal(there[:tokens][routed], weights[routed])
    for expert, count in enumerate(counts.tolist()):
        pair = (rows[expert, :count], wanted[expert, :count])
        assert torch.equal(*(y.contiguous().view(torch.uint8) for y in pair))
        if scale.dim() == 3:
            n = count if scale.shape[1] > 1 else 1
            pair = (scale[expert, :n], wanted_scale[expert, :n])
            assert torch.equal(*(y.contiguous().view(torch.uint8) for y in pair))


ONE_TOKEN = torch.tensor([[3, 1]], dtype=I32)
TOKENS = torch.tensor([[0, 1], [1, 0], [-1, 7], [2, 2**20], [3, 0]], dtype=I32)
"""With ids of no expert."""


@pytest.mark.parametrize("quant", ["", "fp8:1x16:float32", "int8:1x*:float32", "fp4:1x16:e8m0"])
@pytest.mark.parametrize("on_input", [False, True])
def test_rows_are_those_of_a_dispatch(quant, on_input, device):
    """In the interpreter with one program, which a room for one token gives."""
    for ids in [ONE_TOKEN] if INTERPRETED else [ONE_TOKEN, TOKENS, TOKENS.long(), TOKENS[:0]]:
        check(*sent(ids, device, quant, on_input=on_input))


def test_one_given_scale(device):
    scale = torch.full((1,), 0.02, device=device)
    check(*sent(ONE_TOKEN, device, "fp8:*x*:float32:static", scale=scale))


@pytest.mark.skipif(INTERPRETED, reason="needs several programs")
def test_rows_that_do_not_fit_are_counted(device):
    """Ids of a token that are the same."""
    out, expected, weights, known = sent(torch.zeros(3, 2, dtype=I32), device)
    assert out[2].tolist() == [3, 0, 0, 0] and out[3].tolist() == [3, 0, 0, 0]
    check(out, expected, weights, known)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows_per_rank", lambda x: 9, "rows_per_rank must be at most 8"),
        ("x", lambda x: x.repeat(1, 2), "bytes of a row of x must be at most 128"),
        ("topk_weights", lambda x: x[:, :1], "topk_weights"),
        ("placement", lambda x: x[:1], "placement"),
        ("held", lambda x: x.repeat(2), r"len\(held\) must be at most 4"),
        ("state", lambda x: x[:-1], "state"),
        ("scale", lambda x: torch.ones(1), "scale must be None"),
    ],
)
def test_sizes_that_do_not_fit(name, change, message, device):
    call = called("symmetric_send_batched", device)[0]
    value = change(call[name])
    value = value.to(device) if torch.is_tensor(value) else value
    with pytest.raises(ValueError, match=message):
        ops.symmetric_send_batched(**{**call, name: value})
