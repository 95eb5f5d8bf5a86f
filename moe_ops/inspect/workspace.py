"""`workspace_nbytes`: how much memory a call allocates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import checks
from moe_ops.activation import Activation, MoEActivation, kind_and_key
from moe_ops.dispatch.device import Device, assumed, device_facts
from moe_ops.inspect.devices import target_named
from moe_ops.inspect.scratch import scratch_sizes
from moe_ops.pipeline.batched_prepare import BatchedPrepareAndFinalize
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.experts import BatchedTritonExperts, TritonExperts
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.no_ep import MoEPrepareAndFinalizeNoEP
from moe_ops.routing import RoutingMethodType
from moe_ops.scheme import FusedMoEQuantConfig, Scheme, as_scheme, quantize_weight

ALLOCATION = 512
"""The caching allocator's unit, in bytes."""
FORMATS = ("standard", "batched")


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of operators' results while they are alive.

    Within this context ``peak`` is the largest sum so far, with every tensor rounded up to the
    allocator's 512 bytes. Tensors from outside are not counted. Memory that an operator frees again
    before it returns is not visible here; it is added if ``device`` says which GPU would allocate
    it.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self.peak, self.device = 0, device
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for storage in _storages((args, kwargs)):  # what is not known comes from outside
            self._hold(storage, 0)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._hold(storage, _rounded(storage.nbytes()))
        within = () if self.device is None else scratch_sizes(func, args, self.device)
        held = sum(nbytes for _, nbytes in self._held.values())
        self.peak = max(self.peak, held + sum(map(_rounded, within)))
        return out

    def _hold(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        ref = StorageWeakRef(storage)
        self._held.setdefault(ref.cdata, (ref, nbytes))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALLOCATION) * ALLOCATION


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = _pytree.tree_leaves(values)
    return [x.untyped_storage() for x in leaves if isinstance(x, Tensor)]


def workspace_nbytes(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    scheme: str | Scheme = "unquantized",
    activation: MoEActivation | Activation | str = "silu",
    format: str = "standard",
    chunk_size: int | None = None,
    batch_invariant: bool = False,
    device: str | None = None,
) -> int:
    """Bytes that a layer has allocated at its peak, its output included.

    This is for `fused_experts`, and for `FusedMoEKernel.apply` with `TritonExperts` (``standard``)
    or `BatchedTritonExperts` (``batched``). It counts tile plans, rows and their scales in every
    form, each while it is alive, and rows that Hopper's kernels pack. Every tensor is rounded up to
    the allocator's 512 bytes. The number comes from a run of the layer on tensors without data, so
    it depends on sizes only.

    A compiled layer holds no more than this, with one exception: if the number of tokens is a
    symbol, rows that a GEMM quantizes are held in both forms.

    Args:
        num_tokens: T; in the Batched format also the rows of each expert.
        hidden_size: H.
        intermediate_size: I, per partition.
        num_experts: El, local experts: tokens are taken to choose among them alone.
        top_k: k.
        dtype: dtype of the activations.
        scheme: a name or key that `get_scheme` knows, or a `Scheme`.
        activation: does not change the size, with a gate or without.
        format: ``standard`` or ``batched``.
        chunk_size: as in `FusedMoEKernel`; Standard format only.
        batch_invariant: as in `fused_experts`; plans then have other sizes.
        device: the device whose kernels allocate: a name such as ``sm_90``, ``h100`` or ``cpu``
            (see `moe_ops.inspect.devices.target_named`); None: the current GPU, or a CPU without
            one.

    Returns:
        The peak in bytes.

    Raises:
        TypeError: a dtype other than bf16, fp16 and fp32.
        ValueError: an unknown scheme, activation, format or device; a size that is not positive; a
            ``chunk_size`` that is not positive, or that is given in the Batched format.
        NotImplementedError: ``batch_invariant`` with a scheme that does not support it; a `Scheme`
            that operators cannot compute.
    """
    kind, _ = kind_and_key(activation)
    facts = _gpu_facts(device)
    checks.one_of("format", format, FORMATS)
    checks.at_least(0, num_tokens=num_tokens)
    checks.at_least(
        1, hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts
    )
    checks.topk("top_k", top_k, num_experts)
    checks.dtype_of("dtype", dtype, checks.FLOATS)
    config = FusedMoEConfig(
        num_experts,
        top_k,
        hidden_size,
        intermediate_size,
        num_experts,
        activation,
        "meta",
        RoutingMethodType.Default,
        in_dtype=dtype,
        is_act_and_mul=kind.is_gated,
        max_num_tokens=max(1, num_tokens),
        batch_invariant=batch_invariant,
    )
    x = torch.empty(num_tokens, hidden_size, dtype=dtype, device="meta")
    w1, w2, quant_config = _weights(config, as_scheme(scheme))
    topk_weights = x.new_empty(num_tokens, top_k, dtype=torch.float32)
    topk_ids = x.new_empty(num_tokens, top_k, dtype=torch.int32)
    kernel = _kernel(config, quant_config, format, chunk_size)
    with assumed(facts), PeakMemory(facts) as memory:
        kernel.apply(x, w1, w2, topk_weights, topk_ids, activation)
    return memory.peak


def _gpu_facts(device: str | None) -> Device | None:
    """Facts of the GPU; None: references run."""
    if device is not None:
        return target_named(device).facts
    if not torch.cuda.is_available():
        return None
    return device_facts(torch.device("cuda", torch.cuda.current_device()))


def _weights(config: FusedMoEConfig, scheme: Scheme) -> tuple[Tensor, Tensor, FusedMoEQuantConfig]:
    """Weights without data, as the scheme stores them."""
    w1, w2 = (
        quantize_weight(
            torch.empty(config.num_local_experts, *shape, dtype=config.in_dtype, device="meta"),
            scheme,
        )
        for shape in config.weight_shapes
    )
    one = torch.empty(1, dtype=torch.float32, device="meta")
    scales = dict.fromkeys(scheme.input_scale_names, one)
    quant_config = FusedMoEQuantConfig.from_weights(scheme, w1, w2, **scales)
    return w1.data, w2.data, quant_config


def _kernel(
    config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, format: str, chunk_size: int | None
) -> FusedMoEKernel:
    if format == "standard":
        parts: Any = (MoEPrepareAndFinalizeNoEP(), TritonExperts(config, quant_config))
    else:
        rows: Any = config.max_num_tokens
        prepare = BatchedPrepareAndFinalize(rows, config.num_local_experts, 1, 0)
        parts = (prepare, BatchedTritonExperts(config, quant_config, rows, 1))
    return FusedMoEKernel(*parts, chunk_size=chunk_size)
