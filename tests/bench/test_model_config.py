"""The layer that a model's ``config.json`` describes: sizes, activation, scheme."""

import json
from importlib import resources

import pytest

from moe_ops.bench import layer, problems
from moe_ops.bench.model_config import read_config
from moe_ops.demo import MODEL
from moe_ops.loading.compressed import format_of, quantization_config
from moe_ops.scheme import SCHEMES, get_scheme

QWEN3 = {
    "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "hidden_act": "silu",
    "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip
MIXTRAL = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096,
    "intermediate_size": 14336,
}  # fmt: skip


def read(tmp_path, config, **files):
    folder = tmp_path / "a-model"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_config(folder)


@pytest.mark.parametrize(
    "config, sizes, activation",
    [
        (QWEN3, (128, 8, 2048, 768), "silu"),
        (MIXTRAL, (8, 2, 4096, 14336), "silu"),
        ({"text_config": {**MIXTRAL, "hidden_act": "gelu_pytorch_tanh"}, "hidden_size": 1},
         (8, 2, 4096, 14336), "gelu_tanh"),
        ({"thinker_config": {"text_config": QWEN3}}, (128, 8, 2048, 768), "silu"),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168,
          "moe_intermediate_size": 2048, "num_experts": None}, (256, 8, 7168, 2048), "silu"),
        ({"d_model": 6144, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4,
          "ffn_hidden_size": 10752}}, (16, 4, 6144, 10752), "silu"),
        ({"d_model": 6144, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4,
          "ffn_hidden_size": 10752, "ffn_act_fn": {"name": "gelu"}}}, (16, 4, 6144, 10752), "gelu"),
        ({**QWEN3, "text_config": {"hidden_size": None, "hidden_act": None}}, (128, 8, 2048, 768),
         "silu"),
        ({"num_experts": 64, "moe_topk": [8, 8], "hidden_size": 4096,
          "moe_intermediate_size": [3072, 3072]}, (64, 8, 4096, 3072), "silu"),
        ({**QWEN3, "num_experts": [0, 128, 128], "num_experts_per_tok": [None, 8, 8]},
         (128, 8, 2048, 768), "silu"),
        ({"num_experts": 128, "experts_per_token": 4, "hidden_size": 2880,
          "intermediate_size": 2880}, (128, 4, 2880, 2880), "silu"),
        ({**MIXTRAL, "model_type": "gpt_oss", "swiglu_limit": 7.0}, (8, 2, 4096, 14336),
         "swigluoai(clamp_limit=7.0)"),
        ({**QWEN3, "swiglu_limit": 10.0}, (128, 8, 2048, 768), "silu(clamp_limit=10.0)"),
        ({**QWEN3, "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
         (128, 8, 2048, 768), "swigluoai(clamp_limit=7.0,alpha=1.702,beta=1.0)"),
        ({"n_routed_experts": 128, "num_experts_per_tok": 6, "hidden_size": 2688,
          "moe_intermediate_size": 1856, "mlp_hidden_act": "relu2"}, (128, 6, 2688, 1856),
         "relu2_no_mul"),
        ({**QWEN3, "hidden_size": 8192, "moe_hidden_size": 4096}, (128, 8, 4096, 768), "silu"),
    ],
)  # fmt: skip
def test_sizes_and_activation(tmp_path, config, sizes, activation):
    found = read(tmp_path, config)
    assert (
        found.num_experts, found.top_k, found.hidden_size, found.intermediate_size
    ) == sizes  # fmt: skip
    assert found.activation == activation and found.name == "a-model" and found.scheme is None
    assert found.w1_rows == found.intermediate_size * (1 if "no_mul" in activation else 2)


