"""Where replicas go, moving experts there in place, and what that is worth."""

import re
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import python

import moe_ops
from moe_ops import EplbState, FusedMoEParallelConfig
from moe_ops.parallel import eplb_state, imbalance, simulate_balance
from moe_ops.parallel.moves import STAGING, check_apart, plan_moves

I32, I64, BF16 = torch.int32, torch.int64, torch.bfloat16
DEEPSEEK = torch.tensor(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
     [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)  # fmt: skip


def test_known_placement(device):
    phy2log, log2phy, logcnt = moe_ops.parallel.rebalance_experts(DEEPSEEK.to(device), 16, 4, 2, 8)
    assert phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert log2phy.shape == (2, 12, 2) and phy2log.device.type == torch.device(device).type
    assert log2phy[0, 5].tolist() == [0, 2] and log2phy[1, 0].tolist() == [13, -1]
    assert logcnt[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]


def test_the_example_balances_and_keeps_the_result():
    run = python("import runpy; runpy.run_path('examples/load_balancing.py', run_name='__main__')")
    assert run.returncode == 0, run.stderr
    first, balanced, change = map(float, re.findall(r"\d+\.\d\d", run.stdout))
    assert balanced < 1.1 < first and change < 0.1


@st.composite
def loads(draw):
    """Loads, and numbers that divide each other: groups may or may not go round on the nodes."""
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_nodes, gpus_of_a_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts, num_gpus = num_groups * group_size, num_nodes * gpus_of_a_node
    least = -(-num_experts // num_gpus)
    num_replicas = num_gpus * draw(st.integers(least, least + 3))
    layers = draw(st.integers(0, 3))
    row = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    weight = torch.tensor(draw(st.lists(row, min_size=layers, max_size=layers)), dtype=I64)
    return weight.view(layers, num_experts), num_replicas, num_groups, num_nodes, num_gpus


@given(case=loads())
def test_placements(case):
    weight, num_replicas, num_groups, num_nodes, num_gpus = case
    layers, num_experts = weight.shape
    phy2log, log2phy, logcnt = moe_ops.parallel.rebalance_experts(*case)
    assert phy2log.shape == (layers, num_replicas) and logcnt.shape == (layers, num_experts)
    assert phy2log.dtype == log2phy.dtype == logcnt.dtype == I64
    assert (logcnt >= 1).all() and (logcnt.sum(1) == num_replicas).all()
    for layer in range(layers):
        for expert in range(num_experts):
            held = (phy2log[layer] == expert).nonzero().flatten().tolist()
            pads = log2phy.shape[2] - len(held)
            assert logcnt[layer, expert] == len(held)
            assert log2phy[layer, expert].tolist() == held + [-1] * pads
        # More replicas never go to an expert whose replicas each carry less.
        share = weight[layer] / logcnt[layer]
        if num_groups % num_nodes:
            again = logcnt[layer] > 1
            before = weight[layer] / (logcnt[layer] - 1)
            assert not again.any() or before[again].min() >= share.max()
        else:
            node = torch.arange(num_replicas) // (num_replicas // num_nodes)
            group = phy2log[layer] // (num_experts // num_groups)
            for n in range(num_nodes):
                assert len(group[node == n].unique()) == num_groups // num_nodes


def test_equal_loads_stay_equal():
    phy2log, _, _ = moe_ops.parallel.rebalance_experts(torch.ones(1, 8), 8, 1, 1, 4)
    assert phy2log[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]  # ties go to the lower index
    phy2log, _, logcnt = moe_ops.parallel.rebalance_experts(
        torch.full((1, 4), 0.5).half(), 8, 1, 1, 4
    )
    assert logcnt.tolist() == [[2, 2, 2, 2]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((DEEPSEEK, 15, 4, 2, 8), ValueError, "num_replicas must be a multiple of num_gpus = 8"),
        ((DEEPSEEK, 8, 4, 2, 8), ValueError, "num_replicas must be at least the 12 experts"),
        ((DEEPSEEK, 16, 5, 2, 8), ValueError, "must be a multiple of num_groups = 5, got 12"),
        ((DEEPSEEK, 16, 4, 3, 8), ValueError, "num_gpus must be a multiple of num_nodes = 3"),
        ((DEEPSEEK, 16, 4, 0, 8), ValueError, "num_nodes must be at least 1"),
        ((-DEEPSEEK, 16, 4, 2, 8), ValueError, "finite and not negative, got -90"),
        ((DEEPSEEK / 0, 16, 4, 2, 8), ValueError, "finite and not negative, got inf"),
        ((DEEPSEEK[0], 16, 4, 2, 8), ValueError, "weight must have 2 axes"),
        ((DEEPSEEK.bool(), 16, 4, 2, 8), TypeError, "weight must have a dtype"),
    ],
)
def test_rebalance_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        moe_ops.parallel.rebalance_experts(*arguments)


def test_logical_maps_skip_empty_places():
    maps, count = moe_ops.parallel.compute_logical_maps(
        torch.tensor([-1, 1, 1, -1, 0], dtype=I32), 3, 4
    )
    assert maps.tolist() == [[4, -1, -1, -1], [1, 2, -1, -1], [-1] * 4]
    assert count.tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="max_replicas must be at least 2, got 1"):
        moe_ops.parallel.compute_logical_maps(torch.tensor([0, 0]), 1, 1)
    with pytest.raises(ValueError, match="max_replicas must be at least 1, got 0"):
        moe_ops.parallel.compute_logical_maps(torch.tensor([0]), 1, 0)
    with pytest.raises(ValueError, match="below num_logical_experts = 2, got 2"):
        moe_ops.parallel.compute_logical_maps(torch.tensor([0, 2]), 2)


