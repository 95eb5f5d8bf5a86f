"""Layers of random weights in any scheme and form, as `quantize_` makes them."""

import torch

import moe_ops
from moe_ops.scheme import get_scheme

WIDE = 128
"""H and I for schemes with groups, and for packed weights."""


@torch.no_grad()
def quantized(scheme, experts, top_k, *, form="plain", **options):
    """A layer on the CPU in a scheme and a form: ``plain`` or ``packed``."""
    options = {"params_dtype": torch.bfloat16, **options}
    layer = moe_ops.FusedMoE(experts, top_k, WIDE, WIDE, **options)
    for seed, p in enumerate(layer.parameters()):
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) / 8)
    if scheme != "unquantized":
        g = torch.Generator().manual_seed(0)
        x, logits = (
            torch.randn(9, n, generator=g).to(options["params_dtype"]) for n in (WIDE, experts)
        )
        run = {"calibrate": lambda m: m(x, logits)} if get_scheme(scheme).input_scale_names else {}
        moe_ops.quantize_(layer, scheme, progress=False, **run)
    if form == "packed":
        layer.pack_()
    return layer
