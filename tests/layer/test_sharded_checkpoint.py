"""Layers over ranks through `torch.distributed.checkpoint`: onto other ranks, onto one, with AdamW.

Each case saves a layer on two ranks and loads it in other ways; the tensors of a layer on one rank
are the oracle.
"""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import spawn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector

import moe_ops
from moe_ops.training import clip_grad_norm_, sharded_state_dict

E, K, H, I = 8, 2, 128, 256  # noqa: E741
CASES = {
    "plain": {},
    "biases": {"has_bias": True, "activation": "swigluoai"},
    "without_gate": {"activation": "relu2_no_mul"},
    "shared_experts": {"n_shared_experts": 1},
    "fp8_block128": {"scheme": "fp8_block128"},
    "fp8_tensor_static": {"scheme": "fp8_tensor_static"},
    "int4_w4a16_g32": {"scheme": "int4_w4a16_g32"},
    "int4_w4a16_g128_zp": {"scheme": "int4_w4a16_g128_zp"},
    "mxfp4_packed": {"scheme": "mxfp4_w4a16", "packed": True},
    "fp8_form": {"scheme": "mxfp4_w4a8", "as_fp8": True},
    "round_robin": {"expert_placement_strategy": "round_robin"},
    "uneven": {"num_experts": 7},
    "odd_width": {"intermediate_size": 97},
}

SHARDED = (None, "int8_w8a16") if torch.__version__ >= "2.13" else (None,)
"""Schemes whose layers can be cut by fully_shard: that of torch 2.11 takes no integer parameters,
and gloo sent no fp8."""


def way(rank, kind):
    """Options of one of two ranks."""
    return {f"{kind}_size": 2, f"{kind}_rank": rank, "reduce_results": True} if kind else {}


def layer_of(packed=False, as_fp8=False, **options):
    """A layer with the right sizes whose numbers are not those of the case."""
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    layer = moe_ops.FusedMoE(**{**sizes, "params_dtype": torch.float32, **options})
    for x in layer.parameters():
        x.data.view(torch.uint8).zero_()
    if packed:
        layer.pack_()
    if as_fp8:
        layer.as_fp8_()
    return layer


def filled(layer):
    """Give each entry of the layer on one rank bytes of its own."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in layer.parameters():
            flat = x.data.view(torch.uint8)
            flat.copy_(torch.randint(1, 60, flat.shape, generator=g, dtype=torch.uint8))
    return layer


def save(layer, folder, name):
    dcp.save({"model": get_model_state_dict(layer)}, checkpoint_id=f"{folder}/{name}")


def load(layer, folder, name):
    state = get_model_state_dict(layer)
    dcp.load({"model": state}, checkpoint_id=f"{folder}/{name}")
    set_model_state_dict(layer, state)
    return layer


def same(layer, other):
    pairs = zip(layer.state_dict().items(), other.state_dict().items(), strict=True)
    return all(
        a == b and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for (a, x), (b, y) in pairs
    )


def layers_of(rank, kind, names=CASES):
    """The layers of all cases on one of two ranks, as one model."""
    return torch.nn.ModuleDict({n: layer_of(**CASES[n], **way(rank, kind)) for n in names})


def wrong(layers, others):
    """The cases whose layers differ."""
    return [name for name in layers if not same(layers[name], others[name])]


def check_two(rank, ranks, folder):
    whole = layers_of(rank, None)
    for layer in whole.values():
        filled(layer)
    save(whole, folder, "one")
    cut = [name for name in CASES if name not in {"mxfp4_packed", "fp8_form"}]
    cases = {"ep": CASES, "tp": cut}
    parts = {kind: load(layers_of(rank, kind, cases[kind]), folder, "one") for kind in cases}
    for kind, part in parts.items():
        save(part, folder, kind)
        assert wrong(load(layers_of(rank, None, cases[kind]), folder, kind), whole) == [], kind
        for onto in cases:
            again = load(layers_of(rank, onto, cut), folder, kind)
            assert wrong(again, parts[onto]) == [], (kind, onto)
    check_results(parts, whole)
    whole = whole["plain"]
    save(whole, folder, "plain-one")
    save(parts["ep"]["plain"], folder, "plain-ep")
    check_replicas(rank, folder, whole)
    check_copies(rank, folder, whole)
    check_refused(rank, folder)
    check_norm_beside_a_gate(rank)


def check_results(parts, whole):
    """The ranks' results add up to that of the layer on one rank: no term cancels another."""
    g = torch.Generator().manual_seed(9)
    x, logits = torch.rand(5, H, generator=g) * 100, torch.randn(5, E, generator=g)
    for name in ("plain", "biases", "without_gate", "odd_width"):
        for part in parts.values():
            expected, out = whole[name](x, logits), part[name](x, logits)
            assert bool((expected > 0).all())
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=0)


