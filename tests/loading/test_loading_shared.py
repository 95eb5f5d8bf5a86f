"""Shared experts and their gate in checkpoints: under any known name, at any prefix, or refused."""

import json

import pytest
import torch
from checkpoints import Experts, fused, per_expert

import moe_ops

E, K, H, I = 4, 2, 32, 24  # noqa: E741
BLOCK = "model.layers.3.mlp."
GATE = "shared_expert_gate_weight"


def make(shared=2, **options):
    return moe_ops.FusedMoE(E, K, H, I, n_shared_experts=shared, **options)


def load(layer, source, **how):
    return moe_ops.load_checkpoint(layer, source, progress=False, **{"prefix": BLOCK, **how})


def source_of(shared="shared_expert.", count=2, gate="shared_expert_gate.weight", prefix=BLOCK):
    """A block's tensors; shared experts and their gate under the given names."""
    source = per_expert(Experts.random(E, H, I), prefix=prefix)
    wide = per_expert(Experts.random(1, H, count * I, seed=1))
    if shared is not None:
        source |= {name.replace("experts.0.", prefix + shared): x for name, x in wide.items()}
    if gate is not None:
        source[prefix + gate] = torch.linspace(-1, 1, H)[None]
    return source | {prefix + "gate.weight": torch.ones(E, H)}


def shared_of(layer):
    """The shared experts of a layer, side by side again: gate, up, down."""
    w13, w2 = layer.w13_weight[E:], layer.w2_weight[E:]
    return w13[:, :I].flatten(0, 1), w13[:, I:].flatten(0, 1), torch.cat(list(w2), 1)


def holds(layer, gate=True):
    wide = Experts.random(1, H, len(layer.w13_weight[E:]) * I, seed=1)
    same = all(torch.equal(a, b[0]) for a, b in zip(shared_of(layer), wide, strict=True))
    return same and (not gate or torch.equal(getattr(layer, GATE), torch.linspace(-1, 1, H)[None]))


@pytest.mark.parametrize("scheme", [None, "int8_w8a16"])
def test_parameters_of_a_layer(scheme):
    """A layer's own names, whose tensors hold the shared experts behind the others."""
    options = {"scheme": scheme, "shared_expert_gate": True}
    first, loaded, streamed = (make(**options) for _ in range(3))
    load(first, source_of(), quantize=scheme is not None)
    load(loaded, first.state_dict(), prefix="")
    taken = {*streamed.load_weights(first.named_parameters())}
    assert taken == {name for name, _ in first.named_parameters()}
    for layer in (loaded, streamed):
        for name, x in first.named_parameters():
            assert torch.equal(layer.get_parameter(name), x), name


