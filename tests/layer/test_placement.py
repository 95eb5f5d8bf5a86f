"""Parallel configs, expert maps, names of a checkpoint, hidden sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_ops
from moe_ops import FusedMoEParallelConfig
from moe_ops.parallel import determine_expert_ranks

I32, I64, BF16 = torch.int32, torch.int64, torch.bfloat16


def test_groups_of_the_model_become_groups_of_the_layer():
    make = FusedMoEParallelConfig.make
    assert make(4, 1) == FusedMoEParallelConfig(tp_size=4, tp_rank=1)
    assert make(2, 1, 3, 2, 2, 1, sp_size=2) == FusedMoEParallelConfig(
        tp_size=12, tp_rank=11, dp_size=3, dp_rank=2, pcp_size=2, sp_size=2
    )
    config = make(2, 0, 4, 3, enable_expert_parallel=True, enable_eplb=True)
    assert config == FusedMoEParallelConfig(
        dp_size=4, dp_rank=3, ep_size=8, ep_rank=6, use_ep=True, enable_eplb=True
    )
    assert config.use_all2all_kernels and not config.is_sequence_parallel
    assert make(enable_expert_parallel=True) == FusedMoEParallelConfig()
    assert hash(config) == hash(make(2, 0, 4, 3, enable_expert_parallel=True, enable_eplb=True))


@given(sizes=st.tuples(*[st.integers(1, 4)] * 3), ep=st.booleans())
def test_every_rank_is_somebody(sizes, ep):
    tp, dp, pcp = sizes
    configs = [
        FusedMoEParallelConfig.make(tp, t, dp, d, pcp, p, enable_expert_parallel=ep)
        for t in range(tp)
        for d in range(dp)
        for p in range(pcp)
    ]
    ranks = [c.ep_rank if c.use_ep else c.tp_rank for c in configs]
    assert sorted(ranks) == list(range(tp * dp * pcp))
    assert all(c.tp_size * c.ep_size == tp * dp * pcp for c in configs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"dp_size": 2, "dp_rank": 2}, r"dp_rank must be in 0..1, got 2"),
        ({"tp_rank": -1}, r"tp_rank must be in 0..0, got -1"),
        ({"sp_size": 0}, "sp_size must be at least 1"),
        ({"ep_size": 2}, "ep_size must be 1 without use_ep, got 2"),
        ({"all2all_backend": "post"}, "all2all_backend must be one of .* got 'post'"),
    ],
)
def test_impossible_configs(fields, message):
    with pytest.raises(ValueError, match=message):
        FusedMoEParallelConfig(**fields)


def test_known_expert_maps():
    assert moe_ops.parallel.determine_expert_map(1, 0, 9) == (9, None, None)
    local, expert_map, mask = moe_ops.parallel.determine_expert_map(2, 0, 9, "round_robin")
    assert (local, expert_map.dtype, mask.dtype) == (5, I32, I32)
    assert expert_map.tolist() == [0, -1, 1, -1, 2, -1, 3, -1, 4]
    assert moe_ops.parallel.get_compressed_expert_map(expert_map) == "0->0, 1->2, 2->4, 3->6, 4->8"
    local, expert_map, mask = moe_ops.parallel.determine_expert_map(
        4, 1, 10, num_fused_shared_experts=2
    )
    assert (local, expert_map.tolist()) == (3, [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1])
    assert mask.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert determine_expert_ranks(4, 10).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert determine_expert_ranks(1, 2).tolist() == [0, 0]
    with pytest.raises(ValueError, match="ep_size must be at least 1, got 0"):
        determine_expert_ranks(0, 2)


@given(
    ep_size=st.integers(2, 9),
    num_experts=st.integers(1, 40),
    strategy=st.sampled_from(("linear", "round_robin")),
)
def test_every_expert_has_one_rank(ep_size, num_experts, strategy):
    held = []
    ranks = determine_expert_ranks(ep_size, num_experts, strategy)
    assert (ranks.dtype, ranks.shape) == (I32, (num_experts,))
    for rank in range(ep_size):
        local, expert_map, _ = moe_ops.parallel.determine_expert_map(
            ep_size, rank, num_experts, strategy
        )
        assert local == num_experts // ep_size + (rank < num_experts % ep_size)
        mine = (expert_map >= 0).nonzero().flatten()
        assert expert_map[mine].tolist() == list(range(local))
        held.append(mine.tolist())
        assert (ranks == rank).nonzero().flatten().tolist() == held[-1]
    assert sorted(sum(held, [])) == list(range(num_experts))
    if strategy == "linear":
        assert sum(held, []) == list(range(num_experts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 8), "ep_size must be at least 1, got 0"),
        ((2, 2, 8), "ep_rank must be in 0..1, got 2"),
        ((2, 0, 0), "global_num_experts must be at least 1"),
        ((2, 0, 8, "dice"), "expert_placement_strategy must be one of .* got 'dice'"),
        ((2, 0, 8, "linear", -1), "num_fused_shared_experts must be at least 0"),
    ],
)
def test_expert_map_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        moe_ops.parallel.determine_expert_map(*arguments)


def test_remap():
    expert_map = torch.tensor([-1, 0, 1, -1], dtype=I32)
    ids = torch.tensor([[1, 0], [-1, 2], [4, 3]])
    local = moe_ops.parallel.remap_topk_to_local(ids, expert_map, I32)
    assert local.dtype == I32 and local.tolist() == [[0, -1], [-1, 1], [-1, -1]]
    assert moe_ops.parallel.remap_topk_to_local(ids.int(), expert_map, I64).dtype == I64
    with pytest.raises(ValueError, match="dtype must be one of"):
        moe_ops.parallel.remap_topk_to_local(ids, expert_map, torch.int16)


def test_names_of_a_checkpoint():
    with pytest.raises(TypeError, match="ckpt_down_proj_name must be a str, got NoneType"):
        moe_ops.parallel.make_expert_params_mapping("gate_proj", None, "up_proj", 3)
    mapping = moe_ops.parallel.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 3, 2)
    assert len(mapping) == 3 * 5
    assert mapping[:3] == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
    ]
    assert mapping[-3:] == [
        ("experts.w13_", "experts.1.gate_proj.", 4, "w1"),
        ("experts.w2_", "experts.1.down_proj.", 4, "w2"),
        ("experts.w13_", "experts.1.up_proj.", 4, "w3"),
    ]
    wrapped = moe_ops.parallel.make_expert_params_mapping("w1", "w2", "w3", 2, 4)
    assert [name for _, name, _, shard in wrapped if shard == "w1"] == [
        f"experts.{i}.w1." for i in (0, 1, 0, 1, 0, 1)
    ]


@pytest.mark.parametrize(
    ("hidden", "backend", "scheme", "expected"),
    [
        (2880, "allgather_reducescatter", None, 2880),
        (2880, "deepep_high_throughput", None, 3072),
        (2880, "deepep_low_latency", None, 3072),
        (7168, "deepep_low_latency", None, 7168),
        (100, "deepep_low_latency", None, 2048),
        (2880, "allgather_reducescatter", "mxfp4_w4a16", 2944),
        (2880, "allgather_reducescatter", "mxfp4_mxfp8", 3072),
        (2880, "allgather_reducescatter", "fp8_channel", 2880),
    ],
)
def test_hidden_sizes(hidden, backend, scheme, expected):
    if scheme is not None and scheme not in moe_ops.SCHEMES:
        pytest.skip(f"no scheme {scheme}")
    config = None if scheme is None else moe_ops.FusedMoEQuantConfig(scheme)
    parallel = FusedMoEParallelConfig(dp_size=2, ep_size=2, use_ep=True, all2all_backend=backend)
    assert moe_ops.parallel.maybe_roundup_hidden_size(hidden, BF16, config, parallel) == expected


def test_hidden_sizes_past_deepep():
    parallel = FusedMoEParallelConfig(
        dp_size=2, ep_size=2, use_ep=True, all2all_backend="deepep_low_latency"
    )
    with pytest.raises(ValueError, match="hidden_size must be at most 8192.*got 8193"):
        moe_ops.parallel.maybe_roundup_hidden_size(8193, BF16, None, parallel)


def test_initial_placement():
    assert moe_ops.parallel.initial_physical_to_logical_map(4, 2, 3).tolist() == [0, 1, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="multiple of ep_size = 4, got 6"):
        moe_ops.parallel.initial_physical_to_logical_map(4, 2, 4)
