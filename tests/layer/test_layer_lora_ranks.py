"""Adapters in layers of several ranks are those of one rank with all experts and all tokens."""

import pytest
import torch
import torch.distributed as dist
from rank_layers import E, H, I, T, batch, held, layer_of
from rank_layers import ways as all_ways
from ranks import BACKENDS, BACKENDS_OF_FOUR, compiled_on, device, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_ops.layer.adapters import parameters_in, ranks_of_adapters
from moe_ops.training import ExpertLora, clip_grad_norm_, mark_rank_adapters

L, R = 3, 4
KINDS = {
    "plain": {},
    "on the input": {"apply_router_weight_on_input": True},
    "chunks": {"chunk_size": 4},
    "int8_w8a16": {"scheme": "int8_w8a16"},
}
NAMES = ("a1", "b1", "a2", "b2", "scaling")


def ways(*given):
    """Ways to share a layer, without windows, which send no ids of adapters."""
    return (way for way in all_ways(*given) if "symmetric" not in way[0])


def adapters(dtype=torch.int32):
    """Adapters of all experts, with an adapter per token, or none."""
    g = torch.Generator().manual_seed(7)
    shapes = ((R, H), (2 * I, R), (R, I), (H, R))
    made = (torch.randn(L, E, *s, generator=g) / s[-1] ** 0.5 for s in shapes)
    a1, b1, a2, b2 = (x.to(device()) for x in made)
    ids = (torch.arange(T, device=device()) % (L + 2) - 1).to(dtype)  # -1 and L: none
    return ExpertLora((a1, b1), (a2, b2), ids, torch.tensor([0.5, 2.0, 1.0], device=device()))


def own(layer, lora, tokens):
    """This rank's part of adapters of all experts, as leaves that require grad."""
    rows = [e for e, row in enumerate(layer.placement.row) if row >= 0]
    (a1, b1), (a2, b2) = ([x[:, rows] for x in pair] for pair in (lora.w1, lora.w2))
    config = layer.moe_parallel_config
    if config.tp_size > 1:
        b1 = b1.unflatten(2, (2, config.tp_size, -1))[:, :, :, config.tp_rank].flatten(2, 3)
        a2 = a2.unflatten(3, (config.tp_size, -1))[..., config.tp_rank, :]
    leaves = [x.clone().requires_grad_() for x in (a1, b1, a2, b2, lora.scaling)]
    ids = None if lora.lora_ids is None else lora.lora_ids[tokens]
    return ExpertLora((leaves[0], leaves[1]), (leaves[2], leaves[3]), ids, leaves[4])


def part_of(layer, whole):
    """The parts of factors, or of their gradients, that a rank has."""
    a1, b1, a2, b2, scaling = whole
    cut = own(layer, ExpertLora((a1, b1), (a2, b2), None, scaling), slice(None))
    return [x.detach() for x in (*cut.w1, *cut.w2, cut.scaling)]


def step(layer, rows, lora, frozen=False):
    """The result and the gradients, by name; ``frozen``: of adapters alone."""
    x, logits, grad = rows
    given = [t.clone().requires_grad_(not frozen) for t in (x, logits)]
    out = layer(*given, lora=lora)
    tensors = {"x": given[0], "logits": given[1]}
    params = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    asked = {**({} if frozen else {**tensors, **params}), **factors(lora)}
    found = torch.autograd.grad(out, [*asked.values()], grad)
    return {"out": out.detach(), **dict(zip(asked, found, strict=True))}


def factors(lora):
    return dict(zip(NAMES, (*lora.w1, *lora.w2, lora.scaling), strict=True))


def compare(layer, found, expected, tokens, text, partial=()):
    """Compare with the parts of one rank's result; ``partial`` gradients are added over ranks."""
    parts = dict(zip(NAMES, part_of(layer, [expected[n] for n in NAMES]), strict=True))
    for what, actual in found.items():
        if what in ("out", "x", "logits"):
            near = expected[what][tokens]
        else:
            near = parts[what] if what in parts else held(layer, what, expected[what])
        if what in partial:
            dist.all_reduce(actual)
        torch.testing.assert_close(actual, near, msg=lambda m, w=what: f"{text} {w}: {m}")


