"""Checks of a layer over several ranks that need the other ranks, or what wraps the layer.

Ranks whose layers differ would compute wrong numbers or abort. The ranks compare their layers once,
in the first eager call that communicates, with a small collective on the host. Calls that are
traced or captured compare nothing. A comparison cannot help ranks that do not meet: a rank that
makes no call, a rank whose layer does not communicate, and ranks with the same group but with
calls of different layers still wait until the timeout of the process group.

Wrappers for data parallelism take parameters of the same name for the same values. A layer's
parameters over several ranks are different experts, or different parts of experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.parallel import DistributedDataParallel

from moe_ops.activation import kind_and_key
from moe_ops.layer.base import ExpertLayer
from moe_ops.layer.options import OF_THE_CONFIG, FusedMoEOptions
from moe_ops.layer.parameters import parameter_specs
from moe_ops.loading.names import ROUTER_TENSORS, SHARED_GATE
from moe_ops.parallel import FusedMoEParallelConfig
from moe_ops.parallel.agreement import agree, gather_texts, process_group
from moe_ops.parallel.eplb_state import LayerEplbState
from moe_ops.pipeline.exchange.base import is_capturing
from moe_ops.pipeline.exchange.groups import RankGroup

OF_THIS_RANK = (
    *OF_THE_CONFIG, "moe_parallel_config", "is_sequence_parallel", "tp_group", "device", "prefix",
    "expert_mapping", "shared_experts", "activation", "scheme", "params_dtype",
)  # fmt: skip
"""Options that ranks of one layer may have different values of, or that `option_facts` replaces."""
OF_A_RANK = ("expert_map", "w13_input_order")
"""Buffers that differ between ranks."""

_SHARDED: WeakSet[nn.Module] = WeakSet()
"""Layers under `fully_shard`, whose parameters are whole only during a pass or `unshard`."""
_IN_REPLICAS: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, _Maps]] = (
    WeakKeyDictionary()
)
"""The layers that have been found right in each `DistributedDataParallel`, with these maps."""


class _Maps(NamedTuple):
    """The maps of a balanced layer, at one time."""

    state: LayerEplbState | None
    writes: int

    @classmethod
    def of(cls, layer: ExpertLayer) -> _Maps:
        state = layer.eplb_state
        return cls(state, 0 if state is None else state.num_writes())

    def are(self, other: _Maps) -> bool:
        """Whether nobody has set or written other maps between the two times."""
        return self.state is other.state and self.writes == other.writes


def rank_group_of(parallel: FusedMoEParallelConfig, options: FusedMoEOptions) -> RankGroup:
    """Make the group of a layer, and check it if the layer communicates or a group is given.

    Raises:
        TypeError, ValueError: as `RankGroup.resolve`; a group that exists, of other ranks than
            the layer's.
    """
    ranks = RankGroup.of_layer(parallel, options.tp_group)
    sums = parallel.exchanges_tokens or options.reduce_results
    if (sums and parallel.layer_size > 1) or options.tp_group is not None:
        ranks.check("tp_group", parallel)
    return ranks


def check_rank_call(layer: ExpertLayer, tokens: Tensor) -> None:
    """Check an eager call of a layer over several ranks, or of replicas of a balanced layer.

    Only the first call costs something, and the first one after experts have moved.

    Raises:
        ValueError: see `compare_ranks` and `check_replicas`.
    """
    if torch.compiler.is_compiling():
        return
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None:
        check_replicas(layer, wrapper)
    communicates = layer.is_spread and (layer.exchanges_tokens or layer.reduce_results)
    if communicates and not layer.state.ranks_agree:
        compare_ranks(layer, None if layer.exchanges_tokens else tokens.shape[0])


def refuse_kernel_without_exchange(prepare_finalize: Any) -> None:
    """Raise for a part that leaves tokens on their ranks, in a layer that exchanges tokens."""
    raise NotImplementedError(
        "layer.kernel must be None with is_sequence_parallel or dp_size > 1, or have a "
        "prepare_finalize that exchanges tokens between ranks (output_is_reduced), got "
        f"{type(prepare_finalize).__name__}"
    )


def compare_ranks(layer: ExpertLayer, num_tokens: int | None = None) -> None:
    """Compare the layers of all ranks, unless that was done, or the call is traced or captured.

    Args:
        layer: this rank's layer.
        num_tokens: number of tokens of the call, if all ranks must have as many.

    Raises:
        ValueError: on all ranks: a group of another size, or an option that differs between ranks.
    """
    if torch.compiler.is_compiling() or layer.ranks_agree or is_capturing(layer.w13_weight):
        return
    if layer.w13_weight.is_meta or detect_fake_mode(layer.w13_weight) is not None:
        return
    group, device = layer.rank_group, layer.compute_device
    if group.size_and_rank() is None:
        return  # no group: the call itself raises

    def check() -> tuple[None, dict[str, str]]:
        group.check("tp_group", layer.state.parallel)
        facts = facts_of(layer)
        if num_tokens is not None:
            facts["the number of tokens"] = str(num_tokens)
        return None, facts

    agree(lambda text: group.gather_texts(text, device), check)
    layer.state = replace(layer.state, ranks_agree=True)


def counts_of_ranks(layer: ExpertLayer, counts: list[int]) -> list[int]:
    """The token counts that any rank wants to run, if the calls of ranks meet.

    Ranks with other numbers of experts may have other kernels, and a rank that makes fewer calls
    than the others would leave them waiting.
    """
    meet = layer.exchanges_tokens or layer.reduce_results
    if layer.rank_group.size == 1 or not meet:
        return counts
    texts = layer.rank_group.gather_texts(json.dumps(counts), layer.compute_device)
    return sorted({count for text in texts for count in json.loads(text)})


def option_facts(options: FusedMoEOptions) -> dict[str, str]:
    """Return the options that must be the same on all ranks of a layer, as texts by name.

    There are none in a layer of one rank.
    """
    parallel = options.parallel_config()
    if parallel.layer_size == 1:
        return {}
    names = [option.name for option in fields(options) if option.name not in OF_THIS_RANK]
    facts = {name: _text_of(getattr(options, name)) for name in names}
    facts["activation"] = kind_and_key(options.activation)[1]
    facts["scheme"] = options.known_scheme.key
    for option in fields(parallel):
        if not option.name.endswith("_rank"):
            facts[option.name] = str(getattr(parallel, option.name))
    return facts


def _text_of(value: Any) -> str:
    """Return equal texts for equal values of an option: 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.17g}"
    return str(value)


