"""Make the files of this folder: what users of version 0.2 have saved, and the outputs.

``python tests/data/saved_by_0.2/make.py FOLDER`` writes them. They were made once, by version 0.2.0
with torch 2.13 and transformers 5.17, and are never made again: every later version must read them.

Weights and inputs are small whole numbers, scales are powers of two, and the activation is relu2.
So every sum is exact, and the outputs have the same bits on every machine.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

import moe_ops

E, K, H, I, T = 3, 2, 64, 64, 6  # noqa: E741
NOTHING = -10000.0
"""A logit whose softmax is 0."""
LAYERS = {
    "unquantized": {"has_bias": True, "params_dtype": torch.bfloat16, "intermediate_size": 16},
    "unquantized_balanced": {"balanced": True, "hidden_size": 32, "intermediate_size": 16},
    "fp8_block128": {"hidden_size": 128, "intermediate_size": 128, "num_experts": 2},
    "fp8_tensor_static": {},
    "int8_channel": {"params_dtype": torch.bfloat16},
    "int4_w4a16_g32_zp": {"form": "packed", "ordered": True},
    "int8_w8a16_balanced": {"balanced": True, "form": "packed"},
    "mxfp4_w4a8": {"form": "fp8"},
    "nvfp4_w4a16": {"form": "packed", "params_dtype": torch.bfloat16},
}
"""Layers: a scheme, and in what they differ from the others."""
ENDS = {
    "data": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point",
    "global_scale": "weight_scale_2",
}  # fmt: skip
"""The ends of parameters' names."""
MODEL = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    "hidden_act": "relu2",
}  # fmt: skip
PORTABLE = {"BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 3}
MANY = {"kernel": "hopper_decode_many", "BLOCK_N": 256, "GROUP_M": 8, "num_stages": 3}
TUNED = {
    "E=8,N=14336,K=4096,device_name=NVIDIA_H200,scheme=mxfp4_w4a16.json": {
        "8": {"BLOCK_M": 16, "gemm1": PORTABLE, "gemm2": PORTABLE},
        "512": {"BLOCK_M": 64, "gemm1": MANY, "gemm2": MANY},
    },
    "E=512,N=512,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json": {},
}
"""Tuned files of the package, with entries for kernels that they lack."""


def whole(shape, scheme, seed):
    """Small whole numbers which the scheme holds exactly, with scales that are powers of two.

    The first column of each 16 has the largest number, which makes the scale; inputs are 0 there.
    """
    w = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
    quant = moe_ops.get_scheme(scheme).weight
    if quant is None:
        return w
    w[..., ::16] = quant.element.largest
    if quant.zero_point:
        w[..., 1::16] = -8
    if quant.global_scale:
        w[:, 0, 0] = 6 * 448
    return w


def inputs(hidden_size, num_experts, dtype):
    """Rows with two numbers that are not 0, and logits that choose two experts alike."""
    x = torch.zeros(T, hidden_size, dtype=dtype)
    logits = torch.full((T, num_experts), NOTHING, dtype=dtype)
    for t, column in enumerate((2, 7, 12, 18, 23, 28)):
        x[t, column], x[t, t - 6] = 1, -1
        logits[t, t % num_experts] = logits[t, (t + 1) % num_experts] = 0
    return x, logits


def layer_of(scheme, *, balanced=False, form="plain", ordered=False, **changes):
    """A layer of whole numbers, and the options that make another one like it."""
    options = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I} | changes
    options |= {"activation": "relu2", "scheme": None if scheme == "unquantized" else scheme}
    if balanced:
        options |= {"enable_eplb": True, "num_redundant_experts": 2}
    layer = moe_ops.FusedMoE(**options)
    experts, _, hidden, width = [*options.values()][:4]
    for which, shape in (("w13", (experts, 2 * width, hidden)), ("w2", (experts, hidden, width))):
        q = moe_ops.quantize_weight(whole(shape, scheme, len(which)), scheme)
        for kind, x in q._asdict().items():
            fill(layer, f"{which}_{ENDS[kind]}", x)
        fill(layer, f"{which}_input_scale", torch.tensor(0.5))
        fill(layer, f"{which}_bias", (torch.arange(shape[1]) % 5 - 2.0)[None])
    if ordered:
        layer.w13_input_order = torch.arange(hidden, dtype=torch.int32).roll(3)[None]
    if balanced:
        state = moe_ops.EplbState.make(1, experts, 2)
        layer.set_eplb_state(0, *state[1:])
        state.expert_load.copy_(torch.arange(experts + 2).flip(0)[None] ** 3)
        state.rebalance_([layer.expert_tensors()], 1, 1, 1)
    if form != "plain":
        {"packed": layer.pack_, "fp8": layer.as_fp8_}[form]()
    return layer, options


