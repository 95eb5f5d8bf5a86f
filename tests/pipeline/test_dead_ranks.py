"""A rank that is killed: an error on the others, or left out, with replicas of its experts or not.

What the live ranks then compute is what all ranks computed before from ids without the slots of the
dead rank's experts, to the bit.
"""

import copy
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import rank_layers
import torch
import torch.distributed as dist
from conftest import INTERPRETED
from modular import layer_config, setup
from rank_kernels import PROBLEM, check_notices, one_program, part_of, synchronize
from ranks import BACKENDS, BACKENDS_OF_FOUR, GROUPS, device, experts_of, mine, spawn, started

import moe_ops
from moe_ops import EplbState, eplb_map_to_physical_and_record
from moe_ops.parallel import determine_expert_ranks
from moe_ops.parallel.live_ranks import live_replicas
from moe_ops.pipeline.exchange.groups import RankGroup

P, LOGICAL, K, ROOM, DEAD = 8, PROBLEM.num_experts, PROBLEM.top_k, 9, 1
"""Physical and logical experts, slots, rows of a rank, and the rank that is killed."""
PLACEMENT = [0, 1, 2, 3, 4, 5, 2, 0]
"""The logical expert of each physical one: of both on rank 1 of four, one has a replica."""
COUNTS = {2: (7, 4), 4: (3, 4, 1, 3)}
TIMEOUT = 2
"""Seconds to wait for the dead rank."""
MESSAGE = "for rank 1, which did not answer; .* are NaN: call set_live_ranks on all live ranks"
SYMMETRIC = moe_ops.pipeline.SymmetricPrepareAndFinalize
BATCHED = moe_ops.pipeline.BatchedSymmetricPrepareAndFinalize
KINDS = [(SYMMETRIC, True), (BATCHED, False)]
"""Exchanges, and whether experts have replicas."""
NAMES = ("hidden_states", "topk_weights", "topk_ids")


def kernels_of(rank, ranks, kind, placement, **options):
    """A kernel around an exchange, one around an all-gather, and the arguments of this rank."""
    s = setup(PROBLEM.with_(num_experts=P), moe_ops.pipeline.TritonExperts, device())
    ids = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device()).inputs.topk_ids
    held, expert_map = experts_of(rank, ranks, P)
    sizes = (ROOM, PROBLEM.hidden_size, K)
    options |= {"expert_ranks": determine_expert_ranks(ranks, P), "dtype": PROBLEM.dtype}
    part, patient = (kind(None, *sizes, timeout=t, **options) for t in (TIMEOUT, 60))
    config = layer_config(s.problem, device())
    plain = moe_ops.pipeline.TritonExperts(config, s.config)
    experts = plain
    if kind is BATCHED:
        experts = moe_ops.pipeline.BatchedTritonExperts(config, s.config, ROOM, ranks)
    w1, w2 = (w[placement][held] for w in (s.inputs.w1, s.inputs.w2))
    call = s.arguments(w1=w1, w2=w2, expert_map=expert_map.to(device()), topk_ids=ids)
    own = part_of(call, mine(COUNTS[ranks], rank))
    if device().type == "cuda":  # the others may wait longer for a rank that compiles
        moe_ops.FusedMoEKernel(patient, experts).apply(**own)
        all_ready()
    gather = moe_ops.pipeline.AllGatherPrepareAndFinalize(None, ROOM)
    return moe_ops.FusedMoEKernel(part, experts), moe_ops.FusedMoEKernel(gather, plain), own


def all_ready():
    """Wait for all ranks."""
    synchronize()
    dist.barrier()


def die_if(rank):
    """Kill this process if it is the dead rank; let the others see that it is gone."""
    all_ready()
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)


def check_raises(rank, ranks, folder):
    """In bounded time, and so it stays."""
    kernel, _, own = kernels_of(rank, ranks, SYMMETRIC, [*range(P)])
    part = kernel.prepare_finalize
    kernel.apply(**own)
    die_if(rank)
    began, message = time.monotonic(), f"waited {TIMEOUT} s for rank 1, which did not answer"
    check_notices(lambda: kernel.apply(**own), message)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{message}; results since then are NaN$"):
            kernel.apply(**own)
    assert returned(part, own["hidden_states"]).isnan().all()
    assert time.monotonic() - began < 20
    leave(folder, rank)


def returned(part, like):
    """A return as in a compiled call, which raises nothing."""
    windows, sums = part._windows[0], like.new_ones(part.group.size * ROOM, like.shape[1])
    where = (part.expert_ranks, windows.peers, windows.state, K)
    return moe_ops.ops.symmetric_return(sums, *where)


def leave(folder, rank):
    """End this process, whose process group has lost a rank."""
    Path(folder, str(rank)).touch()
    os._exit(0)


