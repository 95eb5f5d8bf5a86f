"""Expert parallelism on the GPUs of this host: each exchange alone, and whole layers.

One process for each GPU. A time is that of the slowest rank; ranks begin together, for which a
small exchange runs before each timed replay, once all hosts have launched what follows it.
Everything timed is in CUDA graphs, and nothing is kept for a backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import moe_ops
from moe_ops import ops, pipeline
from moe_ops.activation import kind_and_key
from moe_ops.bench.command import (
    Lines,
    Recorder,
    add_names,
    add_scheme_option,
    checked,
    count,
    parser,
    progress,
    with_schemes,
)
from moe_ops.bench.harness import evict_cache, record_path, relative_error
from moe_ops.bench.layer import moe_ops_layer
from moe_ops.bench.problems import Experts, Inputs, Problem, make_experts, make_inputs
from moe_ops.parallel import determine_expert_map, determine_expert_ranks
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.tensors import QTensor

BATCHED, MOST_BATCHED = "symmetric_batched", 128
"""The exchange in the Batched format, which is for few tokens."""
BACKENDS = ("symmetric", "allgather_reducescatter", BATCHED)
CHAIN, REPLAYS, WARM_UPS = 20, 40, 5
"""Exchanges of a graph that times exchanges; timed and untimed replays."""
LAUNCHES = 2_000_000
"""Cycles of a GPU, about 1 ms, in which its host launches a timed replay and the barrier."""
ONE_GPU = "one GPU"
KEY = ("scheme", "shape", "M", "impl", "ranks")
COLUMNS = {
    "shape": 14, "scheme": 13, "M": 6, "impl": 24, "send_us": 8, "return_us": 9, "time_us": 9,
    "tokens_per_s": 12, "rel_err": 8,
}  # fmt: skip


@dataclass(frozen=True)
class RankRow:
    """One measured combination."""

    scheme: str
    shape: str
    M: int
    """Tokens of each rank."""
    impl: str
    """The exchange; or one GPU that holds all experts and computes the tokens of one rank."""
    ranks: int
    time_us: float
    """The whole layer, routed tokens to results."""
    send_us: float | None
    """``prepare`` alone, in a chain."""
    return_us: float | None
    """``finalize`` alone, without the sum over a token's experts on one rank."""
    tokens_per_s: float
    """Tokens of all ranks."""
    rel_err: float
    """Against the one GPU."""


class Rank(NamedTuple):
    """This process."""

    number: int
    ranks: int
    device: torch.device
    barrier: Callable[[], Any]
    """Lets all ranks' streams begin together."""


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command; returns its exit status."""
    args = options(arguments, prog)
    if torch.cuda.device_count() < args.ranks:
        there = torch.cuda.device_count()
        print(f"--ranks {args.ranks} needs as many GPUs, found {there}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run_rank, (args, f"{folder}/store"), nprocs=args.ranks)
    return 0


def options(arguments: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """The command's options."""
    result = parser("Time layers whose experts are spread over GPUs.", "8,64,512,4096", prog=prog)
    add_rank_options(result, BACKENDS)
    add_scheme_option(result)
    return with_schemes(result.parse_args(arguments))


def add_rank_options(command: argparse.ArgumentParser, backends: Sequence[str]) -> None:
    """Add ``--ranks`` and ``--backend``, which takes one or more of these names."""
    number = checked(count)
    command.add_argument("--ranks", type=number, default="2", metavar="R", help="GPUs (default: 2)")
    text = f"among {', '.join(backends)} (default: all)"
    add_names(command, "--backend", "backend", backends, ",".join(backends), text)


