"""load_weights: names as load_checkpoint reads them, nothing dropped, one tensor at a time."""

import pytest
import torch
from checkpoints import MIXTRAL, RANKS, Experts, expected, fused, held, numbers, per_expert

import moe_ops
from moe_ops.parallel import make_expert_params_mapping

E, K, H, I = 8, 2, 128, 32  # noqa: E741
BLOCK = "model.layers.3.mlp."
BIAS = torch.linspace(-1, 1, E)


def make(scheme=None, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def stream(layer, source):
    return [*layer.load_weights(source.items() if isinstance(source, dict) else source)]


def load(layer, source):
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer


def same(layer, other):
    pairs = zip(layer.state_dict().items(), other.state_dict().values(), strict=True)
    return all(name == "_extra_state" or torch.equal(x, y) for (name, x), y in pairs)


def below(head, source):
    return {head + name: x for name, x in source.items()}


def bare(source):
    return {name.removeprefix("experts."): x for name, x in source.items()}


@pytest.fixture(scope="module")
def experts():
    return Experts.random(E, H, I)


def with_biases(experts, source):
    gate, up, down = (x[..., 0] for x in experts)
    return source | {
        "experts.gate_up_proj_bias": torch.stack((gate, up), 2).flatten(1),
        "experts.down_proj_bias": down,
    }


def own_names(layer):
    return {name: x for name, x in layer.state_dict().items() if name != "_extra_state"}


def test_every_form_of_names(experts):
    """On every rank the bits of load_checkpoint; each tensor of the rank is yielded, once."""
    fp8 = per_expert(experts.quantized("fp8_channel"))
    gpt = {"activation": "swigluoai", "has_bias": True}
    alternating = with_biases(experts, fused(experts, transposed=True, interleaved=True))
    forms = {
        "w1, w2, w3": ({}, None, per_expert(experts, MIXTRAL)),
        "transformers 5": ({}, None, fused(experts)),
        "in reverse": ({}, None, dict(reversed(fused(experts).items()))),
        "transposed": ({}, None, fused(experts, transposed=True)),
        "gpt-oss": (gpt, None, alternating),
        "own": ({}, None, own_names(load(make(), fused(experts)))),
        "own, quantized": ({}, "fp8_channel", own_names(load(make("fp8_channel"), fp8))),
        "no gate": ({"activation": "relu2_no_mul"}, None,
                    {n: x for n, x in per_expert(experts).items() if "gate_proj" not in n}),
    }  # fmt: skip
    prefixes = {
        "": ("",),
        BLOCK: (BLOCK, "", "mlp.", "layers.3.mlp."),
        BLOCK + "experts.": (BLOCK, "", "mlp."),
    }
    wrong = []
    for form, (options, scheme, source) in forms.items():
        for rank in RANKS[::3]:
            wanted = load(make(scheme, **options, **rank), source)
            for prefix, heads in prefixes.items():
                for head in heads:
                    layer = make(scheme, prefix=prefix[:-1], **options, **rank)
                    names = stream(layer, below(head, source))
                    whole = sorted(names) == sorted(below(head, source)) or "ep_size" in rank
                    if not (same(layer, wanted) and whole and names):
                        wrong.append((form, rank, prefix, head))
    assert not wrong
    relative = make(prefix=BLOCK + "experts")
    assert len(stream(relative, bare(fused(experts)))) == 2
    assert same(relative, load(make(), fused(experts)))


def test_what_is_not_of_this_layer_is_passed_by(experts):
    source = below(BLOCK, per_expert(experts, MIXTRAL))
    one = torch.ones(1)
    others = below("model.layers.4.mlp.", fused(Experts.random(E, H, I, seed=1)))
    others |= dict.fromkeys(
        ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "lm_head.weight",
         f"{BLOCK}gate.weight", f"{BLOCK}gate.bias", f"{BLOCK}gate.e_score_correction_bias",
         f"{BLOCK}norm.weight", f"{BLOCK}shared_expert_gate.weight", "model.norm.weight",
         f"{BLOCK}shared_experts.up_proj.weight", "model.layers.13.mlp.experts.0.w1.weight",
         "model.layers.0.mlp.gate_proj.weight", "model.layers.4.mlp.gate.tid2eid"), one,
    )  # fmt: skip
    for prefix in (BLOCK[:-1], BLOCK + "experts"):
        for rank in RANKS[::3]:
            layer = make(prefix=prefix, **rank)
            names = stream(layer, others | source)
            mine = {f"experts.{e}." for e in held(layer)}
            assert {*names} == {n for n in source if any(e in n for e in mine)}
            wanted = expected(experts, "unquantized", layer, held(layer))
            assert all(map(torch.equal, numbers(layer), wanted))
            before = numbers(layer)[0].clone()
            if prefix.endswith("experts"):  # the block may have a dense part too
                others[f"{BLOCK}gate_proj.weight"] = one
            assert stream(layer, others) == [] and torch.equal(numbers(layer)[0], before)


