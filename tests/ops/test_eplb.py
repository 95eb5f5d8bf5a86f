"""Mapping to physical experts: the hash rule, what is counted, compiled and captured."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import topk_ids
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops import EplbState
from moe_ops.parallel import eplb_map_to_physical_and_record

I32, I64 = torch.int32, torch.int64


def expected(ids, num_physical, replicas, counts, *, limit=None, seed=0):
    """The rule, slot by slot, in Python's integers."""
    num_experts, width = replicas.shape
    load, out = [0] * num_physical, []
    for token, row in enumerate(ids.tolist()):
        hashed = (token + seed) * 2654435769 & 0xFFFFFFFF
        out.append([])
        for expert in row:
            physical = -1
            if 0 <= expert < num_experts:
                count = min(max(int(counts[expert]), 1), width)
                physical = int(replicas[expert, hashed % count])
            out[-1].append(physical)
            if 0 <= physical < num_physical and (limit is None or token < limit):
                load[physical] += 1
    return out, load


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("replicas", "counts", "ids", "physical"),
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], [2] * 4, [[0, 1], [2, 3], [0, 2]],
         [[0, 1], [6, 7], [0, 2]]),
        ([[0, 3, 5, 7], [1, 4, -1, -1], [2, 6, -1, -1]], [4, 2, 2], [[0, 1], [2, 0], [1, 2]],
         [[0, 1], [6, 3], [1, 2]]),
    ],
)  # fmt: skip
def test_known_vectors(replicas, counts, ids, physical, device):
    load = torch.zeros(8, dtype=I32, device=device)
    replicas, counts, ids = (torch.tensor(x, device=device) for x in (replicas, counts, ids))
    seven = torch.tensor(7, device=device)  # any number but 0 counts
    out = eplb_map_to_physical_and_record(ids, load, replicas, counts, record_enabled=seven)
    assert out.tolist() == physical
    assert load.tolist() == torch.tensor(physical).flatten().bincount(minlength=8).tolist()