@torch.no_grad()
def _run_rank(number: int, args: argparse.Namespace, store: str) -> None:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{store}", rank=number, world_size=args.ranks)
    rank = Rank(number, args.ranks, device, _barrier(args.ranks, device))
    path = record_path(args.output, f"ranks_{args.ranks}.json")
    recorder = Recorder(path, KEY, Lines(COLUMNS, vars))
    for problem in args.problems:
        for scheme in args.schemes:
            if number == 0:
                progress(f"making the weights of {problem.name} in {scheme}")
            experts = make_experts(problem, scheme, device)
            exchanges = {b: _exchange(problem, b, max(args.tokens), rank) for b in args.backend}
            for tokens in args.tokens:
                rows = _case(problem, scheme, experts, tokens, exchanges, rank)
                if number == 0:
                    recorder.add(rows)
            del experts, exchanges
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _barrier(ranks: int, device: torch.device) -> Callable[[], Any]:
    part = pipeline.SymmetricPrepareAndFinalize(None, 1, 64, 1, dtype=torch.bfloat16)
    x = torch.zeros(1, 64, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1, device=device, dtype=torch.int32)
    config = moe_ops.FusedMoEQuantConfig("unquantized")
    return lambda: part.prepare(x, ids.float(), ids, ranks, None, False, config)


def _case(
    problem: Problem,
    scheme: str,
    experts: Experts,
    tokens: int,
    exchanges: dict[str, TokenExchange],
    rank: Rank,
) -> list[RankRow]:
    """One row for the one GPU, and one for each exchange."""
    of_all = make_inputs(problem, rank.ranks * tokens, "uniform", rank.device)
    mine = slice(rank.number * tokens, (rank.number + 1) * tokens)
    own = of_all._replace(
        x=of_all.x[mine], topk_weights=of_all.topk_weights[mine], topk_ids=of_all.topk_ids[mine]
    )
    expected = moe_ops_layer(experts, own)()
    time_us = slowest(_time(moe_ops_layer(experts, own), rank), rank.device)
    fixed: dict[str, Any] = {"scheme": scheme, "shape": problem.name, "M": tokens}
    rows = [RankRow(**fixed, impl=ONE_GPU, ranks=1, time_us=time_us, send_us=None, return_us=None,
                    tokens_per_s=1e6 * tokens / time_us, rel_err=0.0)]  # fmt: skip
    for backend, exchange in exchanges.items():
        if backend == BATCHED and tokens > MOST_BATCHED:
            continue
        kernel, call = _kernel_and_call(problem, experts, exchange, own, rank)
        out: Any = kernel.apply(**call)
        error = relative_error(out, expected.float())
        time_us = slowest(_time(partial(kernel.apply, **call), rank), rank.device)
        send_us, return_us = _exchange_times(kernel, call, rank)
        rows.append(
            RankRow(
                **fixed,
                impl=backend,
                ranks=rank.ranks,
                time_us=time_us,
                send_us=send_us,
                return_us=return_us,
                rel_err=error,
                tokens_per_s=1e6 * rank.ranks * tokens / time_us,
            )
        )
    return rows


def _kernel_and_call(
    problem: Problem, experts: Experts, exchange: TokenExchange, own: Inputs, rank: Rank
) -> tuple[moe_ops.FusedMoEKernel, dict[str, Any]]:
    """This rank's kernel, and the arguments of its call."""
    local, expert_map, _ = determine_expert_map(rank.ranks, rank.number, problem.num_experts)
    held = [0, problem.num_experts - 1]
    if expert_map is not None:
        held = (expert_map >= 0).nonzero().flatten().tolist()
    part = slice(held[0], held[-1] + 1)
    parallel = moe_ops.FusedMoEParallelConfig(
        dp_size=rank.ranks,
        dp_rank=rank.number,
        ep_size=rank.ranks,
        ep_rank=rank.number,
        use_ep=True,
    )
    config = moe_ops.FusedMoEConfig(
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
        local,
        experts.activation,
        rank.device,
        moe_ops.RoutingMethodType.Renormalize,
        parallel,
        is_act_and_mul=kind_and_key(experts.activation)[0].is_gated,
    )
    quant = _quant_config(experts, part)
    fused: Any = pipeline.TritonExperts(config, quant)
    if isinstance(exchange, pipeline.BatchedSymmetricPrepareAndFinalize):
        room = exchange.max_num_tokens
        config = replace(config, max_num_tokens=room)
        fused = pipeline.BatchedTritonExperts(config, quant, room, rank.ranks)
    kernel = moe_ops.FusedMoEKernel(exchange, fused, moe_parallel_config=parallel)
    names = ("hidden_states", "topk_weights", "topk_ids")
    call = {
        **dict(zip(names, own[:3], strict=True)),
        "w1": experts.w1[part],
        "w2": experts.w2[part],
        "activation": experts.activation,
        "global_num_experts": problem.num_experts,
        "expert_map": None if expert_map is None else expert_map.to(rank.device),
        "apply_router_weight_on_input": False,
    }
    return kernel, call


