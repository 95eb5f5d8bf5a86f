"""How configurations print."""

import torch
from small_layers import make

import moe_ops


def test_values_print_on_a_screen():
    """What differs from the defaults; of a tensor its dtype and shape."""
    q = moe_ops.quantize_weight(torch.randn(4, 128, 128), "fp8_block128")
    config = moe_ops.FusedMoEQuantConfig.from_weights("fp8_block128", q, q)
    assert repr(config) == (
        "FusedMoEQuantConfig(scheme=Scheme('fp8_block128', Quant('fp8:1x128:float32'), "
        "Quant('fp8:128x128:float32')), w1_scale=<float32 (4, 1, 1)>, w2_scale=<float32 (4, 1, 1)>)"
    )
    options = moe_ops.FusedMoEOptions(renormalize=False, tp_size=2)
    assert repr(options) == "FusedMoEOptions(renormalize=False, tp_size=2)"
    assert repr(moe_ops.FusedMoEParallelConfig()) == "FusedMoEParallelConfig()"
    layer = make(scheme="fp8_channel", tp_size=2)
    assert len(repr(layer.moe_config)) < 500 and len(repr(layer)) < 500
