"""vLLM's own quantization methods make and run layers of this library: `make test-vllm`.

Each method selects a backend, gets a checkpoint's tensors, processes them and applies the layer, on
the CPU and without a model. The result is compared with the oracle of the dequantized weights.
"""

import inspect

import pytest
import torch
from peers import vllm, vllm_methods
from peers.installed import named
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_formats import awq, bits_of, columns_first, rows_first

from moe_ops.bench import problems
from moe_ops.bench.harness import relative_error
from moe_ops.bench.layer import MAX_REL_ERR
from moe_ops.pipeline import forms
from moe_ops.scheme import get_scheme, is_packed

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
METHODS, COMPRESSED = vllm_methods.METHODS, vllm_methods.COMPRESSED
DENSE = problems.Problem("small", 8, 2, 256, 256, timed=False)
CPU = torch.device("cpu")
MXFP8 = "|fp8:1x32:e8m0"


class Launches(TorchDispatchMode):
    """Counts calls of this library's operators."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.namespace == "moe_ops"
        return function(*args, **kwargs or {})


@pytest.fixture(autouse=True, scope="module")
def engine(tmp_path_factory):
    """vLLM with the plug-in, a current configuration, one rank and a workspace."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker import workspace

    from moe_ops.integrations.vllm import register

    register()
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(CPU)
    meeting = f"file://{tmp_path_factory.mktemp('ranks')}/one"
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, meeting, 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        yield
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


def quantization_args(scheme, **more):
    kind = named("compressed_tensors.quantization.QuantizationArgs")
    size = get_scheme(scheme).weight.group.cols
    given = {"num_bits": bits_of(scheme), "type": "int", "strategy": "group", "group_size": size}
    return kind(**given, symmetric="zp" not in scheme, **more)


def compressed_integers(scheme, config):
    method = named(f"{COMPRESSED}_wna16.CompressedTensorsWNA16MoEMethod")
    return method(quantization_args(scheme), None, config)


def gptq(scheme, config):
    given = {
        "weight_bits": bits_of(scheme), "group_size": get_scheme(scheme).weight.group.cols,
        "desc_act": False, "is_sym": True, "lm_head_quantized": False, "dynamic": {},
        "full_config": {},
    }  # fmt: skip
    return named(f"{METHODS}.auto_gptq.AutoGPTQMoEMethod")(
        named(f"{METHODS}.auto_gptq.AutoGPTQConfig")(**given), config
    )


def auto_awq(scheme, config):
    size = get_scheme(scheme).weight.group.cols
    given = named(f"{METHODS}.auto_awq.AutoAWQConfig")(4, size, "zp" in scheme, False)
    return named(f"{METHODS}.auto_awq.AutoAWQMoEMethod")(given, config)


def integers_of_any_gpu(scheme, config):
    given = named(f"{METHODS}.moe_wna16.MoeWNA16Config")(
        "gptq", bits_of(scheme), get_scheme(scheme).weight.group.cols, "zp" in scheme, False, [], {}
    )
    return named(f"{METHODS}.moe_wna16.MoeWNA16Method")(given, config)


def compressed_under_fp8(scheme, config):
    method = named(f"{COMPRESSED}_w4a8_fp8.CompressedTensorsW4A8Fp8MoEMethod")
    return method(quantization_args("int4_w4a16_g128"), None, config)


def compressed_nvfp4(scheme, config, **more):
    return named(f"{COMPRESSED}_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod")(config, **more)


def modelopt_nvfp4(scheme, config):
    given = named(f"{METHODS}.modelopt.ModelOptNvFp4Config")(is_checkpoint_nvfp4_serialized=True)
    return named(f"{METHODS}.modelopt.ModelOptNvFp4FusedMoE")(given, config)


def deepseek_v4(scheme, config):
    return named(f"{METHODS}.mxfp4.Mxfp4MoEMethod")(config)


def deepseek_v4_under_fp8(scheme, config):
    return under_fp8(f"{METHODS}.mxfp4.Mxfp4MoEMethod", config)


def compressed_mxfp4_under_fp8(scheme, config):
    return under_fp8(f"{COMPRESSED}_w4a8_mxfp4.CompressedTensorsW4A8Mxfp4MoEMethod", config)


def under_fp8(path, config):
    """A method that is told the activations of the checkpoint, from vLLM 0.33 on."""
    method = named(path)
    known = "activation_key" in inspect.signature(method.__init__).parameters
    asked = {"activation_key": named(f"{METHODS}.utils.quant_utils.kMxfp8Dynamic")}
    return method(config, **(asked if known else {}))


def compressed_mxfp4(scheme, config):
    return named(f"{COMPRESSED}_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod")(config)


def auto_round_mxfp4(scheme, config):
    return named(f"{METHODS}.inc.schemes.inc_mxfp4_moe.INCMxfp4MoEMethod")(config)


def compressed_mxfp8(scheme, config):
    return named(f"{COMPRESSED}_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod")(config)


def modelopt_mxfp8(scheme, config):
    given = named(f"{METHODS}.modelopt.ModelOptMxFp8Config")(True, None, [])
    return named(f"{METHODS}.modelopt.ModelOptMxFp8FusedMoE")(given, config)


# Tensors of checkpoints, by the names of vLLM's parameters


def words_under(order, weight, scale, zeros, whichever=("w13", "w2")):
    def tensors(scheme, qs):
        out = {}
        for which, q in zip(whichever, qs, strict=True):
            made = order(q, bits_of(scheme))
            out |= {f"{which}_{weight}": made.weight, f"{which}_{scale}": made.scale}
            if made.zeros is not None:
                out[f"{which}_{zeros}"] = made.zeros
        return out

    return tensors