def check_replicas(rank, folder, whole):
    """Redundant experts are saved once and all loaded; rows may hold other experts than before."""
    options = {"enable_eplb": True, "num_redundant_experts": 10, "ep_size": 2, "ep_rank": rank}
    layer = load(layer_of(**options), folder, "plain-ep")
    assert layer.placement.experts.count(0) == 2 - rank
    for row, expert in enumerate(layer.placement.experts):
        assert torch.equal(layer.w2_weight[row], whole.w2_weight[expert])
    save(layer, folder, "replicas")
    assert same(load(layer_of(), folder, "replicas"), whole)


def check_copies(rank, folder, whole):
    """Asynchronous saving, and state dicts that are copied, moved or pickled."""
    layer = load(layer_of(**way(rank, "ep")), folder, "plain-one")
    state = get_model_state_dict(layer, options=StateDictOptions(cpu_offload=True))
    dcp.async_save({"model": state}, checkpoint_id=f"{folder}/later").result()
    assert same(load(layer_of(), folder, "later"), whole)
    state = layer.state_dict()
    check_places(folder, state, whole)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=True), copy.deepcopy(state), {**state}):
        fresh = layer_of(**way(rank, "ep"))
        fresh.load_state_dict(other)
        assert same(fresh, layer)
    assert type(state["w13_weight"][0]) is type(state["w2_weight"].sum(0)) is torch.Tensor


def check_places(folder, state, whole):
    """Copies and elementwise functions of a state dict are saved; moved rows raise."""
    kept = {
        "cloned": lambda x: x.clone().detach(),
        "copied": copy.deepcopy,
        "averaged": lambda x: torch.where(x > 0, x * 0.25 + x * 0.75, x),
        "cast": lambda x: x.bfloat16(),
        "filled": lambda x: torch.zeros_like(x).copy_(x.cpu()),
    }
    for name, function in kept.items():
        saved = {key: function(x) for key, x in state.items()}
        dcp.save({"model": saved}, checkpoint_id=f"{folder}/{name}")
        stored = dcp.FileSystemReader(f"{folder}/{name}").read_metadata().state_dict_metadata
        assert stored["model._extra_state"].properties.dtype == torch.uint8
        expected = copy.deepcopy(whole).bfloat16() if name == "cast" else whole
        assert same(load(layer_of(params_dtype=expected.w2_weight.dtype), folder, name), expected)
    x, y = state["w13_weight"], layer_of(ep_size=2, ep_rank=0).state_dict()["w13_weight"]
    moved = {"flip": x.flip(0), "__getitem__": x[[*range(len(x))]], "softmax": x.softmax(0)}
    if x.pieces != y.pieces:
        moved["two with other experts"] = x + y
    for name, x in moved.items():
        with pytest.raises(NotImplementedError, match=f"copies of them or .*, got .*{name}$"):
            x.__create_chunk_list__()
    with pytest.raises(dcp.api.CheckpointException, match=r"copies of them or .*of flip"):
        dcp.save({"model": {"w13_weight": moved["flip"]}}, checkpoint_id=f"{folder}/moved")


