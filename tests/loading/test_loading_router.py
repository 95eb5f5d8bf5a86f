"""Tensors of the router that a layer holds: where checkpoints keep them, and what is missing."""

import json

import pytest
import torch
from checkpoints import Experts, per_expert

import moe_ops
from moe_ops.loading.names import parent_of, router_tensor

E, K, H, I = 6, 2, 32, 24  # noqa: E741
BIAS = torch.linspace(-1, 1, E)
TABLE = torch.stack([torch.randperm(E)[:K] for _ in range(11)])
BLOCK = "model.layers.3.mlp."

PLACES = {  # of the correction bias, below the block
    "DeepSeek-V3, GLM-4.5, Kimi": "gate.e_score_correction_bias",
    "LongCat": "router.e_score_correction_bias",
    "MiniMax, EXAONE": "e_score_correction_bias",
    "Laguna": "experts.e_score_correction_bias",
    "Step-3.5": "router_bias",
    "Ernie": "moe_statics.e_score_correction_bias",
    "Ernie in transformers": "gate.moe_statics.e_score_correction_bias",
    "LFM2, AFMoE, Hunyuan": "expert_bias",
    "Ling 2.0": "gate.expert_bias",
    "Zaya": "router.balancing_biases",
    "DeepSeek's own files, Inkling": "gate.bias",
}
TABLES = ("gate.tid2eid", "hash_indices_table", "experts.hash_indices_table")
LOGITS = ("router.bias", "router.classifier.bias", "gate.wg.bias", "gate.proj.bias", "bias")


def make(**options):
    options = {"scoring_func": "sigmoid", "e_score_correction_bias": torch.zeros(E)} | options
    return moe_ops.FusedMoE(E, K, H, I, **options)


def hashed(dtype=torch.int64):
    table = torch.zeros(11, K, dtype=dtype)
    return make(hash_indices_table=table, e_score_correction_bias=None)


def load(layer, source, **how):
    return moe_ops.load_checkpoint(layer, source, progress=False, **how)


@pytest.fixture(scope="module")
def source():
    experts = per_expert(Experts.random(E, H, I))
    return {BLOCK + name: x for name, x in experts.items()} | {BLOCK + "gate.weight": torch.ones(1)}


def test_wherever_checkpoints_keep_the_tensor(source):
    wrong = []
    for prefix in (BLOCK, BLOCK + "experts", BLOCK + "experts."):
        for family, name in PLACES.items():
            layer = make()
            address = layer.e_score_correction_bias.data_ptr()
            report = load(layer, source | {BLOCK + name: BIAS}, prefix=prefix)
            loaded = torch.equal(layer.e_score_correction_bias, BIAS) and report.is_complete
            same = layer.e_score_correction_bias.data_ptr() == address  # for captured graphs
            wrong += [] if loaded and same and BLOCK + name in report.loaded else [(prefix, family)]
        for name in TABLES:
            for dtype in (torch.int32, torch.int64):
                layer = hashed(dtype)
                report = load(layer, source | {BLOCK + name: TABLE}, prefix=prefix)
                loaded = torch.equal(layer.hash_indices_table, TABLE.to(dtype))
                wrong += [] if loaded and report.is_complete else [(prefix, name, dtype)]
    assert not wrong


def test_a_placeholder_is_missing(source):
    """Also if the checkpoint has biases of logits, or a bias of another layer."""
    others = {"model.layers.4.mlp.gate.e_score_correction_bias": BIAS}
    others |= {BLOCK + name: BIAS for name in LOGITS if name != "bias"}
    for prefix in (BLOCK, BLOCK + "experts"):
        for made, buffer in ((make, "e_score_correction_bias"), (hashed, "hash_indices_table")):
            layer = made()
            before = [x.clone() for x in layer.state_dict().values()]
            with pytest.raises(ValueError, match=rf"1 missing \({buffer}\)"):
                load(layer, source | others, prefix=prefix)
            assert all(map(torch.equal, before, layer.state_dict().values()))
            report = load(layer, source | others, prefix=prefix, strict=False)
            assert report.missing == (buffer,) and not report.is_complete
            assert layer.w2_weight.any() and not getattr(layer, buffer).any()


def test_layers_without_the_buffer_ignore_it(source):
    router = {BLOCK + name: BIAS for name in PLACES.values()}
    router |= {BLOCK + name: TABLE for name in TABLES}
    for prefix in (BLOCK, BLOCK + "experts"):
        report = load(make(e_score_correction_bias=None), source | router, prefix=prefix)
        assert report.is_complete and not {*router} & {*report.loaded}


def test_a_bias_of_the_gates_logits_is_not_taken(source):
    name = BLOCK + "gate.bias"
    cases = (
        ({}, BIAS.bfloat16(), "dtype must be torch.float32 for a correction bias named gate.bias"),
        ({"scoring_func": "softmax"}, BIAS, "scoring_func must not be softmax for a correction"),
    )
    for options, bias, rule in cases:
        layer = make(**options)
        with pytest.raises(ValueError, match=rf"1 missing .* 1 mismatched \({name}: {rule}"):
            load(layer, source | {name: bias}, prefix=BLOCK)
        both = source | {name: bias, BLOCK + "gate.e_score_correction_bias": BIAS}
        assert load(layer, both, prefix=BLOCK).is_complete
        assert torch.equal(layer.e_score_correction_bias, BIAS)
    both = source | {name: -BIAS, BLOCK + "gate.e_score_correction_bias": BIAS}
    for prefix in (BLOCK, BLOCK + "experts"):
        layer = make()
        assert load(layer, both, prefix=prefix).is_complete
        assert torch.equal(layer.e_score_correction_bias, BIAS)