class Routing:
    """The physical ids of this rank's tokens: logical ones, or as a balanced layer chooses."""

    def __init__(self, logical_ids, replicas):
        self.logical_ids, self.state = logical_ids, None
        if not replicas:
            return
        self.state = EplbState.make(1, LOGICAL, P - LOGICAL, device=device(), group=RankGroup(4))
        self.state.physical_to_logical_map.copy_(torch.tensor([PLACEMENT]))
        self.state.set_live_ranks(range(4))

    def ids(self):
        if self.state is None:
            return self.logical_ids
        maps = (self.state.expert_load[0], self.state[2][0], self.state[3][0])
        return eplb_map_to_physical_and_record(self.logical_ids, *maps)

    def set_live_ranks(self, ranks):
        if self.state is not None:
            self.state.set_live_ranks(ranks)


def replayed(kernel, static):
    """A call of the kernel with what ``static`` holds then: on a GPU of a captured graph."""
    kernel.apply(**static)
    synchronize()
    if device().type != "cuda":
        return lambda: kernel.apply(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = kernel.apply(**static)

    def replay():
        graph.replay()
        synchronize()
        return out.clone()

    return replay


def check_waits_in_vain(call, part):
    """The call names the rank that did not answer."""
    (windows,) = part.connect(device())
    if INTERPRETED:  # a poll counts less than it takes
        windows.timeout = 0.02
    check_notices(call, MESSAGE)
    windows.timeout = TIMEOUT
    with pytest.raises(RuntimeError, match=MESSAGE):
        part.check()


@torch.no_grad()
def kernel_goes_on(rank, ranks, kind, replicas):
    """The live ranks go on with the same graph, and count the slots that they leave out.

    At its ``yield`` a rank dies.
    """
    live = [r for r in range(ranks) if r != DEAD]
    placement = PLACEMENT if replicas else [*range(P)]
    kernel, gather, own = kernels_of(rank, ranks, kind, placement, on_dead_rank="mask")
    part, routing = kernel.prepare_finalize, Routing(own["topk_ids"], replicas)
    static = {**own, **{name: own[name].clone() for name in NAMES}}
    part.connect(device())
    static["topk_ids"].copy_(routing.ids())
    all_ready()
    call = replayed(kernel, static)
    before = call()
    routing.set_live_ranks(live)  # sends nothing
    ids = routing.ids()
    if replicas:
        assert routing.state.logical_replica_count.tolist() == [[2, 1, 1, 1, 1, 1]]
    routing.set_live_ranks(range(ranks))
    lost = determine_expert_ranks(ranks, P).to(ids.device)[ids.long()] == DEAD
    static["topk_ids"].copy_(ids.masked_fill(lost, -1))
    expected, changed = call(), lost.any(1)
    if kind is SYMMETRIC:
        assert torch.equal(gather.apply(**static), expected)
    if replicas:
        assert (ids[routing.logical_ids == 2] == PLACEMENT.index(2, 4)).all()
        assert torch.equal(lost, routing.logical_ids == 3)
    seen = torch.stack([lost.sum(), (routing.ids() != ids).sum()])
    dist.all_reduce(seen)
    assert seen[0] and (seen[1] or not replicas), "the test has no slots of the dead rank"
    static["topk_ids"].copy_(routing.ids())
    assert torch.equal(call(), before) and part.num_dropped_slots() == 0
    yield
    check_waits_in_vain(call, part)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MESSAGE):
            kernel.apply(**static)
    backend = dist.get_backend() if device().type == "cpu" else "gloo"
    if rank == 0:  # its steps are then not those of the other ranks
        assert returned(part, own["hidden_states"]).isnan().all()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = dist.new_group(live, backend=backend, use_local_synchronization=True)
    part.set_live_ranks(live, group)
    routing.set_live_ranks(live)
    static["topk_ids"].copy_(routing.ids())
    for number in range(1, 4):
        assert torch.equal(call(), expected)
        assert part.num_dropped_slots() == number * int(lost.sum())
    assert replicas or not torch.equal(before[changed], expected[changed]) or not changed.any()
    assert torch.equal(kernel.apply(**static), expected)
    part.check()