def compressed(weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
FLOAT4, INT4 = {"num_bits": 4, "type": "float"}, {"num_bits": 4, "type": "int"}


@pytest.mark.parametrize(
    "said, scheme",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8_block64x128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
         "fp8_block128_ue8m0"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor_static"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8_tensor"),
        ({"quant_method": "mxfp4"}, "mxfp4_w4a16"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_channel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4_w4a16_g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4_w4a16_channel"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
         "int4_w4a16_g64_zp"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 128},
         "int4_w4a8_g128"),
        (compressed({**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token"}),
         "fp8_channel"),
        (compressed({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"}),
         "fp8_tensor_static"),
        (compressed({**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
                    {**FLOAT8, "strategy": "group"}), "fp8_block128"),
        (compressed({**FLOAT8, "strategy": "channel"}), "fp8_w8a16"),
        (compressed({**INT8, "strategy": "channel"}, {**INT8, "strategy": "token"}),
         "int8_channel"),
        (compressed({**INT4, "strategy": "group", "group_size": 32}), "int4_w4a16_g32"),
        (compressed({**INT4, "strategy": "group", "group_size": 128, "symmetric": False}),
         "int4_w4a16_g128_zp"),
        (compressed({**INT4, "strategy": "group", "group_size": 128}, FLOAT8), "int4_w4a8_g128"),
        (compressed({**FLOAT4, "group_size": 16}, FLOAT4), "nvfp4"),
        (compressed({**FLOAT4, "group_size": 16}), "nvfp4_w4a16"),
        (compressed({**FLOAT4, "group_size": 32}, FLOAT8), "mxfp4_mxfp8"),
        (compressed({**FLOAT4, "group_size": 32}, {**FLOAT8, "strategy": "token"}),
         "mxfp4_w4a8_token"),
        (compressed({**FLOAT4, "group_size": 32}, {**FLOAT8, "strategy": "tensor"}), "mxfp4_w4a8"),
    ],
)  # fmt: skip
def test_scheme(tmp_path, said, scheme):
    found = read(tmp_path, {**QWEN3, "quantization_config": said})
    assert found.scheme == scheme and get_scheme(scheme).key == scheme


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"bits": 4, "group_size": 128, "sym": True}
AWQ = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
ROWS = {**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token"}
LAYERS = {**QWEN3, "num_hidden_layers": 4}
NVFP4 = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}


def groups(*of_targets, ignore=()):
    named = {str(i): {"targets": targets, "weights": weights, "input_activations": inputs}
             for i, (targets, weights, inputs) in enumerate(of_targets)}  # fmt: skip
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore)}


def experts_of(*layers, block="mlp"):
    names = ("gate_proj", "up_proj", "down_proj")
    return [f"model.layers.{i}.{block}.experts.{e}.{n}"
            for i in layers for e in range(128) for n in names]  # fmt: skip


def modelopt(**more):
    group = {"weights": {**FLOAT4, "group_size": 16}, "targets": ["Linear"], **more}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}