def check_norm_beside_a_gate(rank):
    """All ranks have the gate of the shared expert: it counts once."""
    layer = layer_of(**way(rank, "ep"), n_shared_experts=1, shared_expert_gate=True)
    for x in layer.parameters():
        x.grad = torch.zeros_like(x)
    layer.shared_expert_gate_weight.grad += 1
    torch.testing.assert_close(clip_grad_norm_(layer, 1.0), torch.tensor(float(H)).sqrt())


def test_states_of_other_shapes_than_the_parameters():
    """Adafactor keeps sums of rows and of columns."""
    layer = layer_of(**way(1, "ep"))
    rows, rank = layer.w13_weight.shape[0], layer.w13_weight.shape[:2]
    state = {"row_var": torch.zeros(*rank, 1), "step": torch.ones(())}
    found = sharded_state_dict(layer, {"state": {"w13_weight": state}})["state"]["w13_weight"]
    assert found["row_var"].global_shape == (E, rank[1], 1) and found["step"] is state["step"]
    assert [piece.offsets[0] for piece in found["row_var"].pieces] == [E - rows]
    for kind, wrong in (("tp", torch.zeros(E, 1)), ("ep", torch.zeros(rows + 1))):
        states = {"state": {"w13_weight": {"sums": wrong}}}
        with pytest.raises(NotImplementedError, match="must have the shape of w13_weight"):
            sharded_state_dict(layer_of(**way(1, kind)), states)


def check_refused(rank, folder):
    layer = layer_of(**CASES["mxfp4_packed"], **way(rank, "tp"))
    with pytest.raises(
        dcp.api.CheckpointException, match=r"plain form, see unpack_, .*form packed"
    ):
        save(layer, folder, "refused")
    layer = layer_of(scheme="int8_w8a16", **way(rank, "ep"))
    save(layer, folder, "int8")
    other = layer_of(scheme="fp8_w8a16", **way(rank, "ep"))
    state = get_model_state_dict(other)
    error = r"Size mismatch|must be stored as"
    with pytest.raises((RuntimeError, dcp.api.CheckpointException), match=error):
        dcp.load({"model": state}, checkpoint_id=f"{folder}/int8")
        set_model_state_dict(other, state)


def test_two_ranks(tmp_path):
    spawn(check_two, 2, str(tmp_path))


class Block(torch.nn.Module):
    """A router and its experts."""

    def __init__(self, **options):
        super().__init__()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.experts = layer_of(**options)

    def forward(self, x):
        return self.experts(x, self.router(x))


def trained(block, x):
    """AdamW after two steps."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    for _ in range(2):
        block(x).square().sum().backward()
        clip_grad_norm_(block, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def resumed(block, folder, flat=None):
    """The block and its optimizer, loaded."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    states = get_optimizer_state_dict(block, optimizer, options=options)
    model = get_model_state_dict(block)
    dcp.load({"model": model, "optim": sharded_state_dict(block, states)}, checkpoint_id=folder)
    set_model_state_dict(block, model)
    set_optimizer_state_dict(block, optimizer, states, options=options)
    return optimizer