def check(rank, ranks, counts=None):
    for name, options in KINDS.items():
        if (ranks == 4 or counts) and name != "plain":
            continue
        rows, lora = batch(), adapters()
        kept = {k: v for k, v in options.items() if k != "chunk_size"}
        whole = layer_of(kept)
        alone = step(whole, rows, own(whole, lora, slice(None)))
        assert not torch.equal(alone["out"], whole(*rows[:2]))
        for way, spread, tokens in ways(rank, ranks, counts):
            layer = layer_of(options, **spread)
            mine = own(layer, lora, tokens)
            found = step(layer, [x[tokens] for x in rows], mine)
            compare(layer, found, alone, tokens, (name, way))
            with torch.no_grad():
                again = layer(*(x[tokens] for x in rows[:2]), lora=mine)
            torch.testing.assert_close(again, found["out"])


def check_parts(rank, ranks):
    """Without ``reduce_results`` all that ranks share is a part of a sum."""
    rows, lora = batch(), adapters()
    whole = layer_of({})
    alone = step(whole, rows, own(whole, lora, slice(None)))
    for kind, more in (("ep", ()), ("tp", ("a1", "b2"))):
        layer = layer_of({}, **{f"{kind}_size": ranks, f"{kind}_rank": rank})
        found = step(layer, rows, own(layer, lora, slice(None)))
        shared = ("out", "x", "logits", "scaling", *more)
        compare(layer, found, alone, slice(None), kind, shared)


@torch.no_grad()
def check_chunks(rank, ranks):
    """Chunks before the exchange: a rank without tokens left sends a row of padding, and its id."""
    counts = (T, 0)
    rows, lora = batch()[:2], adapters()
    whole = layer_of({})
    alone = whole(*rows, lora=own(whole, lora, slice(None)))
    for way, spread, tokens in ways(rank, ranks, counts):
        layer = layer_of({"chunk_size": 4}, **spread)
        if layer.exchanges_tokens:
            part = own(layer, lora, tokens)
            out = layer.forward_impl_chunked(*(x[tokens] for x in rows), max(counts), lora=part)
            torch.testing.assert_close(out, alone[tokens], msg=lambda m, w=way: f"{w}: {m}")


def check_frozen(rank, ranks):
    """Adapters alone, of one weight or both, and one adapter for all tokens."""
    rows, lora = batch(), adapters()
    for changes in ({}, {"lora_ids": None}):
        changed = lora._replace(**changes)
        whole = layer_of({}).requires_grad_(False)
        alone = step(whole, rows, own(whole, changed, slice(None)), frozen=True)
        for way, spread, tokens in ways(rank, ranks):
            layer = layer_of({}, **spread).requires_grad_(False)
            given = [x[tokens] for x in rows]
            found = step(layer, given, own(layer, changed, tokens), frozen=True)
            compare(layer, found, alone, tokens, way)
    for way, spread, tokens in ways(rank, ranks):
        layer = layer_of({}, **spread)
        mine = own(layer, lora, tokens)
        for one in (mine._replace(w1=None), mine._replace(w2=None)):
            layer(*(x[tokens] for x in rows[:2]), lora=one).sum().backward()
        assert all(x.grad is not None for x in factors(mine).values()), way


class Adapted(torch.nn.Module):
    """A layer and adapters of its experts, which are parameters or are made of them."""

    def __init__(self, layer, lora, made):
        super().__init__()
        self.layer, self.ids, self.made = layer, lora.lora_ids, made
        parts = [x.detach().clone() for x in factors(lora).values()]
        self.parts = torch.nn.ParameterList(x[:, None] if made else x for x in parts)

    def forward(self, x, logits):
        a1, b1, a2, b2, scaling = (x[:, 0] * 1 if self.made else x for x in self.parts)
        return self.layer(x, logits, lora=ExpertLora((a1, b1), (a2, b2), self.ids, scaling))


