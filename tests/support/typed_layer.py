"""What a type checker says of the layer: checked by mypy in `make lint`, never run."""

import torch
from torch import Tensor

from moe_ops import FusedMoE, Scheme

layer = FusedMoE(8, 2, 64, 32, scheme="fp8_block128", renormalize=False)
FusedMoE(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, activation="gelu")
FusedMoE(8, 2, 64, 32, schema="fp8_block128")  # type: ignore[call-arg]
FusedMoE(8, 2, 64, 32, tp_size="2")  # type: ignore[arg-type]
FusedMoE(8, 2, 64)  # type: ignore[call-arg]
x, logits = torch.randn(3, 64), torch.randn(3, 8)
result: Tensor | tuple[Tensor, Tensor] = layer(x, logits)
layer(x)  # type: ignore[call-arg]
layer(x, logits, padding=None)  # type: ignore[call-arg]
scheme: Scheme = layer.scheme
