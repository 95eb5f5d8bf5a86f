"""Compiles the experts' kernels when vLLM compiles its own, so that no request waits for them.

vLLM runs a model once with the most tokens and captures graphs of few. Between these lie numbers
of tokens for which other kernels run. They are compiled here: after vLLM's own warm-up, and before
its graphs are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from vllm.platforms import current_platform

from moe_ops.inspect.warmup import warmup
from moe_ops.integrations._engines import attribute_of, or_say, say_once
from moe_ops.integrations.vllm._experts import ENGINE, MoeOpsExperts
from moe_ops.integrations.vllm._factories import Change, everywhere

MODULE, NAME = "vllm.model_executor.warmup.kernel_warmup", "kernel_warmup"
LATE = "a request that is the first to need a kernel of the experts compiles it"


def warm_up_changes() -> Iterator[Change]:
    """Yield what to set in vLLM's modules; a vLLM without this warm-up is one log line.

    vLLM's worker for GPUs alone warms kernels up, and other devices run references.
    """
    if not current_platform.is_cuda():
        return
    function = attribute_of(MODULE, NAME)
    if function is None:
        say_once(ENGINE, f"{LATE}: vLLM has no {MODULE}.{NAME}")
        return
    yield from everywhere(function, _and_ours)


def _and_ours(function: Callable) -> Callable:
    """Wrap vLLM's warm-up; what fails of ours is a line of its log, and the server starts."""

    def warm(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(worker, *args, **kwargs)
        most = worker.scheduler_config.max_num_batched_tokens
        or_say(ENGINE, LATE, lambda: warm_up(worker.get_model(), most))
        return result

    return warm


def warm_up(model: nn.Module, num_tokens: int) -> None:
    """Run one layer of each kind with every kernel that 1 to ``num_tokens`` tokens need.

    Left out are rows that vLLM quantizes before it sends them to other ranks, the Batched format,
    and adapters: vLLM runs their kernels itself, for the numbers of tokens of its graphs.
    """
    warmed = set()
    for layer, experts in _layers(model):
        config, library = experts.moe_config, experts.experts
        w1, w2 = (_loaded_weight(layer, name) for name in ("w13_weight", "w2_weight"))
        shapes, key = (w1.shape, w1.dtype, w2.shape, w2.dtype), experts.library_activation.key
        kind = (*shapes, config.experts_per_token, library.quant_config.scheme, key)
        if kind in warmed:
            continue
        warmed.add(kind)
        parallel = config.moe_parallel_config
        ranks = parallel.dp_size if parallel.use_all2all_kernels else 1
        warmup(
            w1,
            w2,
            config.experts_per_token,
            num_tokens * ranks,
            hidden_dtype=config.in_dtype,
            activation=key,
            expert_map=getattr(layer, "expert_map", None),
            quant_config=library.quant_config,
            batch_invariant=library.moe_config.batch_invariant,
        )
    if warmed:
        say_once(ENGINE, f"compiled the experts' kernels for up to {num_tokens} tokens")


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, MoeOpsExperts]]:
    """The layers of a model whose experts are warmed up, with these experts.

    vLLM's runner of a layer has the layer's method too, but not its weights.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, MoeOpsExperts) or _gets_rows_of_vllm(experts):
            continue
        if _loaded_weight(layer, "w13_weight") is not None:
            yield layer, experts


def _gets_rows_of_vllm(experts: MoeOpsExperts) -> bool:
    """Whether rows come in another dtype than tokens: vLLM quantized them and sent them here."""
    return not experts.expects_unquantized_inputs and experts.quant_config.quant_dtype is not None


def _loaded_weight(layer: nn.Module, name: str) -> Any:
    """A weight of a layer, which compressed-tensors' method calls packed; None: there is none."""
    return getattr(layer, name, getattr(layer, f"{name}_packed", None))