INT4_ROWS = {**INT4, "strategy": "group", "group_size": 128}
FACTS = [
    # The quantization_config, other files or entries of the configuration, the experts' scheme.
    (None, {"hf_quant_config": NVFP4}, "nvfp4"),
    (None, {"quantize_config": {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}},
     "int4_w4a16_g128"),
    (None, {"quant_config": AWQ}, "int4_w4a16_g64_zp"),
    (BLOCKS, {"config": {"expert_dtype": "fp4"}}, "mxfp4_w4a16"),
    (BLOCKS, {"config": {"expert_dtype": "fp8"}}, "fp8_block128"),
    (BLOCKS, {"config": {"expert_dtype": "bf16"}}, None),
    (None, {"config": {"text_config": {"expert_dtype": "fp4"}}}, "mxfp4_w4a16"),
    ({**BLOCKS, "expert_dtype": "fp4"}, {}, "mxfp4_w4a16"),
    ({**BLOCKS, "modules_to_not_convert": ["mlp.experts"]}, {}, None),
    ({**BLOCKS, "modules_to_not_convert": ["model.layers.0.mlp.gate", "gate"]}, {},
     "fp8_block128"),
    ({**BLOCKS, "modules_to_not_convert": ["model.layers.0", "model.layers.1.mlp"]}, {},
     "fp8_block128"),
    ({**BLOCKS, "ignored_layers": [f"model.layers.{i}" for i in range(4)]}, {}, None),
    ({**BLOCKS, "modules_to_not_convert": ["model.layers.2.mlp.experts", "layers.3.mlp.experts"]},
     {"config": {"first_k_dense_replace": 2}}, None),
    (modelopt(input_activations=None), {}, "nvfp4_w4a16"),
    (modelopt(input_activations={**FLOAT4, "group_size": 16}), {"hf_quant_config": NVFP4}, "nvfp4"),
    (modelopt(input_activations=None), {"hf_quant_config": NVFP4}, "nvfp4_w4a16"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"hf_quant_config": {"quantization": {
      "quant_algo": "W4A16_NVFP4"}}}, "nvfp4_w4a16"),
    (None, {"hf_quant_config": {"quantization": {"quant_algo": None}}}, None),
    (None, {"hf_quant_config": {"quantization": {"quant_algo": "W4A8_AWQ", "group_size": 128,
     "exclude_modules": ["*.self_attn*", "*router*"]}}}, "int4_w4a8_g128"),
    (None, {"hf_quant_config": {"quantization": {"quant_algo": "FP8",
     "exclude_modules": ["*.experts.*"]}}}, None),
    (groups((["re:.*self_attn.*"], *ROWS), (["re:.*mlp.experts.*"], INT4_ROWS, None)), {},
     "int4_w4a16_g128"),
    (groups((["Linear"], *ROWS), (["re:.*mlp.experts.*"], INT4_ROWS, None)), {},
     "int4_w4a16_g128"),
    (groups((["re:.*self_attn.*"], *ROWS)), {}, None),
    (groups((["Linear"], *ROWS), ignore=["lm_head", "re:.*mlp.experts.*"]), {}, None),
    (groups((["Linear"], *ROWS), ignore=["re:.*block_sparse_moe.experts.*"]), {}, None),
    (groups((["Linear"], *ROWS), ignore=["lm_head", "re:.*mlp.gate$", "experts"]), {},
     "fp8_channel"),
    (groups((["Linear"], *ROWS), ignore=experts_of(0, 1, 2, 3)), {}, None),
    (groups((["Linear"], *ROWS), ignore=experts_of(0, 3)), {}, "fp8_channel"),
    (groups((["Linear"], *ROWS), ignore=experts_of(1, 3)),
     {"config": {"mlp_only_layers": [0, 2]}}, None),
    (groups((["Linear"], *ROWS), ignore=experts_of(1, 3)), {"config": {"decoder_sparse_step": 2}},
     None),
    (groups((["Linear"], *ROWS), ignore=experts_of(0, 1, 2, 3, block="feed_forward")), {}, None),
    (groups((["Linear"], {**FLOAT8, "strategy": "group", "group_size": 32},
             {**FLOAT8, "strategy": "group", "group_size": 32})), {}, "mxfp8"),
    (groups((["Linear"], {**INT8, "strategy": "group", "group_size": 64}, None)), {},
     "int8_w8a16_g64"),
    (groups((["Linear"], {**FLOAT8, "strategy": "tensor"}, None)), {}, "|fp8:*x*:float32"),
    ({**AUTO, "packing_format": "auto_round:auto_gptq"}, {}, "int4_w4a16_g32"),
    ({**AUTO, "sym": False, "packing_format": "auto_round:awq"}, {}, "int4_w4a16_g32_zp"),
    ({**AUTO, "data_type": "mx_fp", "act_bits": 4}, {}, "mxfp4"),
    ({**AUTO, "extra_config": {r".*\.experts\..*": {"bits": 8}}}, {}, "int8_w8a16_g32"),
    ({**AUTO, "extra_config": {r"mlp\.experts\.\d+": {"bits": 8}}}, {}, "int8_w8a16_g32"),
    (groups((["Linear"], *ROWS), ignore=["re:.*layers.0.mlp.experts.*"]),
     {"config": {"num_hidden_layers": None}}, "fp8_channel"),
    (groups((["Linear"], *ROWS), ignore=[r"re:backbone\.layers\.\d+\.mixer\..*"]), {}, None),
    (groups((["Linear"], *ROWS), ignore=[f"backbone.layers.{i}.mixer.experts.{e}.{name}_proj"
     for i in (1, 3) for e in range(128) for name in ("up", "down")]),
     {"config": {"hybrid_override_pattern": "MEME"}}, None),
    ({**AUTO, "extra_config": {f"model.layers.{i}.mlp.experts": {"bits": 16} for i in range(4)}},
     {}, None),
    ({"quant_method": "quark", "global_quant_config": {"input_tensors": None, "weight": {
      "dtype": "fp4", "qscheme": "per_group", "group_size": 32}}}, {}, "mxfp4_w4a16"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}, {},
     "mxfp4_w4a16"),
    ({"quant_method": "gptq", **GPTQ, "dynamic": {r"-:.*\.mlp\.experts\..*": {}}}, {}, None),
    ({"quant_method": "moe_ops"}, {"config": {"moe_ops": {"x": {
      "scheme": "mxfp6_e2m3", "checkpoint": "model.layers.1.mlp.experts"}}}}, "mxfp6_e2m3"),
]  # fmt: skip