@st.composite
def cases(draw):
    """Ids, a placement with holes and wrong entries, and what is counted."""
    ids, num_experts = draw(topk_ids(max_tokens=300))
    num_physical, width = draw(st.integers(1, num_experts + 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from((I32, I64)))
    replicas = torch.randint(-1, num_physical + 2, (num_experts, width), generator=generator)
    counts = torch.randint(0, width + 2, (num_experts,), generator=generator)
    limit = draw(st.none() | st.integers(0, 320))
    return ids, num_physical, replicas.to(dtype), counts.to(dtype), limit


@pytest.mark.kernel
@given(
    case=cases(),
    enabled=st.sampled_from((None, True, False, torch.tensor([7]), torch.tensor(0, dtype=I32))),
    load_dtype=st.sampled_from((I32, I64)),
    indices_type=st.sampled_from((None, I32, I64)),
    seed=st.sampled_from((0, 1, 12345, 2**31 - 1)),
    step=st.sampled_from(
        (None, torch.tensor(3), torch.tensor([2**31 - 1], dtype=I32), torch.tensor([[2**40 + 5]]))
    ),
)
def test_any_placement(case, enabled, load_dtype, indices_type, seed, step, device):
    ids, num_physical, replicas, counts, limit = case
    start = seed if step is None else seed + int(step)
    physical, new_load = expected(ids, num_physical, replicas, counts, limit=limit, seed=start)
    record = enabled is None or bool(enabled)
    room = torch.arange(num_physical + 2, dtype=load_dtype, device=device)
    load, before = (
        room[:num_physical],
        room.cpu().clone(),
    )  # what is behind it belongs to somebody else
    out = eplb_map_to_physical_and_record(
        ids.to(device), load, replicas.to(device), counts.to(device), indices_type,
        record_enabled=None if enabled is None else torch.as_tensor(enabled, device=device),
        num_unpadded_tokens=None if limit is None else torch.tensor(limit, device=device),
        seed=seed, step=None if step is None else step.to(device),
    )  # fmt: skip
    assert out.dtype == (indices_type or ids.dtype)
    assert out.shape == ids.shape and out.is_contiguous()
    assert out.tolist() == physical
    new_load = torch.tensor([*new_load, 0, 0]).to(load_dtype) * record
    assert torch.equal(room.cpu() - before, new_load)


@pytest.mark.kernel
def test_padding_is_not_counted(device):
    """The tokens from ``num_unpadded_tokens`` on; they are mapped as the others are."""
    ids = torch.tensor([[0, 1]] * 4, device=device)
    load = torch.zeros(2, dtype=I32, device=device)
    places = torch.tensor([[1], [0]], device=device)
    counts = torch.ones(2, dtype=I64, device=device)
    limit = torch.tensor([3], device=device)
    out = eplb_map_to_physical_and_record(ids, load, places, counts, num_unpadded_tokens=limit)
    assert out.tolist() == [[1, 0]] * 4 and load.tolist() == [3, 3]


@pytest.mark.kernel
def test_ids_that_only_look_valid_in_32_bits(device):
    ids = torch.tensor([[2**32, -(2**32)], [2**33 + 1, 1]], device=device)
    load = torch.zeros(2, dtype=I32, device=device)
    out = eplb_map_to_physical_and_record(
        ids, load, torch.tensor([[0], [1]], device=device), torch.ones(2, dtype=I64, device=device)
    )
    assert out.tolist() == [[-1, -1], [-1, 1]] and load.tolist() == [0, 1]


@pytest.mark.kernel
def test_places_and_counts_that_only_look_valid_in_32_bits(device):
    ids = torch.tensor([[0, 1], [0, 1]], device=device)
    load = torch.zeros(2, dtype=I32, device=device)
    places = torch.tensor([[2**32, 1], [2**32 + 1, -(2**32)]], device=device)
    count = torch.tensor([2**32 + 1, 1], device=device)  # taken as R = 2, not as 1
    out = eplb_map_to_physical_and_record(ids, load, places, count, indices_type=I32)
    assert out.tolist() == [[2**31 - 1, 2**31 - 1], [1, 2**31 - 1]] and load.tolist() == [0, 1]


@pytest.mark.kernel
def test_a_count_ends_at_the_largest_number(device):
    """It neither wraps nor takes its neighbours along; int64 goes on."""
    ids = torch.tensor([[0, 1]] * 600, device=device)
    places, counts = (torch.tensor(x, device=device) for x in ([[2], [0], [1]], [1, 1, 1]))
    for dtype, end in ((I32, 2**31 - 1), (I64, 2**31 + 595)):
        load = torch.tensor([3, 7, 2**31 - 5], dtype=dtype, device=device)
        for calls in (1, 2):
            eplb_map_to_physical_and_record(ids, load, places, counts)
            last = end + 600 * (calls - 1) * (dtype == I64)
            assert load.tolist() == [3 + 600 * calls, 7, last]


@pytest.mark.kernel
def test_strided_arguments(device):
    """One layer's column of a load, and transposed ids and maps."""
    load = torch.zeros(4, 3, dtype=I32, device=device)
    ids = torch.tensor([[0, 1, 1], [1, 0, 1]], device=device).t()
    replicas = torch.tensor([[0, 1], [2, 3]], device=device).t()
    counts = torch.tensor([2, 9, 2, 9], device=device)[::2]
    out = eplb_map_to_physical_and_record(ids, load[:, 1], replicas, counts)
    assert out.tolist() == [[0, 1], [3, 2], [1, 1]]
    assert load.tolist() == [[0, 1, 0], [0, 3, 0], [0, 1, 0], [0, 1, 0]]


@pytest.mark.kernel
@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_every_replica_gets_its_share(replicas, k, device):
    """An expert in the same slot of every token; slot number modulo replicas would pick a few."""
    ids = torch.arange(k, device=device).repeat(2048, 1)
    maps = torch.arange(k * replicas, device=device).view(k, replicas)
    load = torch.zeros(k * replicas, dtype=I32, device=device)
    counts = torch.full((k,), replicas, device=device)
    eplb_map_to_physical_and_record(ids, load, maps, counts)
    assert load.sum() == ids.numel()
    assert load.max() / load.double().mean() <= 1.07


def test_seeds_part_ranks_with_one_token_each():
    maps, counts = torch.arange(4).view(1, 4), torch.tensor([4])
    load = torch.zeros(4, dtype=I32)
    for rank in range(64):
        eplb_map_to_physical_and_record(torch.zeros(1, 1, dtype=I32), load, maps, counts, seed=rank)
    assert load.tolist() == [16] * 4


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_once_and_mutates_its_load(backend, device):
    torch._dynamo.reset()
    state = EplbState.make(1, 6, 2, device=device)
    _, load, maps, counts = (x[0] for x in state)
    enabled = torch.ones((), dtype=torch.bool, device=device)

    def layer(ids, load):
        logical = ids + 1  # something for the compiler to move around
        physical = eplb_map_to_physical_and_record(
            logical, load, maps, counts, I64, record_enabled=enabled
        )
        return physical * 2, load.sum()

    counter = CompileCounterWithBackend(backend)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (11, 5, 64, 1, 2, 0, 1024):  # 11: no other size, which dynamo would equate
            enabled.fill_(tokens != 5)
            ids = torch.randint(-2, 6, (tokens, 3), generator=torch.Generator().manual_seed(tokens))
            mine, theirs = load.clone(), load.clone()
            out, total = compiled(ids.to(device), mine)
            eager, eager_total = layer(ids.to(device), theirs)
            assert torch.equal(out, eager) and torch.equal(mine, theirs)
            assert total == eager_total
            assert total == (0 if tokens == 5 else ((ids >= -1) & (ids < 5)).sum())
    assert counter.frame_count == 1


def test_exports(device):
    class Mapping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, load, maps, counts = (x[0] for x in EplbState.make(1, 6, 2, device=device))
            self.register_buffer("load", load)
            self.register_buffer("maps", maps)
            self.register_buffer("counts", counts)

        def forward(self, ids):
            return eplb_map_to_physical_and_record(ids, self.load, self.maps, self.counts)

    module, ids = Mapping(), torch.tensor([[0, 1], [5, 0]], device=device)
    tokens = torch.export.Dim("tokens", min=0)
    program = torch.export.export(module, (ids,), dynamic_shapes=({0: tokens},)).module()
    more = ids.repeat(3, 1)
    out = program(more)  # on the module's own buffers
    assert module.load.sum() == 12
    assert torch.equal(out, module(more))


@pytest.mark.gpu
def test_replays_with_what_the_device_holds():
    state = EplbState.make(1, 6, 2, device="cuda")
    _, load, maps, counts = (x[0] for x in state)
    ids = torch.zeros(40, 2, dtype=I32, device="cuda")
    enabled = torch.ones(1, dtype=I32, device="cuda")
    unpadded = torch.full((1,), 40, dtype=I32, device="cuda")

    def call(load):
        return eplb_map_to_physical_and_record(
            ids, load, maps, counts, record_enabled=enabled, num_unpadded_tokens=unpadded
        )

    call(load)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(load)
    for seed, (flag, tokens) in enumerate([(1, 40), (0, 40), (1, 7), (1, 0)]):
        ids.copy_(torch.randint(0, 6, ids.shape, generator=torch.Generator().manual_seed(seed)))
        enabled.fill_(flag), unpadded.fill_(tokens)
        mine = load.clone()
        graph.replay()
        assert torch.equal(out, call(mine))
        assert torch.equal(load, mine)


def whole_numbers(*shape, device, seed, high=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=g).float().to(device)


def balanced_layer(device, tokens=40):
    """A layer of whole numbers, exact in whatever order they are added, and its state."""
    state = EplbState.make(1, 6, 2, ep_size=4, device=device)
    placement = state.physical_to_logical_map[0]
    w1 = whole_numbers(6, 12, 16, device=device, seed=1)[placement]
    w2 = whole_numbers(6, 16, 12, device=device, seed=2)[placement]
    x = whole_numbers(tokens, 16, device=device, seed=3)
    ids = torch.tensor([[5, 4], [5, 3], [5, 0], [5, 1]], device=device).repeat(tokens // 4, 1)
    weights = torch.full(ids.shape, 0.5, device=device)

    def layer():
        _, load, maps, counts = (x[0] for x in state)
        physical = eplb_map_to_physical_and_record(ids, load, maps, counts)
        return moe_ops.fused_experts(x, w1, w2, weights, physical, activation="relu2_no_mul")

    return state, (w1, w2), layer


@pytest.mark.kernel
def test_a_rebalanced_layer_computes_the_same(device):
    state, weights, layer = balanced_layer(device)
    addresses = [t.data_ptr() for t in (*weights, *state)]
    before = layer()
    assert state.logical_load().tolist() == [[10, 10, 0, 10, 10, 40]]
    state.rebalance_([weights], 1, 1, 4)
    assert state.logical_replica_count[0, 5] > 1
    assert addresses == [t.data_ptr() for t in (*weights, *state)]
    assert not state.expert_load.any()
    assert before.any() and torch.equal(layer(), before)
    assert state.expert_load.view(4, 2).sum(1).max() <= 30  # it was 40


@pytest.mark.gpu
def test_a_captured_layer_goes_on_after_a_rebalance():
    state, weights, layer = balanced_layer("cuda")
    expected = layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
        state.rebalance_([weights], 1, 1, 4)
    assert state.logical_replica_count[0, 5] > 1


GOOD = {
    "topk_ids": torch.zeros(3, 2, dtype=I32),
    "expert_load_view": torch.zeros(4, dtype=I32),
    "logical_to_physical_map": torch.zeros(4, 2, dtype=I64),
    "logical_replica_count": torch.ones(4, dtype=I64),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_ids": torch.zeros(3, 2)}, TypeError, "topk_ids must have a dtype"),
        ({"topk_ids": torch.zeros(3, dtype=I32)}, ValueError, "topk_ids must have 2 axes"),
        ({"expert_load_view": torch.zeros(4)}, TypeError, "expert_load_view must have a dtype"),
        ({"expert_load_view": torch.zeros(0, dtype=I32)}, ValueError, "at least one entry"),
        ({"logical_replica_count": torch.ones(3, dtype=I64)}, ValueError, "number of experts = 4"),
        ({"logical_to_physical_map": torch.zeros(4, 2, dtype=I64, device="meta")}, ValueError,
         "must be on the device of topk_ids"),
        ({"indices_type": torch.int16}, TypeError, "indices_type must be one of"),
        ({"record_enabled": True}, TypeError, "record_enabled must be a Tensor, got bool"),
        ({"record_enabled": torch.ones(2, dtype=I32)}, ValueError, "one number = 1, got 2"),
        ({"num_unpadded_tokens": torch.ones(1)}, TypeError, "num_unpadded_tokens must have"),
        ({"seed": -1}, ValueError, "seed must be in 0"),
        ({"step": 1}, TypeError, "step must be a Tensor, got int"),
        ({"step": torch.ones(1)}, TypeError, "step must have a dtype"),
        ({"step": torch.ones(2, dtype=I64)}, ValueError, "step.* one number = 1, got 2"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        eplb_map_to_physical_and_record(**{**GOOD, **change})