@st.composite
def placements(draw):
    """Two placements with replicas and empty places, the new one of experts that the old has."""
    old = draw(st.lists(st.integers(-1, 12), min_size=1, max_size=24))
    held = sorted({expert for expert in old if expert >= 0} | {-1})
    new = draw(
        st.permutations(old) | st.lists(st.sampled_from(held), min_size=len(old), max_size=len(old))
    )
    return old, list(new)


@given(case=placements())
def test_moved_experts(case):
    old, new = case
    rows = torch.tensor(old).float()
    weights = [
        rows[:, None, None].expand(-1, 3, 2).contiguous().to(BF16),
        rows.to(torch.uint8),
        rows[:, None].expand(-1, 4).contiguous().to(torch.float8_e4m3fn),
        rows[:, None].expand(-1, 4).t().contiguous().t(),
    ]
    before = [(w.data_ptr(), w.clone()) for w in weights]
    moe_ops.parallel.move_experts(weights, torch.tensor(old), torch.tensor(new))
    for weight, (address, was) in zip(weights, before, strict=True):
        assert weight.data_ptr() == address
        for row, expert in enumerate(new):
            source = row if expert < 0 else old.index(expert)
            assert torch.equal(weight[row].float(), was[source].float())


@given(case=placements())
def test_moves_are_few(case):
    """What stays is not copied, everything else once, and one staged copy a cycle at most."""
    old, new = case
    moves = plan_moves(old, new)
    written = [move.target for move in moves if move.target != STAGING]
    changed = [row for row, expert in enumerate(new) if expert >= 0 and expert != old[row]]
    assert sorted(written) == changed
    assert 2 * (len(moves) - len(written)) <= len(changed)


def test_a_swap_is_staged():
    assert plan_moves([0, 1], [1, 0]) == [(STAGING, 0), (0, 1), (1, STAGING)]
    assert plan_moves([0, 1, 1], [1, 0, 1])[0] != (STAGING, 0)  # a replica has room


def test_parameters_that_require_grad_are_moved():
    weight = torch.nn.Parameter(torch.arange(3.0)[:, None])
    moe_ops.parallel.move_experts([weight], torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]))
    assert weight.flatten().tolist() == [2.0, 0.0, 1.0] and weight.is_leaf


def test_move_errors():
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="experts of old_phy2log only, got 2"):
        moe_ops.parallel.move_experts([torch.zeros(2, 1)], two, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"len\(weights\[0\]\) must be len\(old_phy2log\) = 2"):
        moe_ops.parallel.move_experts([torch.zeros(3, 1)], two, two)
    with pytest.raises(TypeError, match="new_phy2log must have a dtype"):
        moe_ops.parallel.move_experts([], two, two.float())


