"""Interfaces of experts, and the code that their implementations share.

An implementation declares what it supports (``SUPPORTS``), its format, and how its rows are summed.
It defines ``apply``, which returns a new tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.experts.supports import Supports
from moe_ops.pipeline.formats import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ops.pipeline.row_spaces import check_batch_invariant
from moe_ops.pipeline.weight_and_reduce import TopKWeightAndReduce
from moe_ops.scheme import FusedMoEQuantConfig, Quant


class FusedMoEExperts(ABC):
    """Experts of a layer.

    Args:
        moe_config: the layer.
        quant_config: its scheme and scales.
        max_num_tokens: rows per expert for each dispatcher; Batched format only.
        num_dispatchers: ranks that send tokens; Batched format only.

    Raises:
        ValueError: ``max_num_tokens`` or ``num_dispatchers`` is given in the Standard format, or
            missing or not positive in the Batched format.
        NotImplementedError: ``moe_config.batch_invariant`` with a class or a scheme that does not
            support it.

    Source:
        vLLM ``FusedMoEExperts``.
    """

    SUPPORTS: ClassVar[Supports] = Supports()
    """What the class supports; by default unquantized experts only."""
    ACTIVATES_IN_GEMM1: ClassVar[bool | None] = None
    """Whether GEMM 1 applies the activation; None: the GEMMs are not operators of this library."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        checks.instance("moe_config", moe_config, FusedMoEConfig)
        checks.instance("quant_config", quant_config, FusedMoEQuantConfig)
        numbers = "max_num_tokens and num_dispatchers"
        if self.activation_format() is FusedMoEActivationFormat.Standard:
            if max_num_tokens is not None or num_dispatchers is not None:
                raise ValueError(
                    f"{numbers} should only be set for BatchedExperts activation format."
                )
        elif max_num_tokens is None or num_dispatchers is None:
            raise ValueError(f"{numbers} must be set for BatchedExperts activation format.")
        else:
            checks.at_least(1, max_num_tokens=max_num_tokens, num_dispatchers=num_dispatchers)
        if moe_config.batch_invariant:
            check_batch_invariant(quant_config.scheme)
            if not self.SUPPORTS.batch_invariant:
                raise NotImplementedError(
                    f"moe_config.batch_invariant must be False for {type(self).__name__}, got True"
                )
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    @staticmethod
    def is_monolithic() -> bool:
        """Whether the router is part of the experts."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether prepare must not quantize the rows."""
        return False

    @property
    def applies_router_weight_on_input(self) -> bool:
        """Whether the experts apply router weights on the input; if not, prepare applies them."""
        return False

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat:
        """The format that the experts take and return."""

    @staticmethod
    def is_supported_config(
        cls: type[FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: Quant | None,
        activation_key: Quant | None,
        activation_format: FusedMoEActivationFormat,
        capability: int | None = None,
    ) -> tuple[bool, str | None]:
        """Whether ``cls`` supports a configuration, and if not, the first reason.

        Args:
            cls: the experts class (an explicit argument, as in vLLM).
            moe_config: the layer.
            weight_key: the scheme's ``weight``.
            activation_key: the scheme's ``activation``.
            activation_format: the format that prepare-finalize produces.
            capability: compute capability times ten of a GPU that is not in this machine; None:
                the capability of ``moe_config.device``.
        """
        reason = cls.SUPPORTS.reason_against(
            moe_config,
            (weight_key, activation_key),
            cls.activation_format(),
            activation_format,
            capability,
        )
        return reason is None, reason

    def supports_expert_map(self) -> bool:
        """Whether ``apply`` takes an ``expert_map``."""
        return True

    def supports_chunking(self) -> bool:
        """Whether the tokens of a call may be split into several calls."""
        return self.activation_format() is FusedMoEActivationFormat.Standard

    def __getattr__(self, name: str) -> Any:
        """The tensors and dtypes of ``quant_config``, under their own names."""
        config = self.__dict__.get("quant_config")
        if config is not None and not name.startswith("_") and hasattr(config, name):
            return getattr(config, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class FusedMoEExpertsModular(FusedMoEExperts):
    """Experts that get the routing as an argument."""

    TAKES_LORA: ClassVar[bool] = False
    """Whether the ``differentiable_apply`` of this class takes adapters."""

    @staticmethod
    def is_monolithic() -> bool:
        """False."""
        return False

    @classmethod
    def has_gradients(cls) -> bool:
        """Whether there is a ``differentiable_apply`` that computes what ``apply`` does.

        A subclass that overrides ``apply`` does not inherit it.

        ``differentiable_apply(rows, w1, w2, routing, activation, expert_tokens_meta,
        apply_router_weight_on_input)`` gets rows that are not quantized, in the Standard format
        also not multiplied by router weights, and returns what ``apply`` returns.
        """
        return cls._differentiable_kind() is not None

    @classmethod
    def takes_lora(cls) -> bool:
        """Whether ``differentiable_apply`` takes adapters, as a last argument ``lora``.

        The class that defines it says so by ``TAKES_LORA = True``; a subclass may say False.
        """
        kind = cls._differentiable_kind()
        return bool(kind is not None and vars(kind).get("TAKES_LORA") and cls.TAKES_LORA)

    @classmethod
    def _differentiable_kind(cls) -> Any:
        """The class whose ``differentiable_apply`` computes what ``apply`` does; else None."""
        for kind in cls.__mro__:
            if "differentiable_apply" in vars(kind):
                return kind
            if "apply" in vars(kind):
                return None
        return None

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """Dtype of both workspaces; `explain` counts their bytes by it."""
        return act_dtype

    @abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of what ``apply`` allocates: ``(workspace13, workspace2, output)``.

        The first holds the larger of the GEMMs' outputs, the second the activation's output. The
        third is what ``apply`` returns. N is ``w1.shape[1]``.
        """

    @staticmethod
    def adjust_N_for_activation(N: int, activation: MoEActivation) -> int:  # noqa: N802
        """The width of the activation's output."""
        return N // 2 if activation.is_gated else N

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """The reduction that turns the rows of ``apply`` into tokens."""

    @abstractmethod
    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation | Activation | str,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Run the experts on what prepare returned.

        Args:
            hidden_states: rows in the format of these experts, quantized if ``a1q_scale`` is given;
                there may be none.
                Standard: one row per token, or one per slot (``T * k``) if prepare has applied the
                router weights.
            w1: ``(El, 2I, H)`` or ``(El, I, H)``.
            w2: ``(El, H, I)``.
            topk_weights: ``(T, k)``.
            topk_ids: ``(T, k)``.
            activation: a `MoEActivation`, its name, or an `Activation`.
            global_num_experts: E.
            expert_map: ``(E,)`` or None.
            a1q_scale: scales of the rows.
            expert_tokens_meta: row counts of the experts; required in the Batched format.
            apply_router_weight_on_input: whether router weights multiply the input. Prepare has
                then applied them, unless ``applies_router_weight_on_input``. Only experts whose
                reduction is a NoOP apply weights to the output.

        Returns:
            A new tensor in the ``in_dtype`` of ``moe_config``, shaped as ``workspace_shapes`` says.
        """


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Experts that route their tokens themselves."""

    @staticmethod
    def is_monolithic() -> bool:
        """True."""
        return True

    @abstractmethod
    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        router_logits: Tensor,
        activation: MoEActivation | Activation | str,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> Tensor:
        """Route, then run the experts: ``(T, H)``."""
