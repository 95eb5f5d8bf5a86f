"""`SymmetricPrepareAndFinalize` over several processes, against the all-gather, bit by bit.

On the CPU windows are shared memory; with interpreted kernels too. On GPUs they are symmetric
memory, and calls are captured. What each form of rows becomes is tested in one process, in
`ops/test_symmetric.py`: here schemes differ where the exchange makes something else of them.
"""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compilations import Compilations
from conftest import HAS_CUDA, INTERPRETED
from modular import setup, twice
from rank_kernels import (
    ANSWERS,
    COUNTS,
    PROBLEM,
    SCHEMES,
    check_notices,
    kernel_of,
    part_of,
    synchronize,
)  # fmt: skip
from ranks import GROUPS, compiled_on, device, mine, spawn
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops.parallel import determine_expert_ranks
from moe_ops.pipeline.exchange.groups import RankGroup
from moe_ops.pipeline.exchange.records import Outgoing

E, K, ROOM = PROBLEM.num_experts, PROBLEM.top_k, 9
FEW = ("unquantized", "fp8_tensor_static", "fp8_block128", "int8_channel", "nvfp4")
MODES = ((False, 3), (True, 1), (True, 3))
"""Router weights on the input, and slots."""
EVERY_MODE = ("fp8_tensor", "fp8_tensor_static", "nvfp4")
"""Schemes of which the exchange, the operator or what comes after it quantizes, by the mode."""
SHORT = 0.02 if INTERPRETED else 0.3
"""Seconds to wait for a rank that does not come. A poll of an interpreted kernel counts less than
it takes."""


def exchange_of(ranks, top_k=K, **options):
    experts = determine_expert_ranks(ranks, E)
    options = {"dtype": PROBLEM.dtype, "expert_ranks": experts, "timeout": ANSWERS, **options}
    return moe_ops.pipeline.SymmetricPrepareAndFinalize(
        None, ROOM, PROBLEM.hidden_size, top_k, **options
    )


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_prepared(rank, ranks):
    """What arrives is what an all-gather brings, for tokens that this rank's experts read."""
    tokens, everywhere = mine(COUNTS[ranks], rank), determine_expert_ranks(ranks, E)
    few = INTERPRETED or ranks > 2
    for number, name in enumerate((*FEW, "fp8_tensor") if few else SCHEMES):
        every = name in EVERY_MODE
        for on_input, top_k in MODES if every and not few else MODES[number % 3 :][:1]:
            s = setup(
                PROBLEM.with_(scheme=name, top_k=top_k), moe_ops.pipeline.TritonExperts, device()
            )
            x, _, _, weights, ids, *_ = s.inputs
            ids = ids.masked_fill(torch.arange(11, device=ids.device)[:, None] == 2, -1)
            ids[3, 0], ids[4, 0] = E + 5, -7  # no expert has these ids
            x = x.masked_fill(torch.arange(11, device=x.device)[:, None] == 2, float("nan"))
            where = None if number % 4 == 2 else everywhere
            part = exchange_of(ranks, top_k, expert_ranks=where, share=f"{top_k} {every}")
            windows = part.connect(x.device)[0]
            windows.own[windows.layout.parts.rows :] = 127  # an earlier call may leave anything
            synchronize()
            dist.barrier()
            call = (x[tokens], weights[tokens], ids[tokens], E, None, on_input, s.config, False)
            expected = moe_ops.pipeline.AllGatherPrepareAndFinalize(None, ROOM).prepare(*call)
            rows, scale, meta, all_ids, all_weights = part.prepare(*call)
            known = (expected.topk_ids >= 0) & (expected.topk_ids < E)
            assert torch.equal(all_ids, torch.where(known, expected.topk_ids, -1)), name
            home = everywhere.to(ids.device)[all_ids.clamp(min=0).long()]
            here = (known & (home == rank)).any(1)
            used = here.repeat_interleave(top_k) if on_input else here
            assert torch.equal(all_weights[here], expected.topk_weights[here]), name
            assert rows.shape == expected.a1q.shape and rows.dtype == expected.a1q.dtype
            assert same(rows[used], expected.a1q[used]), name
            assert meta is None and (scale is None) == (expected.a1q_scale is None)
            if scale is not None:
                pair = scale, expected.a1q_scale
                one_each = scale.dim() == 2
                assert same(*(a[used] if one_each else a for a in pair)), name
            sums = (
                torch.randn(ranks * ROOM, PROBLEM.hidden_size).bfloat16().to(here.device)
                * here[:, None]
            )
            noop, routed = (
                moe_ops.pipeline.TopKWeightAndReduceNoOP(),
                (all_weights, all_ids, on_input),
            )
            out = part.finalize(sums, *routed, noop)
            expected = moe_ops.pipeline.AllGatherPrepareAndFinalize(None, ROOM).finalize(
                sums, *routed, noop
            )
            assert torch.equal(out[: COUNTS[ranks][rank]], expected[: COUNTS[ranks][rank]]), name