@given(
    experts=st.integers(1, 12), redundant=st.integers(0, 6), layers=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_load_is_conserved_and_ids_land_on_replicas(experts, redundant, layers, seed):
    """Over three rebalances: every id on a replica of its expert, every slot counted once."""
    state = EplbState.make(layers, experts, redundant)
    weights = [[state.physical_to_logical_map[layer].clone()] for layer in range(layers)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        routed = torch.zeros(layers, experts, dtype=I64)
        for layer in range(layers):
            ids = torch.randint(0, experts, (17, 2), generator=generator)
            ids = torch.minimum(ids, torch.randint(0, experts, (17, 1), generator=generator))
            placement, load, maps, count = (x[layer] for x in state)
            physical = moe_ops.parallel.eplb_map_to_physical_and_record(ids, load, maps, count)
            assert torch.equal(placement[physical], ids)
            routed[layer] = ids.flatten().bincount(minlength=experts)
        assert torch.equal(state.logical_load(), routed)
        assert torch.equal(state.expert_load.sum(1), routed.sum(1))
        state.rebalance_(weights, 1, 1, 1)
        for layer, (weight,) in enumerate(weights):
            assert torch.equal(weight, state.physical_to_logical_map[layer])


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_balancing_is_worth_it(exponent):
    plain = simulate_balance(2048, 64, 4, 0, 8, exponent=exponent)
    spread = simulate_balance(2048, 64, 4, 16, 8, exponent=exponent)
    assert plain.before.sum() == spread.after.sum() == 2048 * 4
    assert imbalance(spread.after) < 1.15 < imbalance(plain.before)


def test_loads_that_have_wrapped_are_refused():
    """Replicas of one expert may hide it: their sum is positive again. Loads add up in int64."""
    state, weights = EplbState.make(1, 4, 4, 2), [[torch.arange(8.0)[:, None]]]
    state.expert_load.fill_(2**31 - 1)
    assert state.logical_load().tolist() == [[2 * (2**31 - 1)] * 4]
    state.expert_load[0, 0] = -5
    before = [x.clone() for x in (*state, weights[0][0])]
    for call in (state.logical_load, lambda: state.rebalance_(weights, 1, 1, 2)):
        with pytest.raises(ValueError, match="expert_load must not be negative .* got 1 negative"):
            call()
    assert all(map(torch.equal, before, (*state, weights[0][0])))


def test_rebalancing_a_wrong_number_of_layers():
    with pytest.raises(ValueError, match=r"len\(weights\) must be the number of layers = 2, got 1"):
        EplbState.make(2, 4, 0).rebalance_([[]], 1, 1, 1)


def test_arguments_are_named():
    cases = [
        (lambda: EplbState.make(-1, 8, 2), ValueError, "num_layers must be at least 0, got -1"),
        (lambda: EplbState.make("1", 8, 2), TypeError, "num_layers must be an int, got str '1'"),
        (lambda: EplbState.make(1, 8, 2, device="nope"), ValueError, "device must be a torch.dev"),
        (lambda: EplbState.make(1, 8, 0).rebalance_(None, 1, 1, 1), TypeError, "weights must be a"),
        (lambda: FusedMoEParallelConfig.of_mesh("x"), TypeError, "mesh must be a DeviceMesh, got"),
        (lambda: simulate_balance(-1, 8, 2, 0, 2), ValueError, "num_tokens must be at least 0"),
        (lambda: simulate_balance(4, 8.0, 2, 0, 2), TypeError, "num_experts must be an int"),
        (lambda: simulate_balance(4, 8, 2, 0, 2, exponent=torch.nan), ValueError, "exponent must"),
        (lambda: simulate_balance(4, 8, 2, 0, 2, seed="x"), TypeError, "seed must be an int"),
    ]  # fmt: skip
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
    assert imbalance(torch.zeros(3)) == 1 == imbalance(simulate_balance(0, 8, 2, 0, 2).after)


def state_and_weights():
    state = EplbState.make(2, 4, 2, ep_size=2)
    state.expert_load.copy_(torch.tensor([[9, 1, 1, 1, 0, 0], [1, 1, 9, 1, 0, 0]]))
    weights = [[p[:, None] + 0.5, p.clone()] for p in state.physical_to_logical_map]
    return state, weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[1].append(torch.zeros(5)), r"len\(weights\[1\]\[2\]\) must be .* = 6, got 5"),
        (
            lambda w: w[1].append(w[0][0]),
            r"weights\[1\]\[2\] must share no memory with weights\[0\]",
        ),
        (lambda w: w[1].append(w[1][1].view(6, 1)), r"weights\[1\]\[2\] must share no memory with"),
        (lambda w: w[1].append(torch.zeros(6, 1).expand(6, 3)), "must hold each element once, got"),
        (lambda w: w[1].append(None), r"weights\[1\]\[2\] must be a Tensor, got NoneType"),
    ],
)
def test_a_rebalance_that_is_refused_changes_nothing(change, message):
    state, weights = state_and_weights()
    change(weights)
    before = [x.clone() for x in (*state, *weights[0], *weights[1][:2])]
    with pytest.raises((TypeError, ValueError), match=message):
        state.rebalance_(weights, 1, 1, 2)
    after = (*state, *weights[0], *weights[1][:2])
    assert all(map(torch.equal, before, after))


