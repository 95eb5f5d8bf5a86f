"""Adapters of experts in the formats that vLLM reads, and models that they are merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from vllm_models import checkpoint

from moe_ops.demo import MODEL

ALPHA = 8


class Saved(NamedTuple):
    """An adapter's folder, and that of the model into which it is merged."""

    adapter: str
    merged: str


class Factors:
    """Random factors of a rank, scaled as PEFT does."""

    def __init__(self, seed: int, rank: int) -> None:
        self.generator, self.rank = torch.Generator().manual_seed(seed), rank

    def random(self, *shape: int) -> Tensor:
        """Numbers whose sums over the last axis have a size of one."""
        return torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5

    def a(self, experts: int, columns: int) -> Tensor:
        """``(experts, r, K)``."""
        return self.random(experts, self.rank, columns)

    def b(self, experts: int, rows: int) -> Tensor:
        """``(experts, N, r)``."""
        return self.random(experts, rows, self.rank) / 4

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """What is added to the weights ``(E, N, K)``."""
        return ALPHA / self.rank * b @ a


def of_experts(folder: Path, seed: int, *, shared: bool = False) -> Saved:
    """An adapter of the demo's experts; even seeds have half the rank of odd ones.

    ``shared``: one A of gate and of up for all experts, and one B of down.
    """
    weights = _wide(MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    factors, saved = Factors(seed, 4 + 4 * (seed % 2)), {}
    experts, width = config["num_local_experts"], config["moe_intermediate_size"]
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}.mlp.experts"
        for stack, name, n, k in (
            ("w1", "gate_proj", width, hidden),
            ("w2", "down_proj", hidden, width),
            ("w3", "up_proj", width, hidden),
        ):
            a = factors.a(1 if shared and stack != "w2" else experts, k)
            b = factors.b(1 if shared and stack == "w2" else experts, n)
            delta = factors.product(a, b).expand(experts, -1, -1)
            for expert in range(experts):
                weights[f"{place}.{expert}.{name}.weight"] += delta[expert]
                if not shared:
                    stem = f"base_model.model.{place}.{expert}.{name}"
                    saved |= {f"{stem}.lora_A.weight": a[expert]}
                    saved |= {f"{stem}.lora_B.weight": b[expert]}
            if shared:
                stem = f"base_model.model.{place}.{stack}"
                saved |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    return _saved(folder, factors.rank, saved, weights, config)


def of_gpt_oss(folder: Path, model: Path, seed: int) -> Saved:
    """An adapter of gpt-oss's stacked experts, whose gate and up rows alternate."""
    weights, config = _wide(model), json.loads((model / "config.json").read_text())
    factors, saved = Factors(seed, 8), {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, columns, rows = weight.shape
        a, b = factors.a(experts, columns), factors.b(experts, rows)
        weight += factors.product(a, b).mT
        stem, _, last = f"base_model.model.{name}".rpartition(".")
        stem += ".base_layer" if last == "gate_up_proj" else ""
        saved[f"{stem}.lora_A.weight"] = a.flatten(0, 1)
        saved[f"{stem}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return _saved(folder, 8, saved, weights, config)


def _wide(model: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint in float32."""
    from safetensors.torch import load_file

    return {name: x.float() for name, x in load_file(model / "model.safetensors").items()}


def _saved(
    folder: Path, rank: int, factors: dict[str, Tensor], merged: dict[str, Tensor], config: dict
) -> Saved:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    factors = {name: x.contiguous() for name, x in factors.items()}
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": ["gate_proj", "up_proj", "down_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))
    whole = checkpoint(folder.with_name(f"{folder.name}_merged"), merged, config)
    return Saved(str(folder), str(whole))