@torch.no_grad()
def layers_go_on(rank, ranks):
    """Layers share windows: what one of their exchanges is told holds for all. Two ranks go."""
    way = {
        f"{kind}_{name}": n for kind in ("dp", "ep") for name, n in (("size", 4), ("rank", rank))
    }
    kept = set(range(rank_layers.E))

    def route(x, logits, k, renormalize):
        weights, ids = moe_ops.fused_topk(x, logits, k, renormalize)
        return weights, torch.where(torch.isin(ids, ids.new_tensor([*kept])), ids, -1)

    options = {
        "all2all_backend": "symmetric",
        "max_num_tokens": rank_layers.T,
        "on_dead_rank": "mask",
    }
    options |= {"custom_routing_function": route}
    layers = [rank_layers.layer_of(options, **way) for _ in range(2)]
    parts = [layer.kernel.prepare_finalize for layer in layers]
    for part in parts:
        part.timeout = 60  # the first calls may compile
    x, logits, _ = (t[mine(COUNTS[ranks], rank)] for t in rank_layers.batch())

    def call(tokens=slice(None)):
        return layers[1](layers[0](x[tokens], logits[tokens]), logits[tokens])

    def call_without(dead):
        """What the live ranks compute once others are dead, and the slots that they leave out."""
        gone = torch.isin(there, torch.tensor(dead)).nonzero().flatten().tolist()
        kept.difference_update(gone)
        out = call(slice(0) if rank in dead else slice(None))
        kept.update(range(rank_layers.E))
        ids = route(x, logits, rank_layers.K, True)[1]
        return out, len(layers) * int(torch.isin(ids, ids.new_tensor(gone)).sum())

    call()
    (windows,) = parts[0].connect(device())
    windows.timeout = TIMEOUT
    all_ready()
    before, there = call(), determine_expert_ranks(ranks, rank_layers.E)
    deaths = [[DEAD], [DEAD, 3]]
    expected = [call_without(dead) for dead in deaths]
    assert torch.equal(call(), before)
    for dead, (out, slots) in zip(deaths, expected, strict=True):
        assert rank in dead or torch.equal(out, before) == (slots == 0)
    assert rank != 0 or expected[0][1] > 0, "the test has no slots of the dead rank"
    yield
    # One layer: the next one's call asks first, and may raise if it comes late enough.
    check_waits_in_vain(lambda: layers[0](x, logits), parts[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dropped = 0
    for dead, (out, slots) in zip(deaths, expected, strict=True):
        live = [r for r in range(ranks) if r not in dead]
        if rank not in live:
            break
        group = dist.new_group(live, backend="gloo", use_local_synchronization=True)
        parts[0].set_live_ranks(live, group)
        for _ in range(2):
            assert torch.equal(call(), out)
            dropped += slots
            assert [part.num_dropped_slots() for part in parts] == [dropped] * 2


def check_left_out(rank, ranks, folder):
    """All cases with one death, since processes take long to start."""
    if INTERPRETED:
        one_program()
    cases = [kernel_goes_on(rank, ranks, *kind) for kind in KINDS]
    cases += [] if INTERPRETED else [layers_go_on(rank, ranks)]
    for case in cases:
        next(case)
    die_if(rank)
    for case in cases:
        next(case, None)
    leave(folder, rank)


def run_until_killed(check, ranks, backend, *arguments):
    """All ranks but the killed one must complete the check."""
    folder = arguments[0]
    with started(check, ranks, *map(_plain, arguments), backend=backend) as context:
        for process in context.processes:
            process.join(120)
    codes = [process.exitcode for process in context.processes]
    wanted = [-signal.SIGKILL if r == DEAD else 0 for r in range(ranks)]
    assert codes == wanted, "".join(map(_traceback, context.error_files))
    assert sorted(path.name for path in folder.iterdir()) == [
        str(r) for r in range(ranks) if r != DEAD
    ]


def _traceback(path):
    return pickle.loads(Path(path).read_bytes()) if Path(path).exists() else ""


def _plain(value):
    return str(value) if isinstance(value, Path) else value


@pytest.mark.skipif(INTERPRETED, reason="the protocol is that of the other test")
@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_killed_rank_is_an_error(ranks, backend, tmp_path):
    run_until_killed(check_raises, ranks, backend, tmp_path)


@pytest.mark.kernel
@pytest.mark.parametrize("backend", BACKENDS_OF_FOUR)
def test_a_killed_rank_is_left_out(backend, tmp_path):
    run_until_killed(check_left_out, 4, backend, tmp_path)


def test_live_replicas():
    """Live ones first, in their order; an expert without any keeps one that is not live."""
    replicas = torch.tensor([[0, 4, 5], [1, -1, -1], [2, 3, -1]])
    live = torch.tensor([True, False, True, False, False, True])
    found, counts = live_replicas(replicas, live)
    assert torch.equal(found, torch.tensor([[0, 5, 4], [1, -1, -1], [2, 3, -1]]))
    assert counts.tolist() == [2, 1, 1]


HOLDERS = torch.tensor([0, 1], dtype=torch.int32)


def exchange_of(kind=SYMMETRIC, ranks=2, **options):
    options = {"expert_ranks": HOLDERS[:ranks], "on_dead_rank": "mask", **options}
    return kind(RankGroup(ranks), 4, 64, 2, **options)


def test_arguments():
    for kind in (SYMMETRIC, BATCHED):
        with pytest.raises(ValueError, match=r"on_dead_rank must be one of .*mask.*, got 'wait'"):
            exchange_of(kind, on_dead_rank="wait")
        for ranks, error, rule in (
            ((0, 2), ValueError, "ranks must be in 0..1, got 2"),
            ((-1, 0), ValueError, "ranks must be in 0..1, got -1"),
            ((0, 0), ValueError, r"ranks must be .* each of them once, got \[0, 0\]"),
            ((), ValueError, r"ranks must be at least one rank, .* got \[\]"),
            (1, TypeError, "ranks must be a sequence of int, got int"),
            ("01", TypeError, "ranks must be a sequence of int, got str"),
            ((True,), TypeError, "ranks must be an int, got bool True"),
        ):
            with pytest.raises(error, match=rule):
                exchange_of(kind).set_live_ranks(ranks, None)
        with pytest.raises(ValueError, match='on_dead_rank must be "mask" .* got "raise"'):
            exchange_of(kind, on_dead_rank="raise").set_live_ranks((0,), None)
    with pytest.raises(
        ValueError, match='on_dead_rank must be "raise" unless .*expert_ranks.* got "mask"'
    ):
        exchange_of(expert_ranks=None)
    with pytest.raises(ValueError, match="group must be given to EplbState.make .*, got None"):
        EplbState.make(1, 4, 0).set_live_ranks((0,))


def test_one_rank():
    """It may be the only one that is left; copies keep the option."""
    part = exchange_of(ranks=1)
    with pytest.raises(RuntimeError, match="connect.* must be called before set_live_ranks"):
        part.set_live_ranks((0,), None)
    (windows,) = part.connect("cpu")
    assert part.num_dropped_slots() == 0
    windows.answer[0] = 1
    with pytest.raises(RuntimeError, match="waited 30 s for rank 0"):
        part.check()
    part.set_live_ranks((0,), None)
    part.check()
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert other.connect("cpu")[0].live_ranks() == [0] and not other.has_gradients()
    raises = exchange_of(ranks=1, on_dead_rank="raise")
    assert raises.connect("cpu")[0].live is None and raises.num_dropped_slots() == 0
    shared = [exchange_of(ranks=1, share="a", on_dead_rank=x) for x in ("mask", "raise", "mask")]
    first, second, third = (part.connect("cpu")[0] for part in shared)
    assert first is third and first is not second


def test_what_takes_a_collective_is_refused():
    """One scale for the rows of all ranks, and gradients."""
    s = setup(PROBLEM.with_(scheme="fp8_tensor"), moe_ops.pipeline.TritonExperts)
    x, _, _, weights, ids, *_ = s.inputs
    part = exchange_of(ranks=1, dtype=x.dtype)
    for on_input in (False, True):
        with pytest.raises(NotImplementedError, match='one scale .*"mask", got fp8_tensor'):
            part.prepare(x[:4], weights[:4, :2], ids[:4, :2], 6, None, on_input, s.config)
    plain, holders = moe_ops.FusedMoEQuantConfig("unquantized"), torch.zeros(6, dtype=torch.int32)
    part = exchange_of(ranks=1, dtype=x.dtype, expert_ranks=holders)
    x = x[:4].clone().requires_grad_()
    there = part.prepare(x, weights[:4, :2], ids[:4, :2], 6, None, False, plain)
    noop = moe_ops.pipeline.TopKWeightAndReduceNoOP()
    out = part.finalize(there.a1q + 0 * x, there.topk_weights, there.topk_ids, False, noop)
    with pytest.raises(NotImplementedError, match="prepare_finalize must have gradients"):
        out.sum().backward()


def check_groups(rank, ranks):
    """A group must have the processes of the live ranks, and this rank must be one of them."""
    part = kernels_of(rank, ranks, SYMMETRIC, [*range(P)], on_dead_rank="mask")[0].prepare_finalize
    part.connect(device())
    with pytest.raises(ValueError, match=rf"ranks must have this rank, {rank}, got \[{1 - rank}\]"):
        part.set_live_ranks([1 - rank], None)
    with pytest.raises(ValueError, match=r"group must be .* live ranks \[0, 1\], got None"):
        part.set_live_ranks([1, 0], None)
    with pytest.raises(ValueError, match=rf"group must have .*, \[{rank}\], got \[0, 1\]"):
        part.set_live_ranks([rank], dist.group.WORLD)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        part.set_live_ranks([0, 1], 3)
    part.set_live_ranks([1, 0], dist.group.WORLD)


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in a kernel")
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups(backend):
    spawn(check_groups, 2, backend=backend)