def test_facts_of_the_experts(tmp_path):
    """The scheme of the experts, whatever else is quantized, and whichever file says it."""
    wrong = []
    for said, files, scheme in FACTS:
        files = dict(files)
        config = {**LAYERS, **files.pop("config", {})}
        config |= {} if said is None else {"quantization_config": said}
        found = read(tmp_path, config, **files).scheme
        if found != scheme:
            wrong.append((said, files, found, scheme))
    assert not wrong, "\n".join(map(str, wrong))


def test_folders_that_quantize_has_written(tmp_path):
    """The entry of this library is exact; the words of compressed-tensors beside it need not be."""
    schemes = [*SCHEMES, "fp8_block32", "fp8_block64x32", "fp8_w8a16_block32_ue8m0"]
    expressed = [s for s in map(get_scheme, schemes) if s.weight is not None and format_of(s)]
    wrong = []
    for scheme in expressed:
        record = {
            f"layers.{i}": {"scheme": scheme.name, "checkpoint": f"model.layers.{i}.mlp.experts"}
            for i in range(4)
        }
        said = quantization_config({scheme: ["Linear"]}, [])
        found = read(tmp_path, {**LAYERS, "quantization_config": said, "moe_ops": record}).scheme
        if found != scheme.key:
            wrong.append((found, scheme.key))
    assert len(expressed) > 20 and not wrong, wrong


REFUSED = [
    # What is said of the experts and not understood, and words of the error.
    (BLOCKS, {"config": {"expert_dtype": "fp3"}}, "an expert_dtype that is known"),
    (None, {"config": {"expert_dtype": "fp8"}}, "an expert_dtype that is known"),
    (BLOCKS, {"hf_quant_config": NVFP4}, "must say the same"),
    (None, {"hf_quant_config": {"quantization": {"quant_algo": "NEW"}}}, "hf_quant_config.json"),
    (None, {"quantize_config": {"bits": 3, "group_size": 128}}, "bits that are 4 or 8"),
    ({**BLOCKS, "modules_to_not_convert": ["experts.0.up_proj", "experts.127.up_proj"]}, {},
     "the same for all projections"),
    ({**BLOCKS, "modules_to_not_convert": ["experts.0"]}, {}, "the same for all projections"),
    (groups((["Linear"], {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
             {**FLOAT8, "strategy": "group", "group_size": 64})), {}, "must have 64 columns"),
    (groups((["Linear"], *ROWS), ignore=["re:.*down_proj"]), {}, "the same for all projections"),
    (groups((["Qwen3MoeExperts"], *ROWS)), {}, "targets that are known"),
    (groups((["re:.*layers.1.*"], INT4_ROWS, None), (["Linear"], *ROWS)), {}, "one scheme"),
    (groups((["re:("], *ROWS)), {}, "regular expressions"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, {}, "gemm"),
    ({**AUTO, "data_type": "fp8"}, {}, "data_type"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "new"}}}, {}, "dtype"),
]  # fmt: skip


def test_what_is_said_of_experts_and_not_understood(tmp_path):
    for said, files, words in REFUSED:
        files = dict(files)
        config = {**LAYERS, **files.pop("config", {})}
        config |= {} if said is None else {"quantization_config": said}
        with pytest.raises(ValueError, match=words) as error:
            read(tmp_path, config, **files)
        assert "use --sizes E,k,H,I with --scheme NAME" in str(error.value)


