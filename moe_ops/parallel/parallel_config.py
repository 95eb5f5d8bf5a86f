"""How ranks share a layer: group sizes, this process's ranks, and the exchange of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_ops import checks

ALL2ALL_BACKENDS = (
    "allgather_reducescatter",
    "naive",
    "deepep_high_throughput",
    "deepep_low_latency",
    "pplx",
    "mori",
    "nixl_ep",
    "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided",
    "symmetric",
    "fixed_capacity",
    "alltoall",
)
"""vLLM's names for the ways in which ranks exchange tokens, then names of this library."""
IMPLEMENTED_BACKENDS = (
    "allgather_reducescatter",
    "naive",
    "symmetric",
    "fixed_capacity",
    "alltoall",
)
"""The backends that a layer with several ranks can use today; the first two are one exchange."""


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """Sizes of the parallel groups and this process's ranks in them; hashable, no tensors.

    Without expert parallelism every expert is cut along I over ``tp_size`` ranks. With it
    (``use_ep``) every rank holds whole experts, a share of them.

    With data parallelism (``dp_size > 1``) every rank of the expert-parallel group has tokens of
    its own and gets their finished results: see `exchanges_tokens`. A config may describe an
    exchange that this library does not have yet. Layers and kernels of such a config are refused
    (see `lacks`).

    Raises:
        TypeError: a size or rank that is not an int, or a flag that is not a bool.
        ValueError: a size below 1, a rank outside its group, ``ep_size > 1`` without ``use_ep``,
            groups of equal sizes in which the ranks differ (``ep_rank`` and ``dp_rank``), or an
            unknown ``all2all_backend``.

    Source:
        vLLM ``FusedMoEParallelConfig``.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    sp_size: int = 1
    """Ranks over which tokens are split before the layer."""
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    enable_eplb: bool = False
    """Ids of the router are mapped to physical experts, whose load is recorded."""

    def __post_init__(self) -> None:
        for group in ("tp", "dp", "ep"):
            check_group(group, getattr(self, f"{group}_size"), getattr(self, f"{group}_rank"))
        _check_size("sp_size", self.sp_size)
        checks.flags(use_ep=self.use_ep, enable_eplb=self.enable_eplb)
        if self.ep_size > 1 and not self.use_ep:
            raise ValueError(f"ep_size must be 1 without use_ep, got {self.ep_size}")
        if self.dp_size == self.ep_size and self.dp_rank != self.ep_rank:
            raise ValueError(
                f"ep_rank must be dp_rank = {self.dp_rank} if ep_size is dp_size, got "
                f"{self.ep_rank}"
            )
        checks.one_of("all2all_backend", self.all2all_backend, ALL2ALL_BACKENDS)

    @classmethod
    def make(
        cls,
        tp_size: int = 1,
        tp_rank: int = 0,
        dp_size: int = 1,
        dp_rank: int = 0,
        pcp_size: int = 1,
        pcp_rank: int = 0,
        *,
        sp_size: int = 1,
        enable_expert_parallel: bool = False,
        all2all_backend: str = "allgather_reducescatter",
        enable_eplb: bool = False,
    ) -> FusedMoEParallelConfig:
        """Derive the layer's groups from the groups of the model.

        The ranks of all tensor-, data- and prefill-context-parallel groups form one group of
        ``n = tp * dp * pcp`` with rank ``(dp_rank * pcp + pcp_rank) * tp + tp_rank``. With
        ``enable_expert_parallel`` (and ``n > 1``) it is the layer's expert-parallel group, and no
        expert is cut; otherwise it is its tensor-parallel group.

        Args:
            tp_size: ranks of a tensor-parallel group of the model.
            tp_rank: this process's rank in that group.
            dp_size: data-parallel replicas.
            dp_rank: the replica of this process.
            pcp_size: ranks that share the tokens of a prefill.
            pcp_rank: this process's rank among them.
            sp_size: ranks over which tokens are split before the layer.
            enable_expert_parallel: hold whole experts, if there is more than one rank.
            all2all_backend: one of `ALL2ALL_BACKENDS`.
            enable_eplb: ids of the router are mapped to physical experts, whose load is recorded.

        Raises:
            ValueError: a size below 1, or a rank outside its group.
        """
        for group in (("tp", tp_size, tp_rank), ("dp", dp_size, dp_rank)):
            check_group(*group)
        check_group("pcp", pcp_size, pcp_rank)
        checks.flags(enable_expert_parallel=enable_expert_parallel)
        size = tp_size * dp_size * pcp_size
        rank = (dp_rank * pcp_size + pcp_rank) * tp_size + tp_rank
        use_ep = enable_expert_parallel and size > 1
        kind = "ep" if use_ep else "tp"
        spread: dict[str, Any] = {f"{kind}_size": size, f"{kind}_rank": rank}
        return cls(
            **spread,
            dp_size=dp_size,
            dp_rank=dp_rank,
            sp_size=sp_size,
            use_ep=use_ep,
            all2all_backend=all2all_backend,
            enable_eplb=enable_eplb,
        )

    def lacks(self) -> str | None:
        """Return what a layer of this config needs and the library does not have; None: it can run.

        The text is an error message: argument, rule, way out and value.
        """
        if self.dp_size > 1:
            refused = self._lacks_of_data_parallelism()
            if refused is not None:
                return refused
        ranks = max(self.tp_size, self.ep_size, self.sp_size)
        if ranks > 1 and self.all2all_backend not in IMPLEMENTED_BACKENDS:
            return (
                f"all2all_backend must be one of {list(IMPLEMENTED_BACKENDS)} with more than one "
                f"rank: no other backend is implemented yet, got {self.all2all_backend!r}"
            )
        return None

    def _lacks_of_data_parallelism(self) -> str | None:
        if not self.use_ep:
            return (
                "dp_size must be 1 without expert parallelism: parts of experts do not exchange "
                "tokens yet. Replicas that hold all experts need no dp_size; to share experts, "
                f"pass ep_size for the whole group, got dp_size={self.dp_size}"
            )
        if self.tp_size > 1:
            return (
                "tp_size must be 1 with dp_size and expert parallelism, where no expert is cut, "
                f"got tp_size={self.tp_size}"
            )
        if self.ep_size != self.dp_size and not self.is_sequence_parallel:
            return (
                "ep_size must be dp_size without sequence parallelism: ranks of one replica have "
                "the same tokens, which would be computed several times, got "
                f"ep_size={self.ep_size} and dp_size={self.dp_size}"
            )
        if self.enable_eplb:
            return (
                "enable_eplb must be False with dp_size > 1: the load is not summed over ranks "
                f"yet, got True with dp_size={self.dp_size}"
            )
        return None

    @property
    def exchanges_tokens(self) -> bool:
        """Whether a layer sends tokens to the ranks of their experts, and results back.

        Sequence-parallel layers with load balancing gather tokens before they route them instead,
        so that every rank counts the load of all tokens.
        """
        return self.use_all2all_kernels and not self.enable_eplb

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether tokens are split over ranks before the layer."""
        return self.sp_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens are sent to the ranks of their experts."""
        return self.use_ep and (self.dp_size > 1 or self.is_sequence_parallel)

    @property
    def use_deepep_ht_kernels(self) -> bool:
        """Whether buffers are those of DeepEP's high-throughput kernels."""
        return self.use_ep and self.all2all_backend == "deepep_high_throughput"

    @property
    def use_deepep_ll_kernels(self) -> bool:
        """Whether buffers are those of DeepEP's low-latency kernels."""
        return self.use_ep and self.all2all_backend == "deepep_low_latency"


def _check_size(name: str, size: int) -> None:
    checks.at_least(1, **{name: size})


def check_group(group: str, size: int, rank: int) -> None:
    """Check that a group has at least one rank, and that this process is one of its ranks."""
    _check_size(f"{group}_size", size)
    checks.integer(f"{group}_rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"{group}_rank must be in 0..{size - 1}, got {rank}")
