"""How ranks share a layer: group sizes, this process's ranks, and the exchange of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from moe_ops import checks
from moe_ops.brief import brief

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
GATHERING_BACKENDS = ("allgather_reducescatter", "naive", "symmetric")
"""The backends that can take every token to every rank, as parts of experts need."""


@dataclass(frozen=True, repr=False)
class FusedMoEParallelConfig:
    """Sizes of the parallel groups and this process's ranks in them; hashable, no tensors.

    Without expert parallelism every expert is cut along I over ``tp_size`` ranks. With it
    (``use_ep``) every rank holds whole experts, a share of them.

    With data parallelism (``dp_size > 1``) the ranks of each replica have tokens of their own and
    get their finished results: see `exchanges_tokens`. The ranks of a layer are numbered replica by
    replica. A config may describe an exchange that this library does not have yet. Layers and
    kernels of such a config are refused (see `lacks`).

    Raises:
        TypeError: a size or rank that is not an int, or a flag that is not a bool.
        ValueError: a size below 1, a rank outside its group, ``ep_size > 1`` without ``use_ep``,
            a rank that is not in its replica ``dp_rank``, or an unknown ``all2all_backend``.

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
    pcp_size: int = 1
    """Ranks that share the tokens of a prefill; each has tokens of its own."""

    __repr__ = brief

    def __post_init__(self) -> None:
        for group in ("tp", "dp", "ep"):
            check_group(group, getattr(self, f"{group}_size"), getattr(self, f"{group}_rank"))
        _check_size("sp_size", self.sp_size)
        _check_size("pcp_size", self.pcp_size)
        checks.flags(use_ep=self.use_ep, enable_eplb=self.enable_eplb)
        if self.ep_size > 1 and not self.use_ep:
            raise ValueError(f"ep_size must be 1 without use_ep, got {self.ep_size}")
        each, rest = divmod(self.layer_size, self.dp_size)
        if not rest and self.layer_rank // each != self.dp_rank:
            raise ValueError(
                f"{'ep' if self.use_ep else 'tp'}_rank must be one of the {each} ranks of replica "
                f"dp_rank = {self.dp_rank}, from {self.dp_rank * each} on, got {self.layer_rank}"
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
            pcp_size=pcp_size,
            sp_size=sp_size,
            use_ep=use_ep,
            all2all_backend=all2all_backend,
            enable_eplb=enable_eplb,
        )

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, **options: Any) -> FusedMoEParallelConfig:
        """Derive the layer's groups from the model's `DeviceMesh`: see `make`.

        Pass the mesh to the layer too, as ``tp_group``.

        Args:
            mesh: dimensions named ``dp``, ``pcp`` and ``tp``, in this order; any may be absent.
            **options: the keywords of `make` after the ranks.

        Raises:
            TypeError: ``mesh`` is no `DeviceMesh`.
            ValueError: a dimension of another name, or another order.
        """
        checks.instance("mesh", mesh, DeviceMesh)
        order, names = ("dp", "pcp", "tp"), mesh.mesh_dim_names or ()
        if len(names) != mesh.ndim or list(names) != [name for name in order if name in names]:
            raise ValueError(
                f"mesh must have dimensions named by some of {list(order)}, in this order, got "
                f"{list(names)}"
            )
        numbers: dict[str, Any] = {}
        for name in names:
            numbers[f"{name}_size"] = mesh[name].size()
            numbers[f"{name}_rank"] = mesh.get_local_rank(name)
        return cls.make(**numbers, **options)

    def lacks(self) -> str | None:
        """Return what a layer of this config needs and the library does not have; None: it can run.

        The text is an error message: argument, rule, way out and value.
        """
        replicas, ranks = self.dp_size * self.pcp_size, self.layer_size
        if self.dp_size > 1 and self.use_ep and self.tp_size > 1:
            return (
                "tp_size must be 1 with dp_size and expert parallelism, where no expert is cut, "
                f"got tp_size={self.tp_size}"
            )
        if ranks % replicas:
            return (
                "dp_size (times pcp_size) must divide the ranks that share the layer's experts, "
                f"{ranks} of tp_size or ep_size. Replicas that hold all experts need no dp_size, "
                f"got {replicas}"
            )
        backends = IMPLEMENTED_BACKENDS if self.use_ep else GATHERING_BACKENDS
        if ranks > 1 and self.all2all_backend not in backends:
            return (
                f"all2all_backend must be one of {list(backends)} with more than one rank"
                f"{'' if self.use_ep else ' without expert parallelism'}: no other backend is "
                f"implemented yet, got {self.all2all_backend!r}"
            )
        return None

    @property
    def layer_size(self) -> int:
        """Number of ranks that share the layer's experts."""
        return self.tp_size * self.ep_size

    @property
    def layer_rank(self) -> int:
        """This process's rank among them."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def replica_size(self) -> int:
        """Number of ranks that have the same tokens; they are next to each other."""
        if self.is_sequence_parallel:
            return 1
        return self.layer_size // (self.dp_size * self.pcp_size)

    @property
    def tokens_rank(self) -> int:
        """Which of the layer's batches of tokens this rank has; 0 if there is one."""
        return self.layer_rank // self.replica_size

    @property
    def exchanges_tokens(self) -> bool:
        """Whether ranks have tokens of their own, which a layer sends to other ranks' experts.

        The ranks of a replica (`replica_size`) exchange each token once.
        """
        return 1 <= self.replica_size < self.layer_size

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
        """Whether buffers have the form of DeepEP's high-throughput kernels."""
        return self.use_ep and self.all2all_backend == "deepep_high_throughput"

    @property
    def use_deepep_ll_kernels(self) -> bool:
        """Whether buffers have the form of DeepEP's low-latency kernels."""
        return self.use_ep and self.all2all_backend == "deepep_low_latency"


def _check_size(name: str, size: int) -> None:
    checks.at_least(1, **{name: size})


def check_group(group: str, size: int, rank: int) -> None:
    """Check that a group has at least one rank, and that this process is one of its ranks."""
    _check_size(f"{group}_size", size)
    checks.integer(f"{group}_rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"{group}_rank must be in 0..{size - 1}, got {rank}")