@pytest.mark.parametrize(
    ("made", "name", "x", "rule"),
    [
        (make, "gate.e_score_correction_bias", torch.zeros(E + 1), r"shape must be \(6,\)"),
        (make, "gate.e_score_correction_bias", torch.zeros(2, E // 2), r"shape must be \(6,\)"),
        (make, "gate.bias", torch.zeros(E + 1), r"shape must be \(6,\)"),
        (make, "router_bias", torch.zeros(E, dtype=torch.int32), "dtype must be one of"),
        (hashed, "gate.tid2eid", TABLE[:-1], r"shape must be \(11, 2\), got \(10, 2\)"),
        (hashed, "gate.tid2eid", TABLE.float(), "dtype must be one of"),
        (lambda: hashed(torch.int32), "gate.tid2eid", TABLE + 2**32, "numbers must be within"),
    ],
)
def test_tensors_that_do_not_fit(made, name, x, rule, source):
    with pytest.raises(ValueError, match=rf"1 missing .* 1 mismatched \({BLOCK}{name}: {rule}"):
        load(made(), source | {BLOCK + name: x}, prefix=BLOCK)


def test_two_tensors_for_one_buffer(source):
    """A second tensor is a duplicate, but a saved model may hold the bias in its gate too."""
    names = [BLOCK + n for n in ("gate.e_score_correction_bias", "e_score_correction_bias")]
    with pytest.raises(ValueError, match=rf"1 duplicated \({names[1]}\)"):
        load(make(), source | dict.fromkeys(names, BIAS), prefix=BLOCK)
    with pytest.raises(ValueError, match=rf"1 duplicated \({names[1]}\)"):
        load(make(), source | dict.fromkeys(names, BIAS), prefix=BLOCK + "experts")
    layer, nearer = make(), {names[0]: -BIAS, BLOCK + "experts.e_score_correction_bias": BIAS}
    assert load(layer, source | nearer, prefix=BLOCK + "experts").is_complete
    assert torch.equal(layer.e_score_correction_bias, BIAS)


def test_own_state_dicts_and_other_layers():
    experts = Experts.random(E, H, I)
    plain = per_expert(experts)
    eplb = {"enable_eplb": True, "num_redundant_experts": 2}
    zero = {"zero_expert_num": 3, "zero_expert_type": "identity"}
    for options, bias in (({}, BIAS), (eplb, BIAS), (zero, torch.linspace(-1, 1, E + 3))):
        layers = [make(e_score_correction_bias=torch.zeros_like(bias), **options) for _ in "ab"]
        load(layers[0], plain | {"gate.e_score_correction_bias": bias[None]})
        assert torch.equal(layers[0].e_score_correction_bias, bias)
        if not options.get("enable_eplb"):  # whose rows hold copies
            load(layers[1], layers[0].state_dict())
            assert torch.equal(layers[1].e_score_correction_bias, bias)
    layers = [hashed(), hashed()]
    load(layers[0], plain | {"gate.tid2eid": TABLE})
    assert load(layers[1], layers[0].state_dict()).is_complete
    assert torch.equal(layers[1].hash_indices_table, TABLE)
    quantized = make(scheme="int8_w8a16")
    with pytest.raises(ValueError, match=r"1 missing \(e_score_correction_bias\)"):
        load(quantized, plain, quantize=True)
    assert load(quantized, plain | {"gate.bias": BIAS}, quantize=True).is_complete
    fresh = make()
    load(fresh, plain, strict=False)
    moe_ops.quantize_(fresh, "int8_w8a16")  # loads no router
    assert torch.equal(fresh.w13_weight, quantized.w13_weight)


def test_weights_are_finished_without_the_bias():
    """Only the bias is left to complete."""
    layer = make(scheme="fp8_tensor_static")
    source = per_expert(Experts.random(E, H, I).quantized("fp8_tensor_static"), input_scale=0.5)
    assert load(layer, source, strict=False).missing == ("e_score_correction_bias",)
    assert (layer.w13_input_scale == layer.w13_input_scale.max()).all()


def test_an_index_opens_what_the_layer_takes(tmp_path, source):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({n: x for n, x in source.items() if "experts" in n}, tmp_path / "a")
    bias = BLOCK + "gate.bias"
    safetensors.save_file({bias: BIAS}, tmp_path / "b")
    files = {name: "a" for name in source if "experts" in name}
    files |= {bias: "b", BLOCK + "gate.weight": "not there", "lm_head.weight": "not there"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    layer = make()
    assert load(layer, index, prefix=BLOCK + "experts").is_complete
    assert torch.equal(layer.e_score_correction_bias, BIAS)
    (tmp_path / "b").unlink()
    load(make(e_score_correction_bias=None), index, prefix=BLOCK + "experts")


def test_names():
    assert all(router_tensor(name) for name in (*PLACES.values(), *TABLES))
    assert not any(map(router_tensor, (*LOGITS, "gate.weight", "experts.bias", "my_router_bias")))
    prefixes = ("a.experts.", "experts.", "a.my_experts.", "a.", "")
    assert [*map(parent_of, prefixes)] == ["a.", "", None, None, None]
