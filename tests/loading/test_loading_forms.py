"""Forms that look alike: tensors of the same names, shapes and dtypes that mean other numbers."""

import copy
import io
import json
import pickle

import pytest
import torch
from act_ordered import act_ordered, gptq
from checkpoints import Experts, per_expert

import moe_ops
from moe_ops.layer.state_dict import STATE

E, K, H, I = 4, 2, 64, 64  # noqa: E741
ALIKE = [
    ("mxfp4_w4a16", "int4_w4a16_g32"), ("int4_w4a16_g32", "mxfp4_w4a16"),
    ("mxfp6_e2m3", "mxfp6_e3m2"), ("mxfp6_e3m2", "mxfp6_e2m3"), ("fp8_channel", "int8_channel"),
    ("int8_channel", "fp8_channel"), ("fp8_block32", "int8_block32"), ("fp8_tensor", "int8_tensor"),
    ("fp8_block32", "fp8_block32_ue8m0"), ("int8_w8a16_g32", "mxfp6_e2m3"),
    ("mxfp6_e3m2", "int8_w8a16_g32"), ("int4_w4a16_g32", "unquantized"),
]  # fmt: skip


ALTERNATING = moe_ops.loading.CheckpointLayout(interleaved=True)


def make(scheme, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def loaded(scheme, **options):
    experts = Experts.random(E, H, I)
    layer = make(scheme, **options)
    source = per_expert(experts.quantized(scheme) if scheme else experts)
    moe_ops.load_checkpoint(layer, source, progress=False)
    return layer


def same(layer, other):
    pairs = zip(layer.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize(("stored", "scheme"), ALIKE)
def test_a_state_says_its_scheme(stored, scheme):
    state, layer = loaded(stored).state_dict(), make(scheme)
    before = copy.deepcopy(layer)
    rule = f"weights must .*got those of {stored} "
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rule):
            layer.load_state_dict(state, strict=strict)
        with pytest.raises(ValueError, match=f"_extra_state: {rule}"):
            moe_ops.load_checkpoint(layer, state, strict=strict, progress=False)
    with pytest.raises(ValueError, match=rule):  # as transformers loads it
        layer.set_extra_state(state[STATE])
    assert same(layer, before)


def test_a_state_of_alternating_rows():
    state, layer = loaded(None, activation="swigluoai").state_dict(), make(None)
    with pytest.raises(RuntimeError, match="must be one after the other, .*got alternating"):
        layer.load_state_dict(state)
    with pytest.raises(ValueError, match="must be one after the other, .*got alternating"):
        moe_ops.load_checkpoint(layer, state, progress=False)
    moe_ops.load_checkpoint(layer, state, progress=False, layout=ALTERNATING)


@pytest.mark.parametrize(
    ("stored", "scheme"),
    [("fp8_channel", "fp8_w8a16"), ("mxfp4_w4a16", "mxfp4"), ("mxfp4", "mxfp4_mxfp8"),
     ("fp8_block32_ue8m0", "fp8_block32"), ("int4_w4a16_g32", "int4_w4a16_g32")],
)  # fmt: skip
def test_states_of_the_same_weights(stored, scheme):
    """Other activations, and powers of two where any scale may be."""
    layer = loaded(stored)
    for other in (make(scheme), make(scheme)):
        other.load_state_dict(layer.state_dict())
        assert same(layer, other)
    moe_ops.load_checkpoint(make(scheme), layer.state_dict(), progress=False)


def test_a_state_travels(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    layer = loaded("int4_w4a16_g32")
    state = layer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    x, logits = torch.randn(3, H), torch.randn(3, E)
    called = torch.func.functional_call(make("int4_w4a16_g32"), state, (x, logits))
    assert torch.equal(called, layer(x, logits))
    states = [torch.load(file, weights_only=True), pickle.loads(pickle.dumps(state))]
    states += [twin.state_dict() for twin in (copy.deepcopy(layer), layer.to(torch.bfloat16))]
    for one in states:
        assert torch.equal(one[STATE], state[STATE])
        make("int4_w4a16_g32").load_state_dict(one)
    save_file(state, tmp_path / "layer.safetensors")
    other = make("int4_w4a16_g32")
    assert moe_ops.load_checkpoint(other, tmp_path, progress=False).is_complete
    assert same(other, loaded("int4_w4a16_g32"))
    with pytest.raises(ValueError, match="_extra_state: weights must be stored as fp4:1x32:e8m0"):
        moe_ops.load_checkpoint(make("mxfp4_w4a16"), tmp_path, progress=False)


def test_a_state_inside_a_model_and_of_an_earlier_version():
    model = torch.nn.ModuleDict({"moe": loaded("fp8_channel"), "out": torch.nn.Linear(2, 2)})
    state = model.state_dict()
    assert [name for name in state if "extra" in name] == ["moe._extra_state"]
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    earlier = {name: x for name, x in state.items() if "extra" not in name}
    other.load_state_dict(earlier)
    moe_ops.load_checkpoint(other["moe"], earlier, prefix="moe", progress=False)
    other["moe"] = make("int8_channel")
    other.load_state_dict(earlier)  # says nothing, so nothing is compared
    with pytest.raises(RuntimeError, match="moe: weights must be stored as int8"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [torch.zeros(3), torch.zeros(9, dtype=torch.uint8), b"{}", None, torch.ones(5000).byte(),
     torch.tensor(list(b"[" * 4000), dtype=torch.uint8),
     torch.tensor(list(b'{"scheme": 1, "weight": 2, "interleaved": 3}'), dtype=torch.uint8)],
)  # fmt: skip
def test_states_that_say_nonsense(state):
    layer = make("fp8_channel")
    with pytest.raises(ValueError, match="_extra_state must be a layer's form, JSON in a uint8"):
        layer.set_extra_state(state)


@pytest.mark.parametrize(("stored", "scheme"), [a for a in ALIKE if "6" not in a[0][:5]])
def test_names_and_dtypes_tell(stored, scheme):
    """Without a word about the form: int8 and fp8 by the weight, MXFP4 by its exponents."""
    layer = make(None if scheme == "unquantized" else scheme)
    before = copy.deepcopy(layer)
    with pytest.raises(ValueError, match="mismatched"):
        source = per_expert(Experts.random(E, H, I).quantized(stored))
        moe_ops.load_checkpoint(layer, source, progress=False)
    assert same(layer, before)


def test_forms_that_tools_write_for_other_elements():
    for scheme, suffix, dtype in (
        ("mxfp4_w4a16", "qweight", torch.int32), ("mxfp4_w4a16", "weight_packed", torch.int32),
        ("mxfp6_e2m3", "qweight", torch.int32), ("int4_w4a16_g32", "blocks", torch.uint8),
    ):  # fmt: skip
        x = torch.zeros(H // 8, I, dtype=dtype)
        name = f"experts.0.up_proj.{suffix}"
        report = moe_ops.load_checkpoint(make(scheme), {name: x}, strict=False, progress=False)
        assert len(report.mismatched) == 1 and "must not be" in report.mismatched[0]
    codes = {"experts.0.up_proj.weight": torch.full((I, H), 64, dtype=torch.uint8)}
    report = moe_ops.load_checkpoint(make("mxfp6_e2m3"), codes, strict=False, progress=False)
    assert "codes must be numbers of 6 bits" in report.mismatched[0]


def compressed(bits, kind, **more):
    weights = {"num_bits": bits, "type": kind, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


TWO_GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*self_attn.*"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        },
        "group_1": {
            "targets": ["re:.*experts.*"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
    },
}
QUARK = {"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32}
CONFIGS = [
    ("mxfp6_e3m2", {"quant_method": "quark", "global_quant_config": {"weight": QUARK}}, False),
    ("mxfp6_e2m3", {"quant_method": "quark", "global_quant_config": {"weight": QUARK}}, True),
    ("mxfp6_e2m3", {"quant_method": "mxfp4"}, False),
    ("mxfp6_e2m3", {"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
    ("mxfp6_e2m3", {"quant_method": "gptq", "bits": 4, "group_size": 32}, False),
    ("mxfp6_e2m3", {"quant_method": "awq", "bits": 8, "group_size": 32}, False),
    ("mxfp6_e2m3", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
    ("mxfp6_e2m3", compressed(8, "float", strategy="channel"), False),
    ("int4_w4a16_g32", compressed(4, "float", strategy="group", group_size=32), False),
    ("int4_w4a16_g32", compressed(4, "int", strategy="group", group_size=64), False),
    ("int4_w4a16_g32", compressed(4, "int", strategy="group", group_size=32), True),
    ("int4_w4a16_g32", {"quant_method": "gptq", "bits": 4, "group_size": 32}, True),
    ("int4_w4a16_g32", {"quant_method": "gptq", "bits": 8, "dynamic": {"x": {"bits": 4}}}, True),
    ("int4_w4a16_g32", {"quant_method": "of somebody"}, True),
    ("int4_w4a16_g32", {"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, True),
    ("int4_w4a16_g32", {"quant_method": "compressed-tensors", "config_groups": [3]}, True),
    ("int4_w4a16_g32", {"quant_method": ["quark"], "bits": {}}, True),
    ("mxfp4_w4a16", {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, True),
    ("fp8_channel", compressed(8, "float", strategy="channel"), True),
    ("fp8_channel", {"quant_method": "fp8"}, True),
    ("int8_channel", {"quant_method": "fp8"}, False),
    ("mxfp4_w4a16", {"quant_method": "mxfp4"}, True),
    ("mxfp4_w4a16", {"quant_method": "fp8", "expert_dtype": "fp4"}, True),
    ("fp8_block32", {"quant_method": "fp8", "weight_block_size": [32, 32]}, True),
    ("fp8_block32", {"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
    ("fp8_block64x128", {"quant_method": "fp8", "weight_block_size": [64, 128]}, True),
    ("fp8_block64x128", compressed(8, "float", strategy="block", block_structure=[64, 128]), True),
    ("fp8_block32", compressed(8, "float", strategy="channel"), False),
    ("int8_channel", compressed(8, "float", strategy="channel"), False),
    ("int8_w8a16", {"quant_method": "gptq", "bits": 8, "group_size": -1}, True),
    ("int4_w4a16_g32", {"quant_method": "gptq", "bits": 4, "group_size": -1}, False),
    ("fp8_channel", TWO_GROUPS, True),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "config", "fits"), CONFIGS)
def test_a_config_beside_the_files(scheme, config, fits, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = per_expert(Experts.random(E, H, I).quantized(scheme))
    save_file(source, tmp_path / "model.safetensors")
    for content in (
        {"quantization_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        for given in (tmp_path, tmp_path / "model.safetensors", [tmp_path / "model.safetensors"]):
            layer = make(scheme)
            if fits:
                moe_ops.load_checkpoint(layer, given, progress=False)
                continue
            with pytest.raises(
                ValueError, match="quant_config must be .*config.json says, .*got we"
            ):
                moe_ops.load_checkpoint(layer, given, progress=False, strict=False)
            assert not layer.w2_weight_scale.float().any()


class TestAnOrderOfColumns:
    """``w13_input_order`` in a state: kernels read columns by it."""

    def layer(self):
        layer = moe_ops.FusedMoE(4, K, 128, 256, scheme="int4_w4a16_g32")
        moe_ops.load_checkpoint(layer, gptq(act_ordered("int4_w4a16_g32")), progress=False)
        return layer

    def test_comes_and_goes_with_the_weights(self):
        layer = self.layer()
        other = moe_ops.FusedMoE(4, K, 128, 256, scheme="int4_w4a16_g32")
        plain = other.state_dict()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other.w13_input_order, layer.w13_input_order)
        address = other.w13_input_order.data_ptr()
        other.load_state_dict(layer.state_dict())
        assert other.w13_input_order.data_ptr() == address  # captured graphs read it
        other.load_state_dict(plain)
        assert other.w13_input_order is None

    @pytest.mark.parametrize("column", [-1, 2**31 - 1, 10**6, 0])
    def test_out_of_range(self, column):
        layer = self.layer()
        state = {name: x.clone() for name, x in layer.state_dict().items()}
        state["w13_input_order"][-1, 5] = column
        state["w13_input_order"][-1, 6] = column
        before = copy.deepcopy(layer)
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="w13_input_order must have permutations of 0.."):
                layer.load_state_dict(state, assign=assign)
        with pytest.raises(ValueError, match="numbers must be a permutation of"):
            moe_ops.load_checkpoint(layer, state, progress=False)
        for bad in (state["w13_input_order"][:2], state["w13_input_order"].float()):
            with pytest.raises(RuntimeError, match="w13_input_order must"):
                layer.load_state_dict({**state, "w13_input_order": bad})
        assert torch.equal(layer.w13_input_order, before.w13_input_order)

    def test_weights_by_weight_loader(self):
        """They would be read in an order that is not theirs."""
        layer = self.layer()
        with pytest.raises(NotImplementedError, match="must be loaded by load_checkpoint"):
            w = torch.zeros(256, 64, dtype=torch.uint8)
            layer.weight_loader(layer.w13_weight, w, "gate_proj.weight", "w1", 0)
