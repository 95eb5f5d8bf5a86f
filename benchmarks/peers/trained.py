"""Other implementations of the layer with its backward pass, timed in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.bench.problems import Call, Experts, Inputs
from peers import TransformersExperts, transformers_arguments
from peers.installed import lacks


class Differentiable(NamedTuple):
    """A layer with gradients."""

    forward: Call
    """Eager, and recorded for a backward pass."""
    leaves: dict[str, Tensor]
    """Tensors that require grad, by their names in `Experts` and `Inputs`."""
    mains: Mapping[str, Tensor] = MappingProxyType({})
    """float32 tensors to which gradients are added: by the backward pass, or those of `leaves`
    after it."""

    def step(self, grad: Tensor) -> dict[str, Tensor]:
        """Forward and backward: the output as ``out``, and the gradients or sums by name."""
        out = self.forward()
        gradients = torch.autograd.grad(out, list(self.leaves.values()), grad)
        results = dict(zip(self.leaves, gradients, strict=True))
        for name, main in self.mains.items():
            if name in results:
                main.add_(results[name])
        return {"out": out.detach(), **results, **self.mains}

    def kept(self) -> dict[int, int]:
        """Bytes of the storages that autograd holds after forward, by their addresses."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # not the tensor itself: a graph must not hold its own output

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.forward()
        del out  # until here every storage that was counted was alive
        return kept


def address(tensor: Tensor) -> int:
    """Where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def hf_trained(
    implementation: str, experts: Experts, inputs: Inputs, *, frozen: bool = False
) -> Differentiable:
    """`peers.hf` with gradients of tokens, router weights and both weights unless frozen.

    The memory of the weights is shared.
    """
    layer = TransformersExperts(experts, implementation)
    x, ids, weights = transformers_arguments(inputs)
    x, weights = (t.detach().requires_grad_() for t in (x, weights))
    leaves = {"x": x, "topk_weights": weights}
    if not frozen:
        layer.requires_grad_()
        leaves.update(w1=layer.gate_up_proj, w2=layer.down_proj)
    return Differentiable(lambda: layer(x, ids, weights), leaves)


def hf_adapted(
    implementation: str,
    experts: Experts,
    inputs: Inputs,
    factors: dict[str, Tensor],
    scaling: float,
) -> Differentiable:
    """`peers.hf` with an adapter as PEFT runs it: every pass makes ``W + B @ A`` of all experts.

    Args:
        implementation: as for `peers.hf`.
        experts: frozen weights in bf16.
        inputs: tokens with their routing.
        factors: ``a1``, ``b1``, ``a2`` and ``b2``: ``(1, E, r, K)`` and ``(1, E, N, r)``.
        scaling: factor of ``B @ A``.

    Source:
        PEFT's ``ParamWrapper`` (pull request 3577: one ``baddbmm`` for one active adapter).
    """
    layer = TransformersExperts(experts, implementation)
    x, ids, weights = transformers_arguments(inputs)
    tensors = {"x": x, "topk_weights": weights, **factors}
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    parameters = {"gate_up_proj": "1", "down_proj": "2"}

    def adapted(name: str) -> Tensor:
        a, b = (leaves[factor + parameters[name]][0] for factor in "ab")
        return torch.baddbmm(getattr(layer, name), b, a, alpha=scaling)

    def forward() -> Tensor:
        made = {name: adapted(name) for name in parameters}
        return torch.func.functional_call(layer, made, (leaves["x"], ids, leaves["topk_weights"]))

    return Differentiable(forward, leaves)


LIGER, SONIC = "liger", "sonicmoe"
SONIC_TILES = (
    (128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False),
)  # fmt: skip
"""Tiles ``(M, N, pingpong)`` among which SonicMoE's tuner chooses here, in clusters of two along M.
Its own list for sm_90 has 9 to 22 tiles and clusters for each of six products, and takes minutes
to compile."""


def liger(experts: Experts, inputs: Inputs) -> Differentiable:
    """The autograd function of Liger's experts, which reads one number back on every call."""
    run = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply
    weights = inputs.topk_weights.to(inputs.x.dtype)
    leaves = _leaves(x=inputs.x, topk_weights=weights, w1=experts.w1, w2=experts.w2)
    ids = inputs.topk_ids
    x, weights, w1, w2 = leaves.values()
    return Differentiable(lambda: run(x, w1, w2, ids, weights), leaves)


def sonicmoe(experts: Experts, inputs: Inputs) -> Differentiable:
    """SonicMoE with a given routing, on rows of gate and up as they are stored."""
    functional = import_module("sonicmoe.functional")
    silu = import_module("sonicmoe.enums").ActivationType.SWIGLU
    cut_tuners(import_module("quack.gemm_interface"))
    count, (tokens, top_k) = len(experts.w1), inputs.topk_ids.shape
    token_of_slot = torch.arange(tokens, dtype=torch.int32, device=inputs.x.device)
    token_of_slot = token_of_slot.repeat_interleave(top_k)
    ids = inputs.topk_ids.flatten()
    leaves = _leaves(x=inputs.x, topk_weights=inputs.topk_weights, w1=experts.w1, w2=experts.w2)
    x, weights, w1, w2 = leaves.values()

    def forward() -> Tensor:
        out, _ = functional.moe_general_routing_inputs(
            x,
            weights.flatten(),
            token_of_slot,
            ids,
            w1.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            count,
            torch.cuda.current_stream().cuda_stream,
            silu,
            concat_layout=True,
        )
        return out

    return Differentiable(forward, leaves)


def cut_tuners(interface: Any) -> None:
    """Leave the configurations of `SONIC_TILES` to every tuner of QuACK's GEMMs for sm_90."""
    for tuner in vars(interface).values():
        configs = getattr(tuner, "configs", None)
        if isinstance(configs, list):
            tuner.configs = [made for made in configs if _kept(made.kwargs.get("config"))]


def _kept(config: Any) -> bool:
    """Whether a configuration of QuACK is one of `SONIC_TILES`, or for another GPU."""
    if config is None or config.device_capacity != 9:
        return True
    tile = (config.tile_m, config.tile_n, config.pingpong)
    return tile in SONIC_TILES and config.cluster_m == 2 and not config.swap_ab


def _leaves(**tensors: Tensor) -> dict[str, Tensor]:
    """The tensors with gradients, without copies."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


class TrainedPeer(NamedTuple):
    """An implementation with gradients of tokens, router weights and both weights in bf16."""

    missing: Callable[[], str | None]
    """Says what is missing to run it here; None if nothing is."""
    make: Callable[[Experts, Inputs], Differentiable]


TRAINED_PEERS = {
    LIGER: TrainedPeer(partial(lacks, "liger_kernel", "liger_kernel.ops.fused_moe"), liger),
    SONIC: TrainedPeer(
        partial(lacks, "sonicmoe", "sonicmoe.functional", "quack.gemm_interface"), sonicmoe
    ),
}
"""Name -> the implementation. All compute the gradients of weights in every backward pass."""