@pytest.mark.parametrize(
    ("name", "x", "rule"),
    [
        ("experts.3.w4.weight", torch.ones(I, H), "nothing takes"),
        ("experts.3.w1.lora_A.weight", torch.ones(I, H), "nothing takes"),
        ("experts.8.w1.weight", torch.ones(I, H), "nothing takes"),
        ("experts.3.w1.weight_scale", torch.ones(I, 1), "nothing takes"),
        ("experts.3.w1.bias", torch.ones(I), "a layer without has_bias must be given biases of"),
        ("experts.gate_up_projection", torch.ones(E, 2 * I, H), "nothing takes"),
        ("w13_weights", torch.ones(E, 2 * I, H), "nothing takes"),
        ("w13_weight_packed.foo", torch.ones(E, 2 * I, H), "nothing takes"),
        ("experts.3.w1.weight", torch.ones(I, H + 1), r"shape must be \(32, 128\)"),
        ("experts.gate_up_proj", torch.ones(E + 1, 2 * I, H), "shape must begin with 8 experts"),
        ("w13_weight", torch.ones(E, I, H), "expert 0: shape must be"),
        ("experts.3.w1.weight", torch.ones(I, H, device="meta"), "must hold numbers, got a Ten"),
    ],
)
def test_tensors_of_the_experts_that_nothing_takes(name, x, rule):
    for prefix, head in (("", ""), (BLOCK, BLOCK), (BLOCK + "experts", BLOCK), (BLOCK, "")):
        if prefix != "" and head == BLOCK and name.startswith("w13") and "experts" in prefix:
            head = BLOCK + "experts."
        with pytest.raises(ValueError, match=rf"{head}{name}.*{rule}"):
            stream(make(prefix=prefix), {head + name: x})


def test_wrong_arguments():
    layer = make()
    for weights, rule in (([3], "weights must hold .name, tensor. pairs"), ([("a", 1)], "tensors")):
        with pytest.raises(TypeError, match=rule):
            stream(layer, weights)
    with pytest.raises(TypeError, match=r"experts.0.w1.weight: dtype must be one of"):
        stream(layer, {"experts.0.w1.weight": torch.ones(I, H, dtype=torch.int8)})
    with pytest.raises(ValueError, match="to_empty first"):
        stream(make(device="meta"), {})


def test_layers_without_a_prefix(experts):
    """They take the names of one layer."""
    layer, source = make(), fused(experts)
    assert len(stream(layer, below(BLOCK, source))) == 2
    two = below(BLOCK, source) | below("model.layers.4.mlp.", source)
    with pytest.raises(ValueError, match="weights must be those of one layer .*layers.3.*layers.4"):
        stream(layer, two)
    foreign = below(BLOCK, fused(Experts.random(E, H, I, seed=1)))
    for own in (source, bare(source)):
        assert len(stream(layer, own | foreign)) == 2 and same(layer, load(make(), source))
    scored = make(e_score_correction_bias=torch.zeros(E))
    names = {"gate.e_score_correction_bias": BIAS} | source
    assert len(stream(scored, below(BLOCK, names))) == 3
    assert torch.equal(scored.e_score_correction_bias, BIAS)


def test_square_tensors_wait_for_the_other():
    square = Experts.random(E, H, H)
    for transposed in (False, True):
        source = fused(square, transposed=transposed)
        layer = moe_ops.FusedMoE(E, K, H, H)
        names = stream(layer, reversed(source.items()))
        assert names == ["experts.gate_up_proj", "experts.down_proj"]
        assert torch.equal(layer.w2_weight, square.down)
    with pytest.raises(ValueError, match="experts.down_proj must come with the layer's other fus"):
        stream(layer, {"experts.down_proj": square.gate})
    assert torch.equal(layer.w2_weight, square.down)
    assert stream(layer, {"w2_weight": square.gate}) == ["w2_weight"]  # it is as the layer has it
    assert torch.equal(layer.w2_weight, square.gate)


def test_parts_and_repeated_parts(experts):
    """A sync may come in parts; the last tensor for a part counts, in place."""
    layer, other = load(make(), fused(experts)), Experts.random(E, H, I, seed=1)
    addresses = [p.data_ptr() for p in layer.parameters()]
    new, name = per_expert(other, MIXTRAL), "experts.3.w2.weight"
    assert stream(layer, [(name, experts.down[0]), (name, new[name])]) == [name, name]
    wanted = experts.down.clone()
    wanted[3] = other.down[3]
    assert torch.equal(layer.w2_weight, wanted)
    trained = {n: x.requires_grad_() for n, x in fused(other).items()}
    assert len(stream(layer, trained)) == 2 and same(layer, load(make(), fused(other)))
    assert addresses == [p.data_ptr() for p in layer.parameters()]
    assert not any(p.grad_fn for p in layer.parameters())


def test_a_parameter_that_is_transposed(experts):
    layer = make()
    layer.w2_weight.data = layer.w2_weight.data.transpose(1, 2).contiguous()
    layer.w2_weight.is_transposed = True
    assert stream(layer, {"experts.3.w2.weight": experts.down[3].t()})
    assert torch.equal(layer.w2_weight[3], experts.down[3].t())


