"""Routings that are drawn: uniform or Zipf's law, and routers of whole models that follow them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROUTINGS = ("zipf", "uniform")
EXPONENT = 1.0
"""Exponent of Zipf's law: the r-th most likely expert has 1/r of the odds of the first."""
SEED = 2026


def drawn_logits(kind: str, steps: int, layers: int, tokens: int, experts: int) -> Tensor:
    """Logits ``(steps, layers, tokens, experts)``, float32, of which the largest k are a draw.

    The draw is one of k experts without replacement, with the odds of ``kind``: the logarithm of
    the odds plus Gumbel noise. Each layer has an order of experts of its own. On the CPU, so that
    draws are the same everywhere.
    """
    generator = torch.Generator().manual_seed(SEED)
    order = torch.rand(layers, experts, generator=generator).argsort(-1).argsort(-1)
    odds = -EXPONENT * (order + 1.0).log() if kind == "zipf" else torch.zeros(layers, experts)
    uniform = torch.rand(steps, layers, tokens, experts, generator=generator)
    noise = -(-uniform.clamp(1e-9, 1 - 1e-7).log()).log()
    return odds[:, None] + noise


class DrawnRouters:
    """The routers of a model's MoE blocks, which choose by drawn logits, other ones in each step.

    A router still multiplies its input by its weight, which is the identity here, and its input is
    a static buffer. `advance` writes the logits of the next step into it, on the device: a captured
    graph draws anew in each replay.

    Args:
        blocks: MoE blocks with a linear router (``gate`` or ``router``) of at least E columns.
        kind: one of `ROUTINGS`.
        tokens: tokens of a step.
        steps: number of draws, after which they begin again.
    """

    def __init__(self, blocks: list[Any], kind: str, tokens: int, steps: int) -> None:
        routers = [_router_of(block) for block in blocks]
        experts, width = routers[0].weight.shape
        if experts > width:
            raise ValueError(f"routers must have {experts} columns or more, got {width}")
        like = {"dtype": routers[0].weight.dtype, "device": routers[0].weight.device}
        drawn = drawn_logits(kind, steps, len(blocks), tokens, experts)
        self.logits, self.steps = drawn.to(**like), steps
        self.step = torch.zeros(1, dtype=torch.int64, device=like["device"])
        self.inputs = torch.zeros(len(blocks), tokens, width, **like)
        self._hooks = [
            router.register_forward_pre_hook(_reads(inputs))
            for router, inputs in zip(routers, self.inputs, strict=True)
        ]
        for router in routers:
            router.weight.data.zero_()
            router.weight.data[:, :experts].fill_diagonal_(1.0)
            if getattr(router, "bias", None) is not None:
                router.bias.data.zero_()

    def advance(self) -> None:
        """Go to the next step's logits."""
        logits = self.logits.index_select(0, self.step)[0]
        self.inputs[..., : logits.shape[-1]].copy_(logits)
        self.step.add_(1).remainder_(self.steps)

    def remove(self) -> None:
        """Let the routers read their tokens again."""
        for hook in self._hooks:
            hook.remove()


def _router_of(block: Any) -> Any:
    router = getattr(block, "gate", None)
    return block.router if router is None else router


def _reads(inputs: Tensor) -> Any:
    """A hook that gives a router another input."""

    def read(router: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs.view(args[0].shape), *args[1:])

    return read