@pytest.mark.parametrize("end", ["", "experts", "experts."])
def test_names_and_prefixes(end, tmp_path):
    """Every known name, under the prefix of the block and beside that of its experts; in files."""
    for name in ("shared_expert.", "shared_experts.", "share_expert.", "shared_mlp."):
        for count in (1, 4):
            layer = make(count, shared_expert_gate=True)
            report = load(layer, source_of(name, count), prefix=BLOCK + end)
            assert holds(layer) and report.is_complete and len(report.loaded) == 3 * E + 4
    save = pytest.importorskip("safetensors.torch").save_file
    layer, parts = make(shared_expert_gate=True), {}
    source = source_of() | {"model.layers.4.mlp.shared_expert.up_proj.weight": torch.ones(1)}
    for file, word in (("a", "3.mlp.experts."), ("b", "3.mlp.shared"), ("c", "layers.4.")):
        parts[f"{file}.safetensors"] = {n: x for n, x in source.items() if f".{word}" in n}
    for file, tensors in parts.items():
        save({n: x.contiguous() for n, x in tensors.items()}, tmp_path / file)
    index = {"weight_map": {n: file for file, tensors in parts.items() for n in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "c.safetensors").unlink()  # another layer's, which is not opened
    assert load(layer, tmp_path, prefix=BLOCK + end).is_complete and holds(layer)


REFUSED = {
    "a gate that the layer lacks": ({}, {}, r"1 unexpected.*pass shared_expert_gate=True to Fused"),
    "no gate": ({"gate": None}, {"shared_expert_gate": True}, f"1 missing \\({GATE}\\)"),
    "a quantized gate": (
        {"gate": "shared_expert_gate.qweight"}, {"shared_expert_gate": True},
        r"must be named as in .*, got model.layers.3.mlp.shared_expert_gate.qweight",
    ),
    "another gate": (
        {"gate": "share_gate.weight"}, {"shared_expert_gate": True}, "got .*share_gate.weight",
    ),
    "another name": ({"shared": "shared_ffn.", "gate": None}, {}, "6 missing.*got .*shared_ffn.g"),
    "numbers": ({"shared": "shared_experts.0.", "gate": None}, {}, "got .*shared_experts.0.gate"),
    "residual": ({"shared": "residual_mlp.", "gate": None}, {}, "got .*residual_mlp.gate_proj.wei"),
    "another width": (
        {"count": 3, "gate": None}, {}, r"3 mismatched.*shared_expert.gate_proj.*shape must",
    ),
}  # fmt: skip


def test_refused():
    """The error names what looks like shared experts; the layer stays as it was."""
    for what, (names, options, message) in REFUSED.items():
        layer = make(**options)
        before = [p.clone() for p in layer.parameters()]
        with pytest.raises(ValueError, match=message):
            load(layer, source_of(**names))
        assert all(map(torch.equal, before, layer.parameters())), what
        report = load(layer, source_of(**names), strict=False)
        assert not report.is_complete, what
    layer = make(shared_expert_gate=True)
    for x, message in (
        (torch.ones(H), r"shape must be \(1, 32\), got \(32,\)"),
        (torch.ones(1, H, dtype=torch.int8), "dtype must be one of"),
    ):
        with pytest.raises(ValueError, match=f"1 missing.*1 mismatched .*{message}"):
            load(layer, source_of() | {BLOCK + "shared_expert_gate.weight": x})
    twice = [*source_of().items(), (BLOCK + GATE, torch.ones(1, H))]
    with pytest.raises(ValueError, match="1 duplicated"):
        load(layer, twice)


def test_names_outside_of_the_prefix():
    """Step-3.5 and Granite keep shared experts beside their block, where nothing is read."""
    for block, shared in (("moe.", "share_expert."), ("block_sparse_moe.", "shared_mlp.")):
        prefix = f"model.layers.3.{block}"
        source = source_of(None, gate=None, prefix=prefix)
        source[f"model.layers.3.{shared}up_proj.weight"] = torch.ones(2 * I, H)
        source[f"model.layers.4.{shared}up_proj.weight"] = torch.ones(2 * I, H)
        for end in ("", "experts"):
            with pytest.raises(ValueError, match=f"got model.layers.3.{shared}up_proj.weight$"):
                load(make(), source, prefix=prefix + end)


def test_a_layer_without_shared_experts_ignores_all():
    for name in ("shared_expert.", "shared_mlp.", "share_expert."):
        layer = make(0)
        report = load(layer, source_of(name))
        assert report.is_complete and len(report.loaded) == 3 * E


def test_biases_of_experts_side_by_side():
    """Their results are summed, so one has the bias of ``w2``; each has its part of ``w13``'s."""
    source, width = source_of(gate=None), {"gate_proj": 2 * I, "up_proj": 2 * I, "down_proj": H}
    for name, n in width.items():
        wide = name != "down_proj"
        source |= {
            f"{BLOCK}experts.{e}.{name}.bias": torch.zeros(I if wide else H) for e in range(E)
        }
        source[f"{BLOCK}shared_expert.{name}.bias"] = torch.arange(1.0, n + 1)
    layer = make(has_bias=True)
    load(layer, source)
    first, second = layer.w13_bias[E:]
    assert first[:I].equal(torch.arange(1.0, I + 1)) and second[I:].equal(first[:I] + I)
    assert layer.w2_bias[E].equal(torch.arange(1.0, H + 1)) and not layer.w2_bias[E + 1].any()


@pytest.mark.parametrize(("scheme", "width"), [("fp8_channel", 24), ("fp8_block128", 256)])
def test_quantized_side_by_side(scheme, width):
    """Each slot has its blocks; scales of whole rows of the down projection are those of all."""
    wide = Experts.random(1, H, 2 * width, seed=1).quantized(scheme)
    source = per_expert(Experts.random(E, H, width).quantized(scheme))
    for name, x in per_expert(wide).items():
        source[name.replace("experts.0.", "shared_experts.")] = x
    layer = moe_ops.FusedMoE(E, K, H, width, scheme=scheme, n_shared_experts=2)
    load(layer, source, prefix="")
    stored = (moe_ops.QTensor(getattr(layer, f"{w}_weight"), getattr(layer, f"{w}_weight_scale"))
              for w in ("w13", "w2"))  # fmt: skip
    w13, w2 = (moe_ops.dequantize_weight(q, scheme)[E:] for q in stored)
    gate, up, down = (moe_ops.dequantize_weight(q, scheme)[0] for q in wide)
    assert torch.equal(w13[:, :width].flatten(0, 1), gate)
    assert torch.equal(w13[:, width:].flatten(0, 1), up)
    assert torch.equal(torch.cat(list(w2), 1), down)


@pytest.mark.parametrize("layout", ["auto", "llama4"])
def test_beside_transposed_experts(layout):
    """As in Llama 4: shared experts have rows as rows, also if they come first."""
    layer, experts = make(shared_expert_gate=True), Experts.random(E, H, I)
    source = {name: x for name, x in source_of().items() if "experts." not in name}
    source |= fused(experts, transposed=True, prefix=BLOCK + "experts.")
    assert load(layer, source, layout=layout).is_complete and holds(layer)
    assert torch.equal(layer.w2_weight[:E], experts.down)
    assert torch.equal(layer.w13_weight[:E], torch.cat(experts[:2], 1))


def test_blocks_that_two_experts_share_are_refused():
    """A block of the source covers columns of two slots, whose own blocks begin elsewhere."""
    width = 192
    source = per_expert(Experts.random(E, H, width).quantized("fp8_block128"))
    wide = Experts.random(1, H, 2 * width).quantized("fp8_block128")
    source |= {n.replace("experts.0.", "shared_experts."): x for n, x in per_expert(wide).items()}
    layer = moe_ops.FusedMoE(E, K, H, width, scheme="fp8_block128", n_shared_experts=2)
    with pytest.raises(ValueError, match="blocks of 128 numbers must not reach from one shared ex"):
        load(layer, source, prefix="")


def test_weight_updates():
    """`load_weights` takes both, in any order, and raises for what it cannot take."""
    for options in ({"prefix": BLOCK}, {"prefix": BLOCK + "experts"}, {}):
        layer = make(shared_expert_gate=True, **options).requires_grad_()
        source = source_of()
        given = [*reversed(source.items())]
        loaded = set(layer.load_weights(given))
        assert holds(layer) and loaded == source.keys() - {BLOCK + "gate.weight"}
        without = make(**options)
        with pytest.raises(
            ValueError, match="nothing takes.*pass shared_expert_gate=True to Fused"
        ):
            list(without.load_weights(source.items()))
        list(without.load_weights(source_of(gate=None).items()))
        assert holds(without, gate=False)
        with pytest.raises(ValueError, match="got one that nothing takes.*must be named as in"):
            name = BLOCK + "shared_expert.norm.weight"
            list(make(prefix=BLOCK).load_weights([(name, torch.ones(H))]))
        alone = make(0, **options)
        assert len(set(alone.load_weights(given))) == 3 * E