def test_files_of_tools_count_beside_config_json_alone(tmp_path):
    read(tmp_path, QWEN3, hf_quant_config=NVFP4)
    folder = tmp_path / "a-model"
    assert read_config(folder / "config.json").scheme == "nvfp4"
    (folder / "other.json").write_text(json.dumps(QWEN3))
    assert read_config(folder / "other.json").scheme is None
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match="hf_quant_config.json must be"):
        read_config(folder)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"hidden_size": 64}, ["num_local_experts", "--sizes E,k,H,I"]),
        ({**QWEN3, "num_experts": "many"}, ["num_experts must be a positive integer, got 'many'"]),
        ({**QWEN3, "num_experts": 0}, ["num_experts must be a positive integer, got 0"]),
        ({**QWEN3, "moe_intermediate_size": [1, 2]}, ["size must be one", "[1, 2]; use --sizes"]),
        ({**QWEN3, "num_experts_per_tok": 129}, ["config.json", "the 128 experts, got 129"]),
        ({**QWEN3, "hidden_act": "silo"}, ["hidden_act", "did you mean 'silu'"]),
        ({**QWEN3, "hidden_act": 3}, ["hidden_act", "must be a str"]),
        ({**QWEN3, "quantization_config": {"quant_method": "new"}}, ["'new'", "--scheme NAME"]),
        ({**QWEN3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [7, 7]}},
         ["weight_block_size", "--scheme NAME"]),
        ({**QWEN3, "quantization_config": compressed(FLOAT8)}, ["compressed-tensors"]),
        ({**QWEN3, "quantization_config": "fp8"}, ["got 'fp8'"]),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(tmp_path, config, words):
    with pytest.raises(ValueError) as error:
        read(tmp_path, config)
    for word in words:
        assert word in str(error.value)


def test_files():
    assert read_config(MODEL) == read_config(MODEL / "config.json")
    assert read_config(str(MODEL)).num_experts == 16
    with pytest.raises(ValueError, match="config.json, or the folder of a model, got 'nowhere'"):
        read_config("nowhere")
    with pytest.raises(ValueError, match="a model's configuration"):
        read_config(MODEL / "heldout.txt")


def test_configurations_that_transformers_writes(tmp_path):
    """Models of different spellings, as their own classes write them."""
    transformers = pytest.importorskip("transformers")
    for name, sizes in {
        "Qwen3MoeConfig": (128, 8, 2048, 768),
        "MixtralConfig": (8, 2, 4096, 14336),
        "DeepseekV3Config": (256, 8, 7168, 2048),
        "Llama4Config": (16, 1, 5120, 8192),
        "Ernie4_5_MoeConfig": (64, 6, 2560, 1536),
        "NemotronHConfig": (8, 2, 4096, 7688),
    }.items():
        config = getattr(transformers, name)()
        found = read(tmp_path, json.loads(config.to_json_string(use_diff=False)))
        assert (
            found.num_experts, found.top_k, found.hidden_size, found.intermediate_size
        ) == sizes, name  # fmt: skip


def test_layers_that_nobody_tuned():
    """``--model untuned`` is five layers of these sizes, and no file of tuned tiles is theirs."""
    chosen = layer.options(["--model", "untuned,qwen3-30b,phi-3.5-moe", "--tokens", "1"], None)
    *untuned, qwen = chosen.problems
    sizes = {(p.num_experts, p.top_k, p.hidden_size, p.intermediate_size) for p in untuned}
    assert sizes == {
        (160, 8, 6144, 640), (64, 6, 2048, 1408), (16, 2, 4096, 6400), (896, 16, 3584, 384),
        (48, 1, 5120, 8192),
    }  # fmt: skip
    assert qwen.name == "qwen3-30b" and not any(problem.timed for problem in untuned)
    files = [path.name for path in resources.files("moe_ops.configs").iterdir()]
    for experts, _, hidden, inner in sizes:
        assert not any(f.startswith(f"E={experts},N={inner},K={hidden},") for f in files)
    with pytest.raises(ValueError, match="model must be one of .* got 'untund'"):
        problems.find_problems("untund")