def test_a_layer_s_maps_follow_its_weights(monkeypatch):
    """What fails in one layer leaves the layers before it moved, maps and weights alike."""
    state, weights = state_and_weights()
    apply, calls = eplb_state.apply_moves, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        apply(*arguments)

    old = state.physical_to_logical_map.clone()
    monkeypatch.setattr(eplb_state, "apply_moves", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        state.rebalance_(weights, 1, 1, 2)
    assert not torch.equal(state.physical_to_logical_map[0], old[0])
    for layer, (_, held) in enumerate(weights):
        assert torch.equal(held, state.physical_to_logical_map[layer])
        for expert, places in enumerate(state.logical_to_physical_map[layer]):
            assert (held[places[places >= 0]] == expert).all()


def test_slices_of_one_tensor_are_moved_once():
    """Views that share storage, but no element: halves of rows, and tensors in a flat buffer."""
    whole = torch.arange(12.0).view(3, 4)
    flat = torch.arange(6.0)
    weights = [whole[:, :2], whole[:, 2:], flat[:3], flat[3:]]
    moe_ops.parallel.move_experts(weights, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]))
    assert torch.equal(whole, torch.arange(12.0).view(3, 4)[[2, 0, 1]])
    assert flat.tolist() == [2, 0, 1, 5, 3, 4]
    with pytest.raises(ValueError, match=r"weights\[1\] must share no memory with weights\[0\]"):
        moe_ops.parallel.move_experts(
            [whole[:, :3], whole[:, 2:]], torch.arange(3), torch.arange(3)
        )


def test_every_overlap_of_views():
    """Two views of one buffer share memory if writing to one changes the other."""
    wrong = []
    shapes = [(torch.int16, 4), (torch.int16, 3), (torch.uint8, 8), (torch.uint8, 4)]
    shapes = [(*shape, width) for shape in shapes for width in range(1, shape[1] + 1)]
    for own, (dtype, step, other), start in product(range(1, 5), shapes, range(24)):
        buffer = torch.zeros(64, dtype=torch.uint8)
        first = buffer[8:].view(torch.int16).as_strided((3, own), (4, 1))
        start -= start % dtype.itemsize
        second = buffer[start:].view(dtype).as_strided((3, other), (step, 1))
        first.fill_(-1)
        shares, is_refused = bool(second.any()), False
        try:
            check_apart({"first": first, "second": second})
        except ValueError:
            is_refused = True
        if is_refused < shares or (is_refused > shares and step * dtype.itemsize == 8):
            wrong.append((own, dtype, step, other, start))
    assert not wrong


def test_weights_that_are_moved_together():
    """A third tensor that overlaps the first; empty ones, and an axis of one element."""
    rows = torch.arange(12.0).view(3, 4)
    with pytest.raises(ValueError, match="must share no memory"):
        check_apart({"a": rows[:, :3], "b": rows[:, 3:], "c": rows[2:, 1:2]})
    one = torch.arange(3.0).as_strided((3, 1), (1, 0))
    weights = [torch.empty(3, 0), torch.empty(3, 0, dtype=BF16), one]
    moe_ops.parallel.move_experts(weights, torch.arange(3), torch.tensor([2, 0, 1]))
    assert one.flatten().tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EplbState.make(1, 4, 4), r"expert_load_view.shape\[1\] must be .* = 6, got 8"),
        (
            lambda: EplbState.make(1, 6, 0),
            r"logical_to_physical_map.shape\[1\] must be .* = 4, got 6",
        ),
        (lambda: placed(0, 6), r"logical_to_physical_map must be in 0..5, .* got 6"),
        (lambda: placed(1, -1), r"logical_to_physical_map must be in 0..5, .* got -1"),
        (lambda: counted(0), r"logical_replica_count must be in 1..3, got 0"),
        (lambda: counted(4), r"logical_replica_count must be in 1..3, got 4"),
    ],
)
def test_a_layer_takes_no_placement_of_other_experts(make, message):
    """Slots sent to experts that it lacks would silently add zeros."""
    layer = moe_ops.FusedMoE(4, 2, 8, 8, enable_eplb=True, num_redundant_experts=2)
    layer.set_eplb_state(0, *EplbState.make(1, 4, 2)[1:])
    with pytest.raises(ValueError, match=message):
        layer.set_eplb_state(0, *make()[1:])


def placed(expert, physical):
    state = EplbState.make(1, 4, 2)
    state.logical_to_physical_map[0, expert, 0] = physical
    return state


def counted(count):
    state = EplbState.make(1, 4, 2)
    state.logical_replica_count[0, 2] = count
    return state
