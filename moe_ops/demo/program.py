"""The demo's model as one program, which reads whole windows and writes token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, StaticCache

ATTENTION = "moe_ops_demo"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention by the mask alone, for any number of tokens.

    The function of transformers asks whether there is one token, and so needs a second program.
    """
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


def load(path: Path, implementation: str, device: torch.device) -> PreTrainedModel:
    """Load the checkpoint in float32, so that implementations differ by a few roundings only."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation=implementation,
        attn_implementation=ATTENTION,
        dtype=torch.float32,
        local_files_only=True,
    )
    return model.to(device).eval()


def now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Program:
    """A model with a cache of keys and values, as a function of the next tokens of one sequence.

    Args:
        model: as `load` returns it.
        length: the most tokens of a sequence.
        compiled: whether to compile the function: once, for any number of tokens.
    """

    def __init__(self, model: PreTrainedModel, length: int, *, compiled: bool) -> None:
        config = model.config
        self.model, self.compiled = model, compiled
        self.cache = StaticCache(config, max_cache_len=length)
        sizes = (1, config.num_key_value_heads, config.head_dim)
        self.cache.early_initialization(*sizes, model.dtype, model.device)
        self.places = torch.arange(length, device=model.device)
        self.run = torch.compile(self._next, fullgraph=True) if compiled else self._next

    def _next(self, tokens: Tensor) -> Tensor:
        positions = self.cache.get_seq_length() + self.places[: tokens.shape[1]]
        mask = self.places <= positions[:, None]
        return self.model(
            tokens,
            past_key_values=self.cache,
            attention_mask=mask[None, None],
            position_ids=positions[None],
        ).logits[0]

    def read(self, tokens: Tensor) -> Tensor:
        """The logits ``(T, vocabulary)`` of a new sequence ``(T,)``."""
        self.cache.reset()
        return self.run(of_any_length(tokens))

    def write(
        self, prompt: Tensor, count: int, progress: Callable[[], object]
    ) -> tuple[list[int], float, bool]:
        """Continue a prompt ``(T,)`` greedily, on a GPU from a CUDA graph if compiled.

        Returns:
            The new tokens, tokens per second, and whether a CUDA graph was replayed.
        """
        token = of_any_length(prompt[-1:])  # a step's input and output

        def step() -> None:
            token.copy_(self.run(token)[-1].argmax())

        token.copy_(self.read(prompt)[-1].argmax())
        captured = self.compiled and token.is_cuda
        advance = capture(step) if captured else step
        token.copy_(self.read(prompt)[-1].argmax())
        written, start = [token.clone()], now()
        for _ in range(count - 1):
            advance()
            written.append(token.clone())
            progress()
        rate = (count - 1) / (now() - start)
        return torch.cat(written, dim=1)[0].tolist(), rate, captured


def of_any_length(tokens: Tensor) -> Tensor:
    """A copy ``(1, T)`` of ``(T,)``, marked so that nothing is compiled for a special T."""
    batch = torch.stack((tokens,))
    torch._dynamo.decorators.mark_unbacked(batch, 1)
    return batch


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step in a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
