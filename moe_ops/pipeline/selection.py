"""Choose the experts that serve a configuration, from a list in order of preference.

Every class declares what it supports (`Supports`), and nothing else decides. All classes compute
the same numbers up to rounding, in the scheme that was asked for: another scheme is never
substituted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops import checks
from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.backends import exchange_of
from moe_ops.pipeline.exchange.groups import RankGroup
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

ON_DEMAND = "only if asked for: routes tokens itself (apply_monolithic)"


@dataclass(frozen=True)
class Candidate:
    """An implementation, whether it serves a configuration, and if it does not, why."""

    implementation: str
    supported: bool
    reason: str | None
    """The first rule that fails, or why a class that would serve is not chosen; else None."""


def select_kernel(
    config: FusedMoEConfig,
    scheme: str | Scheme | FusedMoEQuantConfig,
    *,
    experts: Experts | None = None,
    candidates: Sequence[Experts] = CANDIDATES,
) -> FusedMoEKernel:
    """Build a layer's kernel from the first of ``candidates`` that serves its configuration.

    The format is Batched if ``config.max_num_tokens`` is set and Standard otherwise. Tokens stay on
    their rank unless the parallel config exchanges them, with the exchange of `all2all_backend`
    over all processes (see `exchange_of`). Experts that route themselves are chosen only through
    ``experts``.

    Args:
        config: the layer.
        scheme: a name, a `Scheme`, or a `FusedMoEQuantConfig`, whose tensors the experts then use.
            With a name the kernel of a quantized scheme still lacks its scales, and calling it
            raises.
        experts: the only class to consider.
        candidates: classes in order of preference; may include your own.

    Returns:
        The kernel, with the experts that serve the layer and the exchange that it needs.

    Raises:
        TypeError: experts that are an instance.
        ValueError: ``experts`` does not serve the configuration (with the reason); an unknown
            scheme; ``config.has_bias`` and a ``scheme`` without a bias.
        NotImplementedError: no candidate serves the configuration (with the reason of each).
    """
    checks.instance("config", config, FusedMoEConfig)
    for cls in candidates if experts is None else (experts,):
        if not isinstance(cls, type):
            raise TypeError(f"experts must be a class, got an instance of {type(cls).__name__}")
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
    """The argument as a configuration, which has tensors only if the argument has them."""
    return scheme if isinstance(scheme, FusedMoEQuantConfig) else FusedMoEQuantConfig(scheme)


def wanted_format(config: FusedMoEConfig) -> FusedMoEActivationFormat:
    """The format that a configuration asks for."""
    formats = FusedMoEActivationFormat
    return formats.Standard if config.max_num_tokens is None else formats.BatchedExperts


def judge(
    config: FusedMoEConfig,
    scheme: Scheme,
    candidates: Sequence[Experts],
    capability: int | None = None,
    activation_format: FusedMoEActivationFormat | None = None,
) -> tuple[Candidate, ...]:
    """Ask each class whether it serves a configuration; the GPU need not be in this machine.

    ``activation_format``: the format of the rows; None: the one that the configuration asks for.
    """
    keys = (scheme.weight, scheme.activation, activation_format or wanted_format(config))
    elsewhere = () if capability is None else (capability,)
    rows = []
    for cls in candidates:
        supported, reason = cls.is_supported_config(cls, config, *keys, *elsewhere)
        if supported and cls.is_monolithic():
            reason = ON_DEMAND
        rows.append(Candidate(cls.__name__, supported, reason))
    return tuple(rows)


def chosen(rows: Sequence[Candidate], candidates: Sequence[Experts]) -> Experts | None:
    """The first supported class without a reason against it, or None."""
    pairs = zip(rows, candidates, strict=True)
    return next((cls for row, cls in pairs if row.supported and row.reason is None), None)


def prepare_finalize_of(
    config: FusedMoEConfig, experts: Experts, most_tokens: int | None = None
) -> FusedMoEPrepareAndFinalize:
    """The prepare-finalize that serves these experts; ranks exchange tokens among all processes.

    ``most_tokens``: the largest number of tokens that any rank passes; None: not known.

    Raises:
        ValueError: an exchange that needs ``most_tokens`` without it.
        NotImplementedError: ranks that exchange tokens, and experts that route themselves.
    """
    parallel = config.moe_parallel_config
    if parallel.exchanges_tokens:
        if experts.is_monolithic():
            raise NotImplementedError(
                "experts must be modular where ranks exchange tokens, got " + experts.__name__
            )
        return exchange_of(config, RankGroup(parallel.layer_size), most_tokens)
    if config.max_num_tokens is None:
        if experts.is_monolithic():
            return MoEPrepareAndFinalizeNoEPMonolithic()
        return MoEPrepareAndFinalizeNoEP()
    return BatchedPrepareAndFinalize(
        config.max_num_tokens, config.num_local_experts, num_dispatchers=1, rank=parallel.ep_rank
    )


def build(
    experts: Experts,
    config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig,
    most_tokens: int | None = None,
) -> FusedMoEKernel:
    """Build the kernel of these experts, with the prepare-finalize of their format."""
    part = prepare_finalize_of(config, experts, most_tokens)
    rows: dict[str, Any] = {}
    if experts.activation_format() is FusedMoEActivationFormat.BatchedExperts:
        rows["max_num_tokens"] = part.max_num_tokens_per_rank()
        rows["num_dispatchers"] = part.num_dispatchers()
    return FusedMoEKernel(
        part, experts(config, quant_config, **rows), moe_parallel_config=config.moe_parallel_config
    )