def facts_of(layer: ExpertLayer) -> dict[str, str]:
    """Return what must be the same on all ranks of a layer, as texts by name."""
    sizes = ("num_experts", "top_k", "model_hidden_size", "intermediate_size")
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    facts = {name: str(getattr(layer, size)) for name, size in zip(names, sizes, strict=True)}
    facts |= layer.option_facts
    facts["params_dtype"] = str(layer.state.in_dtype)
    if layer.exchanges_tokens and layer.state.exchange is not None:
        facts["the exchange of layer.kernel"] = type(layer.state.exchange).__name__
    if layer.enable_eplb:
        facts["the digest of the experts' placement"] = _digest_of_placement(layer)
    for name in ROUTER_TENSORS:
        x = layer._buffers.get(name)  # not the gate, which is trained
        if x is not None:
            numbers = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            facts[f"the digest of {name}"] = hashlib.sha256(numbers).hexdigest()[:16]
    return facts


def _digest_of_placement(layer: ExpertLayer) -> str:
    held = repr(layer.state.held_placement().logical).encode()
    return hashlib.sha256(held).hexdigest()[:16]


def check_replicas(layer: ExpertLayer, wrapper: DistributedDataParallel) -> None:
    """Check that `DistributedDataParallel` only wraps ranks that hold the same experts.

    It cannot be told by a module inside of it what to leave alone, so the weights are overwritten
    by the time of this error. The ranks of its group compare their layers in the first call, and
    again in the first call that records gradients of experts after these have moved. A rank whose
    experts have not moved does not come to that comparison.

    Raises:
        ValueError: on all ranks: it synchronizes tensors that differ between its ranks.
    """
    checked, maps = _IN_REPLICAS.setdefault(wrapper, WeakKeyDictionary()), _Maps.of(layer)
    first = layer not in checked
    if not first and (not torch.is_grad_enabled() or checked[layer].are(maps)):
        return
    tensors = _synchronized(layer, wrapper)
    if first or any(x.requires_grad for x in tensors.values()):
        _compare_replicas(layer, wrapper, [*tensors])
    checked[layer] = maps