def check_fsdp(rank, ranks, folder):
    """FSDP2 over one axis of a mesh, experts over the other: saved on four, loaded on one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ep"))
    torch.manual_seed(0)
    start = Block()
    filled(start.experts)
    for x in start.experts.parameters():
        torch.nn.init.normal_(x, std=0.1)
    save(start, folder, "start")
    options = {**way(mesh["ep"].get_local_rank(), "ep"), "tp_group": mesh["ep"]}
    block = fully_shard(load(Block(**options), folder, "start"), mesh=mesh["data"])
    cut = {**way(mesh["ep"].get_local_rank(), "tp"), "tp_group": mesh["ep"]}
    save(fully_shard(load(Block(**cut), folder, "start"), mesh=mesh["data"]), folder, "cut")
    assert same(load(Block(), folder, "cut"), start)
    x = torch.randn(6, H)
    check_clipping(block, start, x)
    optimizer, alone = trained(block, x), trained(start, x)
    for flat in (False, True):
        states = get_optimizer_state_dict(
            block, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
        )
        saved = {
            "model": get_model_state_dict(block),
            "optim": sharded_state_dict(block, states),
        }
        dcp.save(saved, checkpoint_id=f"{folder}/{flat}")
        one = Block()
        again = resumed(one, f"{folder}/{flat}", flat)
        torch.testing.assert_close(
            parameters_to_vector(one.parameters()), parameters_to_vector(start.parameters())
        )
        for mine, other in zip(one.parameters(), start.parameters(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(again.state[mine][key], alone.state[other][key])
        other = fully_shard(Block(**options), mesh=mesh["data"])
        resumed(other, f"{folder}/{flat}", flat)
        assert all(map(torch.equal, *(map(local, b.parameters()) for b in (other, block))))
        torch.testing.assert_close(other(x), start(x))
    check_meta(mesh, options, folder)


def check_meta(mesh, options, folder):
    """Made on no device, cut over replicas, given memory, and loaded expert by expert."""
    g = torch.Generator().manual_seed(5)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    weights = {
        f"experts.{expert}.{name}.weight": torch.randn(*shape, generator=g) / shape[1] ** 0.5
        for expert in range(E)
        for name, shape in shapes.items()
    }
    few = {name: x for name, x in weights.items() if "gate" not in name}
    for scheme in SHARDED:
        how = {"progress": False, "quantize": scheme is not None}
        whole = Block(scheme=scheme)
        moe_ops.load_checkpoint(whole.experts, weights, **how)
        save(whole, folder, f"meta {scheme}")
        with torch.device("meta"):
            block = Block(scheme=scheme, **options)
        block = fully_shard(block, mesh=mesh["data"])
        with pytest.raises(ValueError, match="call to_empty first"):
            moe_ops.load_checkpoint(block.experts, weights, **how)
        block.to_empty(device="cpu")
        load(block, folder, f"meta {scheme}")
        for x in block.experts.parameters():
            local(x).view(torch.uint8).fill_(1)
        with pytest.raises(NotImplementedError, match="loaded whole under fully_shard"):
            moe_ops.load_checkpoint(block.experts, few, strict=False, **how)
        moe_ops.load_checkpoint(block.experts, weights, **how)
        expected = load(Block(scheme=scheme, **options), folder, f"meta {scheme}")
        for x, y in zip(block.parameters(), expected.parameters(), strict=True):
            assert torch.equal(x.full_tensor().view(torch.uint8), y.data.view(torch.uint8))
        x = torch.randn(6, H, generator=g)
        torch.testing.assert_close(block(x), whole(x))
        with pytest.raises(NotImplementedError, match="own parameters, got w13_weight under"):
            moe_ops.load_checkpoint(block.experts, weights, **how)  # gathered by the forward pass


def check_clipping(block, alone, x):
    for norm_type in (2.0, 1, float("inf")):
        norms = []
        for model in (block, alone):
            model(x).square().sum().backward()
            norms.append(clip_grad_norm_(model, 0.5, norm_type, error_if_nonfinite=True))
        torch.testing.assert_close(*norms, rtol=3e-4, atol=0)  # float32 sums of 500,000
        again = clip_grad_norm_(block, 9.0, norm_type)
        torch.testing.assert_close(again, torch.tensor(0.5), rtol=3e-4, atol=0)
        torchs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 9.0, norm_type)
        torch.testing.assert_close(torchs, again, rtol=3e-4, atol=0)
        for model in (block, alone):
            model.zero_grad()
    for wrong in ({"max_norm": -1.0}, {"max_norm": float("nan")}, {"norm_type": 0.5}):
        with pytest.raises(ValueError, match=rf"{[*wrong][0]} must be"):
            clip_grad_norm_(block, **{"max_norm": 1.0, **wrong})


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def test_fully_shard_beside_experts(tmp_path):
    spawn(check_fsdp, 4, str(tmp_path))
