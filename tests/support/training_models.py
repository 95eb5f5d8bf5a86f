"""Small models that trainers train: of `FusedMoE` layers, and of transformers' experts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_ops

E, K, H, I = 8, 2, 32, 24  # noqa: E741
KINDS = ("layer", "qwen3", "gpt-oss")
"""`FusedMoE`; experts of the default layout; transposed experts with biases. There are also "qlora"
(experts in int8, of which only adapters are trained), "frozen" (layers whose router alone is
trained) and "llama4"."""


class Block(nn.Module):
    """A router and a `FusedMoE`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, dtype=dtype)
        self.moe = moe_ops.FusedMoE(E, K, H, I, params_dtype=dtype, has_bias=True)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.moe(x, self.router(x))
        return out


class Stack(nn.Module):
    """Blocks on an embedding; the result is the loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, H, dtype=dtype)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(2))
        self.reentrant: bool | None = None
        """``use_reentrant`` of checkpoints; None: no checkpoints."""

    def checkpoint(self, *, use_reentrant: bool) -> None:
        self.reentrant = use_reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.layers:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = x @ self.embedding.weight.t() / H**0.5
        targets = ids.roll(-1, -1).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets)


class Language(nn.Module):
    """A model of transformers; the result is the loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.set_experts_implementation("moe_ops")

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    def checkpoint(self, *, use_reentrant: bool) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids, use_cache=False).loss
        return loss


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model in training mode that maps ids ``(batch, length)`` to a loss."""
    torch.manual_seed(0)
    if kind in ("layer", "frozen"):
        stack = Stack(dtype)
        for block in stack.layers:
            block.moe.requires_grad_(kind == "layer")
        return stack
    pytest.importorskip("transformers")
    import tiny_transformers

    import_module("moe_ops.integrations.transformers")
    if kind == "qlora":
        return Language(_with_adapters().to(dtype)).train()
    if kind == "qwen3":
        model = tiny_transformers.tiny_qwen3("cpu")
    elif kind == "llama4":
        model = tiny_transformers.tiny_llama4()
        import_module("moe_ops.integrations.transformers").adapt(model)
    else:
        where = "transformers.models.gpt_oss.modeling_gpt_oss"
        model = tiny_transformers.build(where, "GptOssExperts")[0]
    return Language(model.to(dtype)).train()


def _with_adapters() -> Any:
    """Adapters of PEFT, by a stand-in, beside experts that are quantized."""
    import peft_stand_ins

    model = peft_stand_ins.model_with_adapters(peft_stand_ins.StandIn(), "cpu")
    moe_ops.quantize_(model, "int8_w8a16", progress=False)
    import_module("moe_ops.integrations.transformers").adapt(model)
    for wrapper in peft_stand_ins.wrappers(model):
        wrapper.lora_A["b"].requires_grad_(False)
        wrapper.lora_B["b"].requires_grad_(False)
    return model


def batch_of(rows: int, length: int = 13) -> Tensor:
    """Token ids."""
    g = torch.Generator().manual_seed(length)
    return torch.randint(3, 60, (rows, length), generator=g)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name; every parameter that requires grad has one."""
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    lacking = [name for name, grad in found.items() if grad is None]
    assert not lacking, lacking
    return {name: grad.clone() for name, grad in found.items() if grad is not None}