def kernels(s, rank, ranks, **options):
    """A kernel around each exchange, and the arguments of a rank's call."""
    pair = [
        moe_ops.pipeline.AllGatherPrepareAndFinalize(None, ROOM),
        exchange_of(ranks, share="kernels"),
    ]
    found = [kernel_of(s, rank, ranks, part, **options) for part in pair]
    return found[0][0], found[1][0], part_of(found[0][1], mine(COUNTS[ranks], rank))


def check_kernels(rank, ranks):
    for name in SCHEMES if ranks == 2 else FEW[2:3]:
        s = setup(PROBLEM.with_(scheme=name), moe_ops.pipeline.TritonExperts, device())
        oracle, kernel, arguments = kernels(s, rank, ranks)
        expected = oracle.apply(**arguments)
        for _ in range(2):
            assert torch.equal(kernel.apply(**arguments), expected), name
        inner = moe_ops.pipeline.AsyncPrepareAndFinalize(kernel.prepare_finalize)
        quant = s.config.scheme.activation
        size = None if quant is not None and quant.of_all_rows else 4
        kernel = kernel_of(s, rank, ranks, inner, shared_experts=twice, chunk_size=size)[0]
        shared, routed = kernel.apply(**arguments)
        assert torch.equal(routed, expected), name
        assert torch.equal(shared, 2 * arguments["hidden_states"])


def check_in_flight(rank, ranks):
    """Micro-batches have windows of their own; without them nothing is overwritten."""
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    _, kernel, arguments = kernels(s, rank, ranks)
    own = mine(COUNTS[ranks], rank)
    middle = (own.start + own.stop) // 2
    whole = kernel_of(s, rank, ranks, kernel.prepare_finalize)[1]
    parts = [part_of(whole, part) for part in (slice(own.start, middle), slice(middle, own.stop))]
    calls = [moe_ops.pipeline.Call(**part) for part in (*parts, parts[0])]
    expected = [kernel.apply(**part) for part in (*parts, parts[0])]
    with pytest.raises(RuntimeError, match="in_flight must be at least the number of calls"):
        moe_ops.pipeline.run_micro_batches(kernel, calls)
    both = exchange_of(ranks, in_flight=2)
    for part in (both, moe_ops.pipeline.AsyncPrepareAndFinalize(both)):
        kernel = kernel_of(s, rank, ranks, part)[0]
        for _ in range(2):
            found = moe_ops.pipeline.run_micro_batches(kernel, calls)
            assert all(map(torch.equal, found, expected))
    prepared = both.prepare(*(parts[0][n] for n in ("hidden_states", "topk_weights", "topk_ids")),
                            E, None, False, s.config)  # fmt: skip
    with pytest.raises(ValueError, match="topk_ids must be the tensor that prepare returned"):
        both.send_back(torch.zeros(ranks * ROOM, PROBLEM.hidden_size), prepared.topk_ids.clone())


def check_equal_numbers(rank, ranks):
    """Rows are not padded, and each call may have another number of tokens."""
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    kernel = kernels(s, rank, ranks)[1]
    equal, whole = kernel_of(s, rank, ranks, exchange_of(ranks, equal_num_tokens=True))
    for tokens in (2, 0, 1):
        own = part_of(whole, slice(3 * rank, 3 * rank + tokens))
        assert torch.equal(equal.apply(**own), kernel.apply(**own))


