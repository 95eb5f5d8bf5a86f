"""What the files in a checkpoint's folder say about its experts, as `load_checkpoint` takes it."""

import json

import pytest
import torch
from act_ordered import act_ordered, gptq
from checkpoint_formats import AWQ_ORDER, words
from checkpoints import Experts

import moe_ops
from moe_ops.loading.compressed import config_group, format_of
from moe_ops.loading.declared import in_config
from moe_ops.loading.names import LAYOUTS, CheckpointLayout
from moe_ops.loading.patterns import ExpertNames, exact, parts
from moe_ops.scheme import SCHEMES, as_scheme
from moe_ops.scheme.formats import split_nibbles

E, K, H, I = 2, 1, 128, 64  # noqa: E741
PREFIX = "model.layers.3.mlp.experts"
FLOAT8, FLOAT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4 = {**FLOAT4, "strategy": "tensor_group", "group_size": 16}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}


def compressed(*groups, **more):
    named = {f"group_{i}": dict(zip(("targets", "weights", "input_activations"), g, strict=False))
             for i, g in enumerate(groups)}  # fmt: skip
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


def modelopt(algorithm, **more):
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, **more}}


def folder(path, said=None, **files):
    """Files of a model: ``config.json`` with this ``quantization_config``, and tools' own."""
    for old in path.glob("*.json"):
        old.unlink()
    config = {} if said is None else {"quantization_config": said}
    for name, content in {"config": {**config, **files.pop("config", {})}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def words_of(experts, prefix, *, awq=False, less=0):
    """Checkpoint tensors of AWQ, or of GPTQ with zero points that are stored less one or not."""
    out = {}
    for name, q in zip(("gate_proj", "up_proj", "down_proj"), experts, strict=True):
        for e in range(E):
            codes, zeros = split_nibbles(q.data, 2)[e], split_nibbles(q.zero_point, 1)[e]
            if awq:
                pair = (codes.t(), zeros.t())
                codes, zeros = (
                    words(x.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)) for x in pair
                )
            else:
                codes, zeros = words(codes).t(), words(zeros.t() - less & 15)
            parts = {"qweight": codes, "qzeros": zeros, "scales": q.scale[e].t()}
            out |= {f"{prefix}{e}.{name}.{k}": x.contiguous() for k, x in parts.items()}
    return out