def test_names_must_be_consumed(experts):
    layer = make()
    gate_up, down = (x.detach().clone() for x in (layer.w13_weight, layer.w2_weight))
    names = layer.load_weights(fused(experts).items())
    assert torch.equal(layer.w13_weight, gate_up)
    assert next(names) == "experts.gate_up_proj"
    assert not torch.equal(layer.w13_weight, gate_up) and torch.equal(layer.w2_weight, down)


def test_tensors_of_the_router(experts):
    """Tensors that the layer holds are loaded; a bias of logits is the gate's."""
    table = torch.stack([torch.randperm(E)[:K] for _ in range(5)])
    scored = {"scoring_func": "sigmoid", "e_score_correction_bias": torch.zeros(E)}
    cases = (
        (scored, "e_score_correction_bias", "gate.e_score_correction_bias", BIAS),
        (scored, "e_score_correction_bias", "router_bias", BIAS),
        (scored, "e_score_correction_bias", "gate.bias", BIAS),
        (scored, "e_score_correction_bias", "moe_statics.e_score_correction_bias", BIAS[None]),
        ({"hash_indices_table": torch.zeros_like(table)}, "hash_indices_table", "gate.tid2eid",
         table),
    )  # fmt: skip
    for options, buffer, name, x in cases:
        for prefix in (BLOCK, BLOCK + "experts"):
            layer = make(prefix=prefix, **options)
            held = getattr(layer, buffer)
            assert stream(layer, below(BLOCK, {name: x})) == [BLOCK + name]
            assert getattr(layer, buffer) is held and torch.equal(held, x.view(held.shape))
    layer = make(**scored)
    assert stream(layer, {"gate.bias": BIAS.bfloat16()}) == []
    both = {"gate.e_score_correction_bias": BIAS, "gate.bias": -BIAS}
    assert len(stream(layer, both)) == 1 and torch.equal(layer.e_score_correction_bias, BIAS)
    with pytest.raises(ValueError, match=r"gate.e_score_correction_bias: shape must be \(8,\)"):
        stream(layer, {"gate.e_score_correction_bias": BIAS[1:]})


def test_own_mapping(experts):
    """It says where tensors of single experts go; others are read as ever."""
    mapping = make_expert_params_mapping("g", "d", "u", E)
    names = {"gate": "g", "down": "d", "up": "u"}
    source = per_expert(experts, names)
    options = {"expert_mapping": mapping, "prefix": BLOCK + "experts"}
    for head in ("", BLOCK):
        layer = make(**options)
        assert stream(layer, below(head, source)) == [*below(head, source)]
        assert same(layer, load(make(), fused(experts)))
        foreign = below("model.layers.4.mlp.", per_expert(Experts.random(E, H, I, seed=1), names))
        assert stream(layer, foreign) == [] and same(layer, load(make(), fused(experts)))
    swapped = [(p, w.replace("experts.0.", "experts.1."), e, s) for p, w, e, s in mapping if e == 0]
    layer = make(expert_mapping=swapped, prefix=BLOCK)
    others = layer.w2_weight[1:].detach().clone()
    assert len(stream(layer, {n: x for n, x in source.items() if "experts.1." in n})) == 3
    assert torch.equal(layer.w2_weight[0], experts.down[1])
    assert torch.equal(layer.w2_weight[1:], others)
    assert len(stream(layer, fused(experts))) == 2
    with pytest.raises(ValueError, match="experts.1.w2.weight must be in expert_mapping"):
        stream(layer, {"experts.1.w2.weight": experts.down[1]})
    other = make(expert_mapping=swapped, ep_size=2, ep_rank=1)
    assert stream(other, {"experts.1.w2.weight": experts.down[1]}) == []
    with pytest.raises(ValueError, match="shard_id must be one of"):
        wrong = make(expert_mapping=[("experts.w13_", "experts.0.g.", 0, "w4")])
        stream(wrong, {"experts.0.g.weight": experts.gate[0]})


def test_shared_experts_and_copies(experts):
    shared = Experts.random(1, H, I, seed=1)
    own = {f"shared_experts.{n.split('.', 2)[2]}": x for n, x in per_expert(shared).items()}
    layer = make(n_shared_experts=1)
    assert len(stream(layer, fused(experts) | own)) == 5
    assert torch.equal(layer.w2_weight[E], shared.down[0])
    layer = make(enable_eplb=True, num_redundant_experts=2)
    stream(layer, fused(experts))
    assert torch.equal(layer.w2_weight, experts.down[held(layer)])


def test_packed_weights_are_converted_by_the_first_tensor(experts):
    scheme = "int8_w8a16"
    alternating = {"activation": "swigluoai"}  # w13 is packed also where I is no multiple of 64
    layer, new = make(scheme, **alternating), per_expert(experts.quantized(scheme))
    load(layer, per_expert(Experts.random(E, H, I, seed=1).quantized(scheme)))
    layer.pack_()
    packed = layer.w13_weight
    assert stream(layer, {"lm_head.weight": torch.ones(1)}) == [] and layer.w13_weight is packed
    assert {*stream(layer, new)} == {*new}
    assert same(layer, load(make(scheme, **alternating), new))