def check_compiled(rank, ranks):
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    oracle, kernel, arguments = kernels(s, rank, ranks)
    with pytest.raises(Exception, match="connect.* before a call is compiled"):
        torch.compile(exchange_of(ranks).send, fullgraph=True, backend="eager")(
            outgoing(s, arguments)
        )
    kernel.prepare_finalize.connect(arguments["hidden_states"].device)
    backend = Compilations("aot_eager")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = compiled_on(-1, kernel.apply, dynamic=True, backend=backend)
        whole = kernel_of(s, rank, ranks, kernel.prepare_finalize)[1]
        for counts in ((4, 7, 8, 7), (2, 6, 0, 3), (3, 0, 2, 0), (0, 5, 6, 7)):
            own = part_of(whole, slice(counts[rank]))
            assert torch.equal(compiled(**own), oracle.apply(**own))
    assert backend.count == (rank == ranks - 1)


def outgoing(s, arguments):
    names = ("hidden_states", "topk_weights", "topk_ids")
    return Outgoing(*(arguments[n] for n in names), E, None, False, s.config, None, False)


def check_errors(rank, ranks):
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    part = exchange_of(ranks)
    kernel, arguments = kernel_of(s, rank, ranks, part)
    fewer = part_of(arguments, mine(COUNTS[ranks], rank))
    with pytest.raises(ValueError, match=r"max_num_tokens = 9 tokens, .*got 11"):
        kernel.apply(**arguments)
    with pytest.raises(TypeError, match=r"a1 must have numbers of at most 2 bytes, got .*float32"):
        part.send(outgoing(s, {**fewer, "hidden_states": fewer["hidden_states"].float()}))
    with pytest.raises(ValueError, match=r"a1.shape\[1\] must be hidden_size = 64, got 32"):
        part.send(outgoing(s, {**fewer, "hidden_states": fewer["hidden_states"][:, :32]}))
    with pytest.raises(ValueError, match=r"at most top_k = 3 columns, got 4"):
        ids = fewer["topk_ids"][:, [0, 1, 2, 2]]
        part.send(outgoing(s, {**fewer, "topk_ids": ids}))
    out = kernel.apply(**fewer)
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert torch.equal(kernel_of(s, rank, ranks, other)[0].apply(**fewer), out)
    part = exchange_of(ranks, timeout=SHORT)
    kernel = kernel_of(s, rank, ranks, part)[0]
    part.connect(device())
    if rank:  # rank 0 does not call
        message = rf"rank {rank} of {ranks} waited {SHORT} s for rank 0, which did not answer"
        check_notices(lambda: kernel.apply(**fewer), message)
        with pytest.raises(RuntimeError, match=message):
            part.check()
        with pytest.raises(RuntimeError, match=message):
            kernel.apply(**fewer)
    dist.barrier()
    part = exchange_of(ranks, timeout=SHORT, equal_num_tokens=True)
    kernel = kernel_of(s, rank, ranks, part)[0]
    part.connect(device())
    message = "same number of tokens on every rank|did not answer"
    check_notices(lambda: kernel.apply(**part_of(arguments, slice(1 + rank))), message)
    with pytest.raises(RuntimeError, match=message):
        part.check()


@torch.no_grad()
def check_captured(rank, ranks):
    """Replays with other routing, eager calls between them, and two calls in flight."""
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    oracle, kernel, arguments = kernels(s, rank, ranks)
    other = kernel_of(s, rank, ranks, exchange_of(ranks))[0]
    names = ("hidden_states", "topk_weights", "topk_ids")
    static = {**arguments, **{n: arguments[n].clone() for n in names}}
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def both():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = other.apply(**static)
        first = kernel.apply(**static)
        torch.cuda.current_stream().wait_stream(side)
        return first, second

    both(), oracle.apply(**static)
    main.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = both()
    g = torch.Generator().manual_seed(rank)
    for replay in range(1000):
        ids = torch.rand(len(static["topk_ids"]), E, generator=g).argsort(1)[:, :K]
        static["topk_ids"].copy_(ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.1, -1))
        static["hidden_states"].normal_()
        graph.replay()
        if replay % 50 == 0:
            expected = oracle.apply(**static)
            assert all(torch.equal(out, expected) for out in outs), replay
            assert torch.equal(kernel.apply(**static), expected), replay
    synchronize()
    kernel.prepare_finalize.check()


def check_kernel_paths(rank, ranks):
    """The part that interpreted kernels take."""
    check_prepared(rank, ranks)
    if ranks == 2:
        check_equal_numbers(rank, ranks)
        check_errors(rank, ranks)


