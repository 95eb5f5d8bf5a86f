"""Which experts serve a configuration: a list in order of preference, and why others do not.

Every class says itself what it supports (`Supports`); nothing else decides. All of them compute the
same numbers up to rounding in the scheme that was asked for, and no other scheme ever takes its
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops import checks
from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.experts import (
    BatchedGroupedGemmExperts,
    BatchedTritonExperts,
    FusedMoEExperts,
    GroupedGemmExperts,
    MonolithicExperts,
    NaiveBatchedExperts,
    TritonExperts,
)
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.layer_checks import lacks_here
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.no_ep import MoEPrepareAndFinalizeNoEP, MoEPrepareAndFinalizeNoEPMonolithic
from moe_ops.pipeline.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_ops.scheme import FusedMoEQuantConfig, Scheme

Experts = type[FusedMoEExperts]

CANDIDATES: tuple[Experts, ...] = (
    TritonExperts,
    GroupedGemmExperts,
    MonolithicExperts,
    BatchedTritonExperts,
    BatchedGroupedGemmExperts,
    NaiveBatchedExperts,
)
"""Best first within a format: fused kernels, then separate steps (more passes over memory), then
plain PyTorch, which works on all padded rows."""

ON_DEMAND = "on demand only: routes tokens itself (apply_monolithic)"


@dataclass(frozen=True)
class Candidate:
    """An implementation, whether it serves a configuration, and what speaks against it."""

    implementation: str
    supported: bool
    reason: str | None
    """The first rule that fails, or why it is not chosen though it would serve; None: nothing."""


def select_kernel(
    config: FusedMoEConfig,
    scheme: str | Scheme | FusedMoEQuantConfig,
    *,
    experts: Experts | None = None,
    candidates: Sequence[Experts] = CANDIDATES,
) -> FusedMoEKernel:
    """The kernel of a layer: the first of ``candidates`` that serves its configuration.

    The format is Batched if ``config.max_num_tokens`` is set and Standard otherwise; tokens stay on
    their rank. Experts that route themselves are chosen only through ``experts``.

    Args:
        config: the layer.
        scheme: a name, a `Scheme`, or a `FusedMoEQuantConfig`, whose tensors the experts then use.
            With a name the kernel of a quantized scheme still lacks its scales, and calling it
            raises.
        experts: the class to use, and no other.
        candidates: classes in order of preference, your own among them.

    Raises:
        ValueError: ``experts`` does not serve the configuration (with the reason); an unknown
            scheme; ``config.has_bias`` and a ``scheme`` without a bias.
        NotImplementedError: none of ``candidates`` does, with the reason of each.
    """
    checks.instance("config", config, FusedMoEConfig)
    quant = as_quant_config(scheme)
    if config.has_bias and quant.w1_bias is None and quant.w2_bias is None:
        raise ValueError(
            "scheme must be a FusedMoEQuantConfig with w1_bias or w2_bias when config.has_bias, "
            f"got scheme {quant.scheme.name} without them"
        )
    if experts is None:
        rows = judge(config, quant.scheme, candidates)
        experts = chosen(rows, candidates)
        if experts is None:
            reasons = "".join(f"\n  {row.implementation}: {row.reason}" for row in rows)
            lacks = lacks_here(quant.scheme, torch.device(config.device))
            reasons += f"\n{lacks}" if lacks else ""
            raise NotImplementedError(
                f"no experts serve scheme {quant.scheme.name} in this configuration:{reasons}"
            )
    else:
        (row,) = judge(config, quant.scheme, (experts,))
        if not row.supported:
            raise ValueError(
                "experts must be a class that serves the configuration, got "
                f"{row.implementation}: {row.reason}"
            )
    return build(experts, config, quant)


def as_quant_config(scheme: str | Scheme | FusedMoEQuantConfig) -> FusedMoEQuantConfig:
    """The scheme with its tensors, if it has come with them."""
    return scheme if isinstance(scheme, FusedMoEQuantConfig) else FusedMoEQuantConfig(scheme)


def format_of(config: FusedMoEConfig) -> FusedMoEActivationFormat:
    """The format that a configuration asks for."""
    formats = FusedMoEActivationFormat
    return formats.Standard if config.max_num_tokens is None else formats.BatchedExperts


def judge(
    config: FusedMoEConfig,
    scheme: Scheme,
    candidates: Sequence[Experts],
    capability: int | None = None,
) -> tuple[Candidate, ...]:
    """What each class says of a configuration, on a GPU that need not be here."""
    keys = (scheme.weight, scheme.activation, format_of(config))
    elsewhere = () if capability is None else (capability,)
    rows = []
    for cls in candidates:
        supported, reason = cls.is_supported_config(cls, config, *keys, *elsewhere)
        if supported and cls.is_monolithic():
            reason = ON_DEMAND
        rows.append(Candidate(cls.__name__, supported, reason))
    return tuple(rows)


def chosen(rows: Sequence[Candidate], candidates: Sequence[Experts]) -> Experts | None:
    """The first class that nothing speaks against."""
    pairs = zip(rows, candidates, strict=True)
    return next((cls for row, cls in pairs if row.supported and row.reason is None), None)


def prepare_finalize_of(config: FusedMoEConfig, experts: Experts) -> FusedMoEPrepareAndFinalize:
    """What brings tokens to such experts on one rank."""
    if config.max_num_tokens is None:
        if experts.is_monolithic():
            return MoEPrepareAndFinalizeNoEPMonolithic()
        return MoEPrepareAndFinalizeNoEP()
    parallel = config.moe_parallel_config
    return BatchedPrepareAndFinalize(
        config.max_num_tokens, config.num_local_experts, parallel.dp_size, parallel.ep_rank
    )


def build(
    experts: Experts, config: FusedMoEConfig, quant_config: FusedMoEQuantConfig
) -> FusedMoEKernel:
    """The kernel of these experts, with the prepare-finalize of their format."""
    part = prepare_finalize_of(config, experts)
    rows: dict[str, Any] = {}
    if experts.activation_format() is FusedMoEActivationFormat.BatchedExperts:
        rows["max_num_tokens"] = part.max_num_tokens_per_rank()
        rows["num_dispatchers"] = part.num_dispatchers()
    return FusedMoEKernel(
        part,
        experts(config, quant_config, **rows),
        moe_parallel_config=config.moe_parallel_config,
    )