def make(scheme, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def load(layer, source, **how):
    return moe_ops.load_checkpoint(layer, source, prefix=PREFIX, progress=False, **how)


def same(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_zero_points_of_both_versions_and_of_awq(tmp_path):
    """Equal numbers stored in each way, which only the files tell apart."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    scheme = "int4_w4a16_g32_zp"
    experts = Experts.random(E, H, I).quantized(scheme)
    wanted = make(scheme)
    load(wanted, words_of(experts, f"{PREFIX}.", less=1), layout="gptq")
    asymmetric = {**GPTQ, "sym": False}
    own = {name: x for name, x in asymmetric.items() if name != "quant_method"}
    v2 = {"checkpoint_format": "gptq_v2"}
    ways = [
        ("gptq", folder_of(asymmetric)), ("gptq", folder_of({**asymmetric, "desc_act": True})),
        ("gptq_v2", folder_of({**asymmetric, **v2})),
        ("gptq_v2", folder_of({**asymmetric, "format": "gptq_v2"})),
        ("gptq_v2", folder_of(quantize_config={**own, **v2})),
        ("gptq_v2", folder_of(asymmetric, quantize_config={**own, **v2})),
        ("gptq_v2", folder_of(config={"text_config": {"quantization_config": asymmetric | v2}})),
        ("gptq_v2", folder_of({"quant_method": "gptq", "bits": 4, **v2})),  # no group size
        ("awq", folder_of(quant_config=AWQ)),
        ("awq", folder_of({"quant_method": "awq", "bits": 4, "group_size": 32})),
        ("awq", folder_of({**AUTO, "packing_format": "auto_round:awq"})),
        ("awq", folder_of({**AUTO, "packing_format": "auto_round:auto_awq"})),
        ("gptq", folder_of({**AUTO, "packing_format": "auto_round:auto_gptq"})),
        ("gptq_v2", folder_of({**AUTO, "packing_format": "auto_round"})),
    ]  # fmt: skip
    wrong = []
    for stored, write in ways:
        tensors = words_of(experts, f"{PREFIX}.", awq=stored == "awq", less=int(stored == "gptq"))
        save_file(tensors, tmp_path / "model.safetensors")
        said = write(tmp_path)
        files = [tmp_path / "model.safetensors"]
        for source, layout in ((tmp_path, "auto"), (files, stored), (files[0], "auto")):
            layer = make(scheme)
            load(layer, source, layout=layout)
            if not same(layer, wanted):
                wrong.append((stored, said, layout))
        for layout in {"gptq", "gptq_v2", "awq"} - {stored}:
            unsaid = stored == "gptq" and "auto-round" not in str(said) and layout == "gptq_v2"
            try:
                load(make(scheme), tmp_path, layout=layout)
                refused = False
            except ValueError as error:
                refused = "layout must have, as" in str(error) and ".json says, " in str(error)
            if refused is unsaid:
                wrong.append((stored, said, layout, refused))
    assert not wrong, wrong


def folder_of(said=None, **files):
    def write(path):
        folder(path, said, **json.loads(json.dumps(files)))
        return said, files

    return write


def test_act_order_of_a_folder(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = gptq(act_ordered("int4_w4a16_g32", num_experts=E, width=I, hidden=H))
    tensors = {f"model.layers.3.mlp.{name}": x.contiguous() for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted, found = make("int4_w4a16_g32"), make("int4_w4a16_g32")
    load(wanted, tensors)
    own = {name: x for name, x in GPTQ.items() if name != "quant_method"}
    load(found, folder(tmp_path, quantize_config={**own, "desc_act": True}))
    assert same(wanted, found) and torch.equal(wanted.w13_input_order, found.w13_input_order)


ALL = [f"{PREFIX}.{e}.{name}_proj" for e in range(E) for name in ("gate", "up", "down")]
MIXED = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in ALL}
MIXED["model.layers.3.self_attn.q_proj"] = {"quant_algo": "FP8"}
QUARK4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
ATTENTION = (["re:.*self_attn.*"], {**FLOAT8, "strategy": "channel"},
             {**FLOAT8, "strategy": "token"})  # fmt: skip
FOLDERS = [
    # What the files say, a scheme that they allow (None: plain weights), one that they do not.
    (dict(said=BLOCKS), "fp8_block128", "int8_block128"),
    (dict(said=BLOCKS), "fp8_block128_ue8m0", None),
    (dict(said=BLOCKS), "fp8_block128", "fp8_block64x128"),
    (dict(said={**BLOCKS, "modules_to_not_convert": ["mlp.experts"]}), None, "fp8_block128"),
    (dict(said={**BLOCKS, "modules_to_not_convert": ["experts"]}), None, "fp8_block128"),
    (dict(said={**BLOCKS, "modules_to_not_convert": ["model.layers.3"]}), None, "fp8_block128"),
    (dict(said={**BLOCKS, "modules_to_not_convert": ["gate", "mlp.gate", "shared_experts",
                "model.layers.30", "model.layers.4.mlp", "lm_head"]}), "fp8_block128", None),
    (dict(said={**BLOCKS, "ignored_layers": [PREFIX + ".0.gate_proj"]}), "fp8_block128", ...),
    (dict(said=BLOCKS, config={"expert_dtype": "fp4"}), "mxfp4_w4a16", "fp8_block128"),
    (dict(said=BLOCKS, config={"expert_dtype": "fp8"}), "fp8_block128", "mxfp4_w4a16"),
    (dict(said=BLOCKS, config={"expert_dtype": "bf16"}), None, "fp8_block128"),
    (dict(said=BLOCKS, config={"expert_dtype": "fp3"}), "fp8_block128", ...),
    (dict(said=GPTQ), "int4_w4a16_g32", "int4_w4a16_g128"),
    (dict(said={**GPTQ, "sym": False}), "int4_w4a16_g32_zp", "int4_w4a16_g32"),
    (dict(said={**GPTQ, "dynamic": {r"-:.*\.mlp\.experts\..*": {}}}), None, "int4_w4a16_g32"),
    (dict(said={**GPTQ, "dynamic": {r"+:.*\.experts\..*": {"group_size": 64}}}),
     "int4_w4a16_g64", "int4_w4a16_g32"),
    (dict(said={**GPTQ, "dynamic": {r"-:.*self_attn.*": {}}}), "int4_w4a16_g32", None),
    (dict(said={**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}), None,
     "int4_w4a16_g32"),
    (dict(quant_config={**AWQ, "modules_to_not_convert": ["gate"]}), "int4_w4a16_g32_zp", None),
    (dict(quant_config=AWQ), "int4_w4a16_g32_zp", "int4_w4a16_g32"),
    (dict(hf_quant_config=modelopt("NVFP4", group_size=16)), "nvfp4", "mxfp4"),
    (dict(hf_quant_config=modelopt("NVFP4", exclude_modules=[f"{PREFIX}*"])), None, "nvfp4"),
    (dict(hf_quant_config=modelopt("NVFP4", exclude_modules=["*.mlp.gate", "model.layers.1*"])),
     "nvfp4", None),
    (dict(hf_quant_config=modelopt("FP8")), "fp8_tensor_static", "fp8_block128"),
    (dict(hf_quant_config=modelopt("W4A8_AWQ", group_size=64)), "int4_w4a8_g64", "int4_w4a8_g128"),
    (dict(hf_quant_config=modelopt("MIXED_PRECISION", quantized_layers=MIXED)), "nvfp4_w4a16",
     "fp8_tensor_static"),
    (dict(hf_quant_config=modelopt("MIXED_PRECISION", quantized_layers={
        PREFIX.replace("model.", "model.language_model."): {"quant_algo": "MXFP8"}})), "mxfp8",
     "fp8_tensor"),
    (dict(said=BLOCKS, hf_quant_config=modelopt(None, kv_cache_quant_algo="FP8")),
     "fp8_block128", None),
    (dict(said=compressed(ATTENTION, (["re:.*mlp.experts.*"], INT4, None))), "int4_w4a16_g32",
     "fp8_channel"),
    (dict(said=compressed((["Linear"], *ATTENTION[1:]), (["re:.*experts.*_proj"], INT4))),
     "int4_w4a16_g32", "fp8_channel"),
    (dict(said=compressed((["re:.*experts.*"], INT4), (ALL, NVFP4))), "nvfp4_w4a16",
     "int4_w4a16_g32"),
    (dict(said=compressed(ATTENTION)), None, "fp8_channel"),
    (dict(said=compressed((["Linear"], INT4), ignore=["lm_head", "mlp.experts"])),
     "int4_w4a16_g32", None),
    (dict(said=compressed((["Linear"], INT4), ignore=["re:.*mlp.gate$"])), "int4_w4a16_g32", None),
    (dict(said=compressed((["Linear"], INT4), ignore=["re:.*layers.3.*"])), None,
     "int4_w4a16_g32"),
    (dict(config={"compression_config": compressed((["Linear"], INT4))}), "int4_w4a16_g32", None),
    (dict(said={"quant_method": "quark", "global_quant_config": {"weight": QUARK4},
                "exclude": ["*.gate", "re:.*lm_head"]}), "mxfp4_w4a16", "fp8_tensor_static"),
    (dict(said={"quant_method": "quark", "global_quant_config": {"weight": QUARK8},
                "layer_quant_config": {"*experts*": {"weight": QUARK4}}}), "mxfp4_w4a16",
     "fp8_tensor_static"),
    (dict(said={"quant_method": "quark", "global_quant_config": {"weight": QUARK4},
                "exclude": ["*.experts.*"]}), None, "mxfp4_w4a16"),
    (dict(said={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
                "model.layers.*.mlp.router"]}), "mxfp4_w4a16", "mxfp6_e2m3"),
    (dict(said={**AUTO, "extra_config": {PREFIX: {"bits": 16}}}), None, "int4_w4a16_g32_zp"),
    (dict(said={**AUTO, "block_name_to_quantize": "model.layers"}), "int4_w4a16_g32_zp", None),
    (dict(said={**AUTO, "block_name_to_quantize": "visual.blocks"}), None, "int4_w4a16_g32_zp"),
    (dict(said={"quant_method": "fbgemm_fp8"}), "fp8_channel", "fp8_block128"),
    (dict(said={"quant_method": "torchao", "modules_to_not_convert": ["experts"]}), None,
     "int8_w8a16"),
    (dict(said={"quant_method": "torchao"}), "int8_w8a16", ...),
]  # fmt: skip


def outcome(path, scheme, **how):
    """Empty if tensors are read (there is an empty file), else why they are not."""
    try:
        load(make(scheme), path, **how)
    except ValueError as error:
        return "" if "model.safetensors" in str(error) else str(error)
    raise AssertionError("an empty file was read")


def test_a_layer_and_its_folder(tmp_path):
    """A scheme that contradicts the files raises before a tensor is read."""
    (tmp_path / "model.safetensors").touch()
    wrong = []
    for files, right, other in FOLDERS:
        folder(tmp_path, **files)
        found = outcome(tmp_path, right)
        if found:
            wrong.append((files, right, found))
        if right is None and outcome(tmp_path, "fp8_tensor", quantize=True):
            wrong.append((files, "quantize"))
        if other is not ...:
            found = outcome(tmp_path, other)
            if "quant_config must be a scheme with weights as" not in found:
                wrong.append((files, other, found))
            if right is not None and not outcome(tmp_path, right, quantize=True):
                wrong.append((files, right, "quantize"))
    assert not wrong, "\n".join(map(str, wrong))


TENSOR = {**FLOAT8, "strategy": "tensor"}
BOTH = [
    # Files that say the same, or contradict each other.
    (dict(said=modelopt("NVFP4") | {"quant_method": "modelopt"},
          hf_quant_config=modelopt("NVFP4", group_size=16)), True),
    (dict(said=BLOCKS, hf_quant_config=modelopt("NVFP4")), False),
    (dict(said={**GPTQ, "checkpoint_format": "gptq"},
          quantize_config={**GPTQ, "checkpoint_format": "gptq_v2"}), False),
    (dict(said=GPTQ, quantize_config={**GPTQ, "group_size": 64}), False),
    (dict(said=GPTQ, quant_config={**AWQ, "zero_point": False}), False),
    (dict(said=BLOCKS, config={"text_config": {"quantization_config": BLOCKS}}), True),
    (dict(said=BLOCKS, config={"text_config": {"quantization_config": GPTQ}}), False),
    (dict(said=compressed((["Linear"], TENSOR, {**TENSOR, "dynamic": True})), config={
        "text_config": {"quantization_config": compressed((["Linear"], TENSOR, TENSOR))}}), False),
    (dict(said=modelopt("FP8_PER_CHANNEL_PER_TOKEN")["quantization"],
          hf_quant_config=modelopt("FP8")), False),
]  # fmt: skip


def test_files_that_contradict_each_other(tmp_path):
    (tmp_path / "model.safetensors").touch()
    right = {"fp8": "fp8_block128", "gptq": "int4_w4a16_g32"}
    for files, agree in BOTH:
        folder(tmp_path, **files)
        said = outcome(tmp_path, right.get(files["said"].get("quant_method"), "nvfp4"))
        assert ("must say the same" in said) is not agree and bool(said) is not agree, (files, said)


def test_words_in_an_order_that_is_not_known(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for said, rule in (
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "checkpoint_format must be gptq or gptq_v2"),
        ({"quant_method": "awq", **AWQ, "version": "gemv"}, "version must be gemm"),
        ({**AUTO, "packing_format": "auto_round:exotic"}, "packing_format must be"),
    ):
        folder(tmp_path, said)
        assert rule in outcome(tmp_path, "int4_w4a16_g32_zp")
        left_out = {**said, "modules_to_not_convert": ["mlp.experts"]}
        assert not outcome(folder(tmp_path, left_out), None)


def test_files_that_are_broken(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for name in ("config", "quantize_config", "quant_config", "hf_quant_config"):
        folder(tmp_path)
        (tmp_path / f"{name}.json").write_text('{"bits": 4')
        assert f"{name}.json must be" in outcome(tmp_path, "fp8_tensor")
    for said in ([], 3, {"config_groups": 3}, {"quant_method": "gptq", "dynamic": [1]},
                 {"quant_method": "awq", "bits": [4]}, {"quant_method": "quark"},
                 {"quant_method": "fp8", "weight_block_size": {"a": 1}},
                 {**BLOCKS, "modules_to_not_convert": [3, {"a": 1}]},
                 compressed((["Linear"], {"num_bits": [4]})), compressed(([7], INT4)),
                 compressed((["re:("], INT4)), {**AUTO, "data_type": [1]},
                 {"quant_method": "modelopt", "config_groups": {"a": None}}):  # fmt: skip
        assert not outcome(folder(tmp_path, said), "fp8_tensor"), said


def test_layouts_of_other_tools(tmp_path):
    """A layout of AWQ or GPTQ for weights that another tool stored."""
    (tmp_path / "model.safetensors").touch()
    folder(tmp_path, BLOCKS)
    for name, layout in LAYOUTS.items():
        said = outcome(tmp_path, "fp8_block128", layout=name)
        assert ("layout must have" in said) is (layout.awq is not None), name
    own = CheckpointLayout(zeros_plus_one=False)
    assert "zeros_plus_one=True" in outcome(
        folder(tmp_path, {**GPTQ, "checkpoint_format": "gptq"}), "int4_w4a16_g32", layout=own
    )


def test_what_this_library_writes_is_read_back(tmp_path):
    """The inverse of `config_group`, for every scheme that compressed-tensors expresses."""
    names, wrong = ExpertNames((PREFIX,), E), []
    for scheme in SCHEMES.values():
        if format_of(as_scheme(scheme)) is None:
            continue
        said = {"quant_method": "compressed-tensors",
                "config_groups": {"group_0": config_group(scheme, ["Linear"])}}  # fmt: skip
        found = in_config({"quantization_config": said}, tmp_path).of(names)
        if found.scheme() != scheme and scheme.name != "fp8_block128_ue8m0":  # scales are float32
            wrong.append((scheme.name, found.scheme().key))
    assert not wrong


def test_names():
    """Whole names alone for compressed-tensors; parts for lists of modules to leave out."""
    for name, whole, part in (
        (f"{PREFIX}.0.gate_proj", True, True), (PREFIX, False, True), ("mlp.experts", False, True),
        (f"re:.*{PREFIX}.*", True, True), ("re:experts", False, False), ("gate", False, False),
        ("layers.3.mlp.experts.0.gate_proj", True, True), ("model.layers.*.mlp", False, True),
        ("*.gate_proj", False, True), (r"model\.layers\.\d+\.mlp", False, True),
        ("language_model.model.layers.3.mlp.experts.0.gate_proj", True, True),
        ("model.layers.3.mlp.experts.0.gate", False, False), ("layers.3*", False, True),
        (r"re:language_model\.model\.layers\.3\.", True, True), ("layers.3.", False, True),
        ("mtp.layers.3.mlp.experts.0.gate_proj", False, False),
    ):  # fmt: skip
        found = exact((name,))(f"{PREFIX}.0.gate_proj"), parts((name,))(f"{PREFIX}.0.gate_proj")
        assert found == (whole, part), name