def _synchronized(layer: ExpertLayer, wrapper: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the layer's tensors of experts that `DistributedDataParallel` synchronizes."""
    experts = {name: x for name, x in layer._parameters.items() if name != SHARED_GATE}
    own: set[int] = {id(x) for x in experts.values() if x is not None}
    if wrapper.broadcast_buffers:
        own |= {id(layer._buffers[name]) for name in OF_A_RANK}
    named = chain(
        wrapper.module.named_parameters(remove_duplicate=False),
        wrapper.module.named_buffers(remove_duplicate=False),
    )
    ignored = wrapper.parameters_to_ignore
    return {name: x for name, x in named if id(x) in own and name not in ignored}


def _compare_replicas(
    layer: ExpertLayer, wrapper: DistributedDataParallel, names: list[str]
) -> None:
    """Compare the layers of all ranks of a wrapper, which synchronizes the tensors ``names``.

    Raises:
        ValueError: on all ranks: the layers hold different experts, or hold them in other rows.
    """
    parallel = layer.state.parallel
    here = {"rank": parallel.layer_rank, "names": names, "placed": _digest_of_placement(layer)}
    texts = gather_texts(wrapper.process_group, layer.compute_device, json.dumps(here))
    heard = [json.loads(text) for text in texts]
    ranks = [other["rank"] for other in heard]
    names = next((other["names"] for other in heard if other["names"]), [])
    if names and len(set(ranks)) > 1:
        raise ValueError(
            "DistributedDataParallel must have a process_group of replicas that hold the same "
            f"experts, got ranks {ranks} of the {parallel.layer_size} that share this layer. It "
            f"has overwritten {names} of all but the first of them: make the model again, call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) "
            "with these names (and those of other such layers) before DistributedDataParallel"
            "(model), or give it a process_group of replicas"
        )
    placed = [other["placed"] for other in heard]
    if names and len(set(placed)) > 1:
        raise ValueError(
            "DistributedDataParallel must have replicas that place experts alike, got placements "
            f"with the digests {placed}: it would average the gradients of different experts. Make "
            "the layers and their EplbState again, load a checkpoint, and sum the loads of "
            "replicas before each rebalance_: torch.distributed.all_reduce(state.expert_load, "
            "group=process_group)"
        )


def check_sharded(layer: ExpertLayer, name: str, x: Tensor) -> None:
    """Check that a tensor that a wrapper gives the layer is not cut over the layer's own ranks.

    `fully_shard` gives a `DTensor` over a mesh, and `FullyShardedDataParallel` a view of one flat
    parameter.

    Raises:
        NotImplementedError: the ranks among which it is cut share the layer, so they hold
            different experts; or these ranks cannot be known.
    """
    mesh = getattr(x, "device_mesh", None)
    if mesh is not None:
        _SHARDED.add(layer)
    if layer.state.parallel.layer_size == 1:
        return
    if mesh is not None:
        others = {*mesh.mesh.flatten().tolist()} - {dist.get_rank()}
        ranks = dist.get_process_group_ranks(process_group(layer.rank_group.name))
        if others & {*ranks}:
            raise NotImplementedError(
                f"{name} must not be sharded over ranks that share the layer {sorted(ranks)}, "
                "which hold different experts, got a mesh of ranks "
                f"{sorted({*mesh.mesh.flatten().tolist()})}: give fully_shard a mesh of replicas, "
                "or leave the layer's parameters out (ignored_params)"
            )
    if getattr(x._base, "_is_flat_param", False):
        raise NotImplementedError(
            f"{name} must not be part of FullyShardedDataParallel in a layer over several ranks, "
            "which hold different experts, got a view of a FlatParameter: leave the layer out "
            "(ignored_modules), or use fully_shard with a mesh of replicas"
        )


def check_own_weights(layer: ExpertLayer) -> None:
    """Check that a layer's weights are its own parameters, whole, before they are overwritten.

    Raises:
        NotImplementedError: they are not: see `taken_by`.
    """
    reason = taken_by(layer, held_by(layer))
    if reason is not None:
        raise NotImplementedError(f"layer must hold its weights as own parameters, got {reason}")


def is_cut(layer: ExpertLayer) -> bool:
    """Whether each rank of `fully_shard` holds its part of every weight of the experts now.

    It does not between the forward and the backward pass, when weights are gathered.

    Raises:
        NotImplementedError: the ranks share the layer: see `check_sharded`.
    """
    held = {name: x for name, x in held_by(layer).items() if x is not None}
    for name, x in held.items():
        check_sharded(layer, name, x)
    return all(hasattr(x, "device_mesh") for x in held.values())


def held_by(layer: ExpertLayer) -> dict[str, Tensor | None]:
    """Return the tensors of a layer's experts by name, as the layer sees them."""
    return {name: getattr(layer, name) for name in parameter_specs(layer.sizes)}


def taken_by(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> str | None:
    """Say which of a module's weights a wrapper holds or computes; None: the module has them all.

    `fully_shard` leaves a `DTensor` with a part of the numbers, or for a while a gathered copy, and
    `FullyShardedDataParallel` a view of one axis or no parameter. Parametrizations and pruning
    compute the weight from another tensor, and would overwrite what is written to it.
    """
    for name, x in tensors.items():
        if x is None:
            continue
        if hasattr(x, "device_mesh") or module in _SHARDED:
            return (
                f"{name} under fully_shard: call this before fully_shard, or load the state dict "
                "of a plain layer with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict "
                "(full_state_dict=True)"
            )
        if not isinstance(x, nn.Parameter) or (x.dim() == 1 and name.endswith("_weight")):
            return (
                f"{name} from a wrapper (a parametrization, pruning or FullyShardedDataParallel): "
                "call this before wrapping, or take the wrapper off (remove_parametrizations, "
                "prune.remove, summon_full_params)"
            )
    return None