def check_clipping(rank, ranks):
    """Norms are those of one rank: each factor of one rank's experts counts, shared ones once."""
    rows, lora = batch(), adapters()
    whole = layer_of({})
    alone = Adapted(whole, own(whole, lora, slice(None)), False)
    (alone(*rows[:2]) * rows[2]).sum().backward()
    for number, (way, spread, tokens) in enumerate(ways(rank, ranks)):
        layer = layer_of({}, **spread)
        mine = own(layer, lora, tokens)
        models = [Adapted(layer, mine, made) for made in (False, True)]
        for model, norm_type in ((models[number % 2], 2.0), (models[1 - number % 2], torch.inf)):
            model.zero_grad()
            x, logits, grad = (x[tokens] for x in rows)
            (model(x, logits) * grad).sum().backward()
            norm = clip_grad_norm_(model, 1e9, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9, norm_type)
            torch.testing.assert_close(norm, expected, msg=lambda m, w=way: f"{w}: {m}")
            told = clip_grad_norm_(model.parts, 1e9, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(alone.parts.parameters(), 1e9, norm_type)
            torch.testing.assert_close(told, expected)


def check_sharded(rank, ranks):
    """Beside `fully_shard` over replicas, which keeps parameters that no call sees."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "ep"))
    ep, rows, lora, norms = mesh["ep"], batch(), adapters(), []
    spread = {"ep_size": 2, "ep_rank": ep.get_local_rank(), "reduce_results": True, "tp_group": ep}
    for way in ({}, spread):
        layer = layer_of({}, **way)
        model = Adapted(layer, own(layer, lora, slice(None)), False)
        if way:
            fully_shard(model, mesh=mesh["data"])
            mark_rank_adapters(layer, [*model.parts][:4])
        (model(*rows[:2]) * rows[2]).sum().backward()
        norms.append(clip_grad_norm_(model, 1.0))
    torch.testing.assert_close(*norms)


def check_four(rank, ranks):
    check(rank, ranks)
    check_clipping(rank, ranks)
    check_sharded(rank, ranks)


def check_compiled(rank, ranks, name):
    """One graph for all numbers of tokens, forward and backward, with the same bits."""
    for way, spread, tokens in ways(rank, ranks, (6, 5)):
        if way != name:
            continue
        room = {"max_num_tokens": 8}
        layer, eager = (layer_of(room, **spread).requires_grad_(False) for _ in range(2))
        layer(*(x[tokens] for x in batch()[:2]))  # compares the ranks, which a graph cannot
        torch._dynamo.reset()
        compiled = compiled_on(-1, layer, dynamic=True, backend="aot_eager")
        for number, count in enumerate((5, 2)):
            part = [x[tokens][:count] for x in batch()]
            lora = own(layer, adapters(), tokens)
            lora = lora._replace(lora_ids=lora.lora_ids[:count])
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = step(compiled, part, lora)
            assert all(ranks_of_adapters(x) == layer.rank_group for x in lora.w1[1:] + lora.w2[:1])
            for a, b in zip(found.values(), step(eager, part, lora).values(), strict=True):
                assert torch.equal(a, b), way


def check_two(rank, ranks):
    check(rank, ranks)
    check(rank, ranks, (T, 0))
    check_parts(rank, ranks)
    check_chunks(rank, ranks)
    check_frozen(rank, ranks)
    check_clipping(rank, ranks)


def test_parameters_that_make_up_a_factor():
    """Not those of which it is a part: all ranks may have them, and add their gradients."""
    one, other = (torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2))
    both = torch.nn.Parameter(torch.randn(4, 2, 3))
    assert parameters_in(both) == [both] and parameters_in(both.detach()) == []
    found = parameters_in(torch.stack((one, other)).transpose(1, 2) * 2)
    assert {*map(id, found)} == {id(one), id(other)}
    assert parameters_in(both[:2]) == [] and parameters_in(both[[0, 1]]) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend):
    spawn(check_two, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS_OF_FOUR)
def test_four_ranks(backend):
    spawn(check_four, 4, backend=backend)


@pytest.mark.parametrize(
    "way", ["fixed_capacity", pytest.param("sequence", marks=pytest.mark.exhaustive)]
)
def test_compiled(way):
    spawn(check_compiled, 2, way)
