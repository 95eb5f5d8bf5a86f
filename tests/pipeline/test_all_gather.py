"""`AllGatherPrepareAndFinalize` over two and four processes, against one rank with all tokens."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from compilations import Compilations
from modular import layer_config, setup, twice
from modular import roundings as rounds
from ranks import config_of, experts_of, mine, of_all_ranks, spawn

import moe_ops
from moe_ops.pipeline.calls import Pending
from moe_ops.pipeline.collectives import RankGroup
from moe_ops.testing import Problem, assert_layer_matches, bounded_oracle, reference_experts

SCHEMES = (
    "unquantized", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block128",
    "int8_channel", "int8_tensor", "int4_w4a16_g32", "mxfp4_w4a16", "mxfp4_mxfp8", "nvfp4",
)  # fmt: skip
COUNTS = {2: (7, 4), 4: (5, 0, 1, 5)}
PROBLEM = Problem(11, 6, 3, 64, 48, torch.bfloat16)


def kernel_of(s, rank, ranks, part, kind=moe_ops.TritonExperts, **options):
    """A rank's kernel around a prepare-finalize, and the arguments that are not tokens."""
    held, expert_map = experts_of(rank, ranks, s.problem.num_experts)
    experts = kind(layer_config(s.problem), config_of(s.config, held))
    kernel = moe_ops.FusedMoEKernel(part, experts, **options)
    weights = {"w1": s.inputs.w1[held], "w2": s.inputs.w2[held], "expert_map": expert_map}
    return kernel, s.arguments(**weights)


def part_of(arguments, tokens):
    """The arguments for some tokens."""
    names = ("hidden_states", "topk_weights", "topk_ids")
    return {**arguments, **{name: arguments[name][tokens] for name in names}}


def in_one_process(s, ranks, kind=moe_ops.TritonExperts):
    """What ranks compute: rows quantized from all tokens, float32 sums of ranks in their order."""
    total = None
    for rank in range(ranks):
        part = moe_ops.MoEPrepareAndFinalizeNoEP()
        kernel, arguments = kernel_of(s, rank, ranks, part, kind)
        call = moe_ops.Call(**arguments)
        experts = kernel.fused_experts
        on_input = s.problem.on_input and not experts.applies_router_weight_on_input
        prepared = part.prepare(
            call.hidden_states, call.topk_weights, call.topk_ids, s.problem.num_experts, None,
            on_input, experts.quant_config, experts.expects_unquantized_inputs,
        )  # fmt: skip
        _, rows = kernel.run_experts(call, Pending(None, lambda p=prepared: p))
        sums = kernel.start_finalize(call, rows).wait().float()
        total = sums if total is None else total + sums
    return total.to(s.problem.dtype)


def reference(s, ranks, where):
    """`reference_experts` with the roundings of several ranks: their sums are rounded too."""
    total = 0.0
    for rank in range(ranks):
        held, expert_map = experts_of(rank, ranks, s.problem.num_experts)
        w1, w2 = s.inputs.w1[held], s.inputs.w2[held]
        own = s.inputs._replace(w1=w1, w2=w2, expert_map=expert_map)
        total = total + reference_experts(s.problem, own, config_of(s.config, held), where).float()
    return total.to(s.problem.dtype)


def check_schemes(rank, ranks):
    tokens = mine(COUNTS[ranks], rank)
    cases = [(PROBLEM.with_(scheme=name), moe_ops.TritonExperts) for name in SCHEMES]
    on_input = PROBLEM.with_(on_input=True)
    for name in ("unquantized", "fp8_tensor", "fp8_block128"):
        cases.append((on_input.with_(scheme=name), moe_ops.TritonExperts))
        cases.append((on_input.with_(scheme=name, top_k=1), moe_ops.TritonExperts))
        cases.append((on_input.with_(scheme=name), moe_ops.GroupedGemmExperts))
        cases.append((PROBLEM.with_(scheme=name, has_bias=True), moe_ops.GroupedGemmExperts))
    for problem, kind in cases:
        s = setup(problem, kind)
        part = moe_ops.AllGatherPrepareAndFinalize()
        kernel, arguments = kernel_of(s, rank, ranks, part, kind)
        assert kernel.output_is_reduced() and part.num_dispatchers() == ranks
        own = part_of(arguments, tokens)
        out = kernel.apply(**own)
        assert out.shape == own["hidden_states"].shape and out.dtype == torch.bfloat16
        whole = of_all_ranks(out, ranks)
        where = f"{problem} {kind.__name__}"
        if rank == 0:
            assert torch.equal(whole, in_one_process(s, ranks, kind)), where
            roundings = rounds(kind, problem)
            exact = bounded_oracle(problem, s.exact, s.config, roundings)
            assert_layer_matches(whole, exact, reference(s, ranks, roundings))
        # more room than tokens, chunks, shared experts, and a stream of its own are the same bits
        padded = moe_ops.AllGatherPrepareAndFinalize(dist.group.WORLD, 9)
        assert torch.equal(kernel_of(s, rank, ranks, padded, kind)[0].apply(**own), out), where
        inner = moe_ops.AsyncPrepareAndFinalize(part)
        kernel = kernel_of(s, rank, ranks, inner, kind, shared_experts=twice)[0]
        shared, routed = kernel.apply(**own)
        assert torch.equal(routed, out) and torch.equal(shared, 2 * own["hidden_states"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_one_rank(ranks):
    spawn(check_schemes, ranks)