def bytes_of(scheme, qs):
    """MoeWNA16's: bytes along K, in the order of rows."""
    out = {}
    for which, q in zip(("w13", "w2"), qs, strict=True):
        out |= {f"{which}_qweight": q.data, f"{which}_scales": q.scale}
        if q.zero_point is not None:
            out[f"{which}_qzeros"] = q.zero_point
    return out


def words_under_fp8(scheme, qs):
    """compressed-tensors' int4 under fp8: group scales are not yet split."""
    out = {}
    for which, q in zip(("w13", "w2"), qs, strict=True):
        out[f"{which}_weight_packed"] = rows_first(q, 4).weight
        out[f"{which}_weight_scale"] = q.scale.float() * q.global_scale[..., None]
    return out


def small_floats(weight):
    def tensors(scheme, qs):
        out = {}
        for which, q in zip(("w13", "w2"), qs, strict=True):
            out |= {f"{which}_{weight}": q.data, f"{which}_weight_scale": q.scale}
        return out

    return tensors


def with_factors(weight, factor, of_rows, *, inverted):
    """NVFP4's: a factor per expert, of gate and of up; factors of rows are not read."""

    def tensors(scheme, qs):
        out = small_floats(weight)(scheme, qs)
        for which, q in zip(("w13", "w2"), qs, strict=True):
            of_expert = 1 / q.global_scale if inverted else q.global_scale
            shape = (-1, 2) if which == "w13" else (-1,)
            pair = of_expert[:, None].expand(-1, 2).contiguous() if which == "w13" else of_expert
            out[f"{which}_{factor}"] = pair.reshape(shape)
            out[f"{which}_{of_rows}"] = torch.ones_like(pair)
        return out

    return tensors


COMPRESSED_WORDS = words_under(rows_first, "weight_packed", "weight_scale", "weight_zero_point")
GPTQ_WORDS = words_under(columns_first, "qweight", "scales", "qzeros")
AWQ_WORDS = words_under(awq, "qweight", "scales", "qzeros")
CASES = {
    "compressed-tensors int4": (compressed_integers, "int4_w4a16_g32", COMPRESSED_WORDS),
    "compressed-tensors int4 zp": (compressed_integers, "int4_w4a16_g128_zp", COMPRESSED_WORDS),
    "compressed-tensors int8": (compressed_integers, "int8_w8a16_g128", COMPRESSED_WORDS),
    "GPTQ int4": (gptq, "int4_w4a16_g64", GPTQ_WORDS),
    "GPTQ int8": (gptq, "int8_w8a16_g128", GPTQ_WORDS),
    "AWQ": (auto_awq, "int4_w4a16_g128_zp", AWQ_WORDS),
    "WNA16 int4": (integers_of_any_gpu, "int4_w4a16_g64", bytes_of),
    "WNA16 int4 zp": (integers_of_any_gpu, "int4_w4a16_g64_zp", bytes_of),
    "WNA16 int8": (integers_of_any_gpu, "int8_w8a16_g64", bytes_of),
    "compressed-tensors W4A8": (compressed_under_fp8, "int4_w4a8_g128", words_under_fp8),
    "compressed-tensors NVFP4": (
        compressed_nvfp4, "nvfp4_w4a16",
        with_factors("weight_packed", "weight_global_scale", "input_global_scale", inverted=True),
    ),
    "ModelOpt NVFP4": (
        modelopt_nvfp4, "nvfp4_w4a16",
        with_factors("weight", "weight_scale_2", "input_scale", inverted=False),
    ),
    "DeepSeek-V4": (deepseek_v4, "mxfp4_w4a16", small_floats("weight")),
    "DeepSeek-V4 under fp8": (deepseek_v4_under_fp8, "mxfp4_w4a8_token", small_floats("weight")),
    "compressed-tensors MXFP4 W4A8": (
        compressed_mxfp4_under_fp8, "mxfp4_w4a8_token", small_floats("weight_packed"),
    ),
    "compressed-tensors MXFP4": (compressed_mxfp4, "mxfp4_w4a16", small_floats("weight_packed")),
    "AutoRound MXFP4": (auto_round_mxfp4, "mxfp4_w4a16", small_floats("weight_packed")),
    "compressed-tensors MXFP8": (compressed_mxfp8, MXFP8, small_floats("weight")),
    "ModelOpt MXFP8": (modelopt_mxfp8, MXFP8, small_floats("weight")),
}  # fmt: skip


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_method(monkeypatch, case, packs):
    """Plain, and packed as on a Hopper GPU."""
    monkeypatch.setattr(forms, "reads_packed", lambda *_, **__: packs)
    make, scheme, tensors = CASES[case]
    experts = problems.make_experts(DENSE, scheme, CPU)
    inputs = problems.make_inputs(DENSE, 7, "uniform", CPU)
    config = vllm.moe_config(experts, inputs)
    method = make(scheme, config)
    if scheme == "mxfp4_w4a8_token" and not hasattr(method, "activation_key"):
        scheme = "mxfp4_w4a16"
    layer = vllm_methods.layer_of(method, config, tensors(scheme, experts.stored))
    method.process_weights_after_loading(layer)
    served = method.moe_kernel.impl.fused_experts
    assert served.experts.quant_config.scheme.key == get_scheme(scheme).key
    call = vllm.call_of(method.moe_kernel, config, layer, inputs)
    assert is_packed(layer.w13_weight) == is_packed(layer.w2_weight) == packs
    with Launches() as launches:
        actual = call()
    assert launches.number > 0
    expected = problems.reference_rows(experts, inputs, torch.arange(7))
    rows = "bf16" if get_scheme(scheme).activation is None else "fp8"
    assert relative_error(actual, expected) < MAX_REL_ERR[rows]