def _exchange(problem: Problem, backend: str, most: int, rank: Rank) -> TokenExchange:
    """An exchange for up to ``most`` tokens of each rank."""
    if backend == "allgather_reducescatter":
        return pipeline.AllGatherPrepareAndFinalize(None, most, equal_num_tokens=True)
    ranks = determine_expert_ranks(rank.ranks, problem.num_experts)
    sizes = (problem.hidden_size, problem.top_k)
    exchange: pipeline.SymmetricPrepareAndFinalize
    if backend == BATCHED:
        room = min(most, MOST_BATCHED)
        exchange = pipeline.BatchedSymmetricPrepareAndFinalize(
            None, room, *sizes, ranks, dtype=torch.bfloat16
        )
    else:
        exchange = pipeline.SymmetricPrepareAndFinalize(
            None, most, *sizes, dtype=torch.bfloat16, expert_ranks=ranks, equal_num_tokens=True
        )
    exchange.connect(rank.device)
    return exchange


def _quant_config(experts: Experts, part: slice) -> moe_ops.FusedMoEQuantConfig:
    w1, w2 = (
        QTensor._make([None if t is None else t[part] for t in weight]) for weight in experts.stored
    )
    config, names = experts.quant_config, experts.scheme.input_scale_names
    scales = {name: getattr(config, name) for name in names}
    return moe_ops.FusedMoEQuantConfig.from_weights(experts.scheme, w1, w2, **scales)


def _exchange_times(
    kernel: moe_ops.FusedMoEKernel, call: dict[str, Any], rank: Rank
) -> tuple[float, float]:
    """Times of prepare and of finalize, from chains of each."""
    part: Any = kernel.prepare_finalize
    experts: Any = kernel.fused_experts
    names = ("hidden_states", "topk_weights", "topk_ids", "global_num_experts", "expert_map")
    arguments = (*(call[n] for n in names), False, experts.quant_config)
    ids = part.prepare(*arguments).topk_ids.clone()  # a copy: the call is not in flight
    sums = torch.randn(ids.shape[0], call["hidden_states"].shape[1], device=rank.device).bfloat16()

    def chain(step: Callable[[], Any]) -> float:
        def steps() -> None:
            for _ in range(CHAIN):
                step()

        return slowest(_time(steps, rank), rank.device) / CHAIN

    send = chain(lambda: part.prepare(*arguments))
    if not isinstance(part, pipeline.SymmetricPrepareAndFinalize):
        return send, chain(lambda: part.send_back(sums, ids)())
    (windows,) = part.connect(rank.device)
    return send, chain(
        lambda: ops.symmetric_return(
            sums, part.expert_ranks, windows.peers, windows.state, ids.shape[1]
        )
    )


def _time(call: Callable[[], Any], rank: Rank) -> list[float]:
    """Microseconds of each replay."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    events = []
    for replay in range(WARM_UPS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        evict_cache(rank.device)
        torch.cuda._sleep(LAUNCHES)  # else a rank waits for another one's host
        rank.barrier()
        start.record()
        graph.replay()
        end.record()
        if replay >= WARM_UPS:
            events.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def slowest(times: list[float], device: torch.device) -> float:
    """The largest median of the ranks."""
    median: Tensor = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)