def check_all(rank, ranks):
    check_prepared(rank, ranks)
    check_kernels(rank, ranks)
    if ranks == 2:
        check_equal_numbers(rank, ranks)
        check_in_flight(rank, ranks)
        check_errors(rank, ranks)
        check_compiled(rank, ranks)
    if device().type == "cuda":
        check_captured(rank, ranks)


@pytest.mark.kernel
@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_exchanges_are_the_same(ranks, backend):
    spawn(check_kernel_paths if INTERPRETED else check_all, ranks, backend=backend)


@pytest.mark.kernel
@pytest.mark.parametrize("name", SCHEMES)
def test_one_rank_needs_no_group(name):
    """Whatever is quantized when, as the all-gather of one rank does it."""
    alone, where = RankGroup(1), "cuda" if HAS_CUDA else "cpu"
    for on_input, top_k in MODES:
        s = setup(PROBLEM.with_(scheme=name, top_k=top_k), moe_ops.pipeline.TritonExperts, where)
        x, _, _, weights, ids, *_ = s.inputs
        call = (x, weights, ids, E, None, on_input, s.config, False)
        expected = moe_ops.pipeline.AllGatherPrepareAndFinalize(alone).prepare(*call)
        holders = torch.zeros(E, dtype=torch.int32)
        part = moe_ops.pipeline.SymmetricPrepareAndFinalize(
            alone, len(x), PROBLEM.hidden_size, top_k, dtype=x.dtype, expert_ranks=holders
        )
        rows, scale, _, all_ids, all_weights = part.prepare(*call)
        assert same(rows, expected.a1q) and torch.equal(all_ids, ids.int())
        assert torch.equal(all_weights, expected.topk_weights)
        assert (scale is None) == (expected.a1q_scale is None)
        assert scale is None or same(scale, expected.a1q_scale)
        noop, sums = moe_ops.pipeline.TopKWeightAndReduceNoOP(), torch.randn_like(x)
        assert torch.equal(part.finalize(sums, all_weights, all_ids, on_input, noop), sums)


class Ranges(TorchDispatchMode):
    """Counts the ranges that are made outside operators of moe_ops."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten.arange
        return function(*args, **(kwargs or {}))


def test_copies_share_row_numbers():
    """In grad mode rows, weights and ids are copied out of a window by one range of row numbers."""
    x, weights = torch.randn(3, 64), torch.rand(3, 2).requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [3, -1]], dtype=torch.int32)
    part = moe_ops.pipeline.SymmetricPrepareAndFinalize(RankGroup(1), 3, 64, 2)
    (windows,), config = part.connect("cpu"), moe_ops.FusedMoEQuantConfig("unquantized")
    with Ranges() as ranges:
        there = part.prepare(x, weights, ids, 4, None, False, config)
    assert ranges.count == 1
    windows.own.zero_()
    assert same(there.a1q, x) and same(there.topk_weights, weights.detach())
    assert torch.equal(there.topk_ids, ids)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_who_shares_windows(place):
    """Objects of one group with the same name and the same sizes, while one of them is there."""

    def windows(hidden_size=64, top_k=2, **options):
        part = moe_ops.pipeline.SymmetricPrepareAndFinalize(
            RankGroup(1), 4, hidden_size, top_k, **options
        )
        parts.append(part)
        return part.connect(place)[0]

    parts = []
    first = windows(share="a")
    assert windows(share="a") is first and parts[0].connect(place) == [first]
    others = [windows(share="b"), windows(), windows(), windows(hidden_size=32, share="a")]
    others += [windows(top_k=3, share="a"), windows(share="a", dtype=torch.bfloat16)]
    others.append(windows(share="a", timeout=2))
    assert len({id(w) for w in (first, *others)}) == 8
    assert others[3].layout.hidden_size == 32 and (first.timeout, others[-1].timeout) == (30, 2)
    assert windows(share="a", in_flight=2) is first and parts[-1].connect(place)[1] is not first


def test_arguments():
    part = partial(moe_ops.pipeline.SymmetricPrepareAndFinalize, RankGroup(2), 4, 64, 2)
    assert not part().supports_async(), "kernels run on the current stream"
    with pytest.raises(ValueError, match="expert_ranks must be in 0..1, got 2"):
        part(expert_ranks=torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="timeout must be positive, got 0"):
        part(timeout=0)