def fill(layer, name, value):
    """Set a parameter, if the layer has it; replicas are those of the first experts."""
    param = getattr(layer, name, None)
    if param is not None and value is not None:
        value = value.reshape(*value.shape, *[1] * (param.dim() - value.dim()))
        rows = torch.arange(len(param)) % len(value)
        param.data.copy_(value[rows])


class Block(nn.Module):
    """A router and a layer, as the documentation exports them."""

    def __init__(self):
        super().__init__()
        self.experts, _ = layer_of("unquantized", has_bias=True, intermediate_size=8)

    def forward(self, x, logits):
        """Return ``x`` plus the experts' outputs."""
        return x + self.experts(x, logits)


def save_layer(path, scheme, changes):
    """A state dict, what it was made from, and what the layer returns."""
    layer, options = layer_of(scheme, **changes)
    dtype = options.get("params_dtype", torch.float32)
    given = inputs(options["hidden_size"], options["num_experts"], dtype)
    saved = {"options": options, "form": changes.get("form", "plain"), "inputs": given}
    torch.save(saved | {"state": layer.state_dict(), "output": layer(*given)}, path)


def save_program(path):
    """An exported program for any number of tokens, and what it returns."""
    block, given = Block().eval().requires_grad_(False), inputs(64, E, torch.float32)
    tokens = {0: torch.export.Dim("tokens", min=1, max=4096)}
    program = torch.export.export(block, given, dynamic_shapes=(tokens, tokens))
    torch.export.save(program, path)
    torch.save({"inputs": given, "output": block(*given)}, path.with_suffix(".pt"))


def save_model(folder, scheme):
    """A quantized model of transformers, and what its experts return."""
    config = transformers.Qwen3MoeConfig(**MODEL)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.copy_((64 * parameter).round() / 64)
    experts = model.model.layers[0].mlp.experts
    for seed, weight in enumerate((experts.gate_up_proj, experts.down_proj)):
        weight.copy_(whole(weight.shape, scheme, seed))
    moe_ops.quantize_(model, scheme, progress=False).save_pretrained(folder)
    x, _ = inputs(64, E, torch.float32)
    ids = torch.arange(2 * T).view(T, 2) % MODEL["num_experts"]
    given = x[:, : MODEL["hidden_size"]], ids, torch.tensor([0.5, 0.25]).expand(T, 2)
    torch.save({"inputs": given, "output": experts(*given)}, folder.with_suffix(".pt"))


@torch.no_grad()
def main(folder):
    """Write all files below ``folder``."""
    for part in ("layers", "tuned", "models"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, changes in LAYERS.items():
        path = folder / "layers" / f"{name}.pt"
        save_layer(path, name.removesuffix("_balanced"), changes)
    save_program(folder / "block.pt2")
    for scheme in ("int4_w4a16_g32", "mxfp6_e2m3"):
        save_model(folder / "models" / scheme, scheme)
    for name, more in TUNED.items():
        packaged = Path(moe_ops.__file__).parent / "configs" / name
        text = json.dumps(json.loads(packaged.read_text()) | more, indent=1)
        (folder / "tuned" / name).write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
