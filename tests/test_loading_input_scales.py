"""Static scales of tokens in checkpoints: factors, or what is divided by."""

import pytest
import torch
from checkpoints import NAMES, Experts
from test_loading import RANKS

import moe_ops

E, K, H, I = 8, 2, 64, 256  # noqa: E741


def nvfp4(x, divide):
    """compressed-tensors' ``nvfp4-pack-quantized``, or ModelOpt's NVFP4."""
    out = {}
    for field, q in x.quantized("nvfp4")._asdict().items():
        for e in range(E):
            amax = torch.tensor(3.0 + e + (field == "down"))
            weight, rows = q.global_scale[e], 2688 / amax
            out |= {
                f"experts.{e}.{NAMES[field]}.{suffix}": tensor
                for suffix, tensor in (
                    ("weight_packed" if divide else "weight", q.data[e]),
                    ("weight_scale", q.scale[e]),
                    ("weight_global_scale", (1 / weight).view(1)) if divide
                    else ("weight_scale_2", 1 / (1 / weight)),
                    ("input_global_scale", rows.view(1)) if divide else ("input_scale", 1 / rows),
                )
            }  # fmt: skip
    return out


def test_global_scales_of_tokens_divide_or_multiply():
    """Bit by bit one layer from both forms: the largest factor of all experts is for all."""
    x = Experts.random(E, H, I)
    for rank in RANKS:
        layers = [moe_ops.FusedMoE(E, K, H, I, quant_config="nvfp4", **rank) for _ in range(3)]
        for layer, divide in zip(layers, (True, False), strict=False):
            assert moe_ops.load_checkpoint(layer, nvfp4(x, divide), progress=False).is_complete
        first = layers[0]
        list(layers[2].load_weights(nvfp4(x, divide=True).items()))
        layers[2].quant_method.process_weights_after_loading(layers[2])
        amax = 3.0 + E - 1
        for name, largest in (("w13", amax), ("w2", amax + 1)):
            scale = getattr(first, f"{name}_input_scale")
            assert (scale == 1 / (2688 / torch.tensor(largest))).all()
        g = torch.Generator().manual_seed(0)
        call = torch.randn(9, H, generator=g), torch.randn(9, E, generator=g)
        for other in layers[1:]:
            state = zip(first.state_dict().values(), other.state_dict().values(), strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in state)
            assert torch.equal(first(*call), other(*call))


def test_tokens_that_are_not_quantized_have_no_global_scale():
    layer = moe_ops.FusedMoE(E, K, H, I, quant_config="nvfp4_w4a16")
    source = nvfp4(Experts.random(E, H, I), divide=True)
    assert moe_ops.load_checkpoint(layer, source, progress=False).is_complete


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0, 1e-40])
def test_a_global_scale_of_tokens_that_cannot_be_used(value):
    source = nvfp4(Experts.random(E, H, I), divide=True)
    name = "experts.5.up_proj.input_global_scale"
    layer = moe_ops.FusedMoE(E, K, H, I, quant_config="nvfp4")
    with pytest.raises(ValueError, match=f"{name}: .*positive and finite"):
        moe_ops.load_checkpoint(layer, source | {name: torch.tensor([value])}, progress=False)
    del source[name], source[name.replace("up", "gate")]
    with pytest.raises(ValueError, match=r"1 missing \(w13_input_scale\[5\].w1|2 missing"):
        moe_ops.load_checkpoint(layer, source, progress=False)
