"""Every operator of this library, one line each. Only `moe_ops.gradients` registers two more.

An operator ``moe_ops::name`` of a stage has three legs, found by the stage's file name:

* CUDA: ``kernels/<stage>.py``, a Triton launcher, imported when a CUDA operator first runs;
* every other device: ``reference/<stage>.py``, eager PyTorch;
* tracing: ``fake_impls/<stage>.py``, what the operator returns without computing it. The launchers
  allocate with these same functions, so the two cannot drift.

All operators are functional: fresh contiguous outputs, no aliasing, no mutation, except for the
``.out`` overloads (``expert_product.out`` and ``expert_wgrad.out`` add to what is there),
``eplb_map_to_physical_and_record``, which counts into a buffer of its caller, and those that change
the ``state`` of windows: their schemas say so. Products of experts in host memory copy experts to
slots on the device: a cache, of which results do not depend. (The overloads do not carry
``torch.Tag.out``: Inductor would then call them instead of the functional ones, which fails in
torch 2.13 if a size is dynamic.)

If the shape, stride or dtype rule of an output changes, the operator gets a new name: Inductor's
cache finds graphs by operators' names, and a cached graph relies on the old rule. A test compares
every name with its record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moe_ops import flops, gradients, retired
from moe_ops.checks import remembered

NAMESPACE = "moe_ops"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_dynamo = torch._C._dynamo.eval_frame
_skip = _dynamo._FrameAction.SKIP
_OPAQUE = _dynamo._FrameExecStrategy(_skip, _skip)
STAGES: dict[str, str] = {}
"""Stage by operator (``name`` or ``name.overload``)."""


@cache
def _function(package: str, stage: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(f"moe_ops.{package}.{stage}"), name)


def _leg(package: str, stage: str, name: str) -> Callable[..., Any]:
    """``moe_ops.<package>.<stage>.<name>``, imported when it first runs.

    A kernel runs on the first tensor's device, even if that is not the current device. Its launcher
    allocates with the fake, which rejects sizes that disagree. A reference allocates by itself, so
    the fake is called first, once for arguments that look alike. `gradients` makes sure that a
    backward pass through an operator never returns a wrong derivative. Dynamo traces neither: it
    would, in a call whose outer frames it skips, as it does under a ``TorchDispatchMode``.
    """
    function: Callable[..., Any] | None = None
    check: Callable[..., Any] | None = None
    if package == "reference":
        check = remembered(lambda *args, **kw: _function("fake_impls", stage, name)(*args, **kw))

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal function
        if function is None:
            function = _function(package, stage, name)
        if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and gradients.asked_for(
            name, args, kwargs
        ):
            return gradients.refusing(name, call, args, kwargs)
        if check is not None:
            check(*args, **kwargs)
            kind = args[0].device.type
            if torch.is_autocast_enabled(kind):  # it would round products; kernels do not see it
                with torch.autocast(kind, enabled=False):
                    return function(*args, **kwargs)
        else:
            device = args[0].get_device()
            if device != torch._C._cuda_getDevice():  # `current_device` without its checks
                with torch.cuda.device(device):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    _dynamo.set_code_exec_strategy(call.__code__, _OPAQUE)
    return call


def _fake(stage: str, name: str) -> Callable[..., Any]:
    """``moe_ops.fake_impls.<stage>.<name>``, imported when it first runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        gradients.check_forward_mode(name, args)
        return _function("fake_impls", stage, name)(*args, **kwargs)

    return call


def _sample_by_sample(operator: Any) -> Callable[..., Any]:
    """The vmap rule that runs samples one by one: PyTorch's fallback does not take tensor lists."""

    def call(info: Any, in_dims: Any, *args: Any) -> Any:
        (values, spec), dims = tree_flatten(args), tree_leaves(in_dims)
        batched = list(zip(values, dims, strict=True))
        samples = (
            [x if dim is None else x.select(dim, i) for x, dim in batched]
            for i in range(info.batch_size)
        )
        results = [operator(*tree_unflatten(s, spec)) for s in samples]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return call


def _op(stage: str, schema: str, formula: flops.Formula | None = None) -> Any:
    """Define one operator with its three legs; returns the overload, bound once.

    An operator that multiplies matrices has a ``formula`` of its floating-point operations.
    """
    qualified = schema.split("(")[0]
    name, _, overload = qualified.partition(".")
    function = f"{name}_{overload}" if overload else name
    _library.define(schema)
    _library.impl(qualified, _leg("reference", stage, function), "CompositeExplicitAutograd")
    _library.impl(qualified, _leg("kernels", stage, function), "CUDA")
    fake = _fake(stage, function)
    torch.library.register_fake(f"{NAMESPACE}::{qualified}", fake, lib=_library)
    STAGES[qualified] = stage
    operator = getattr(getattr(torch.ops.moe_ops, name), overload or "default")
    if formula is not None:
        flops.FORMULAS[operator] = formula
    if "Tensor?[]" in schema and "(a!)" not in schema:
        vmap = _sample_by_sample(operator)
        torch.library.register_vmap(f"{NAMESPACE}::{qualified}", vmap, lib=_library)
    # Only tracers use this. An Autograd kernel in the dispatcher would cost 2 us per call.
    operator.py_impl(torch._C.DispatchKey.Autograd)(gradients.traced(operator, function))
    return operator


fused_topk = _op(
    "routing",
    "fused_topk(Tensor gating_output, Tensor? e_score_correction_bias, SymInt topk,"
    " bool renormalize, str scoring_func, float routed_scaling_factor)"
    " -> (Tensor topk_weights, Tensor topk_ids)",
)
grouped_topk = _op(
    "routing",
    "grouped_topk(Tensor gating_output, Tensor? e_score_correction_bias, SymInt topk,"
    " bool renormalize, str scoring_func, float routed_scaling_factor, int num_expert_group,"
    " int topk_group) -> (Tensor topk_weights, Tensor topk_ids)",
)
hash_topk = _op(
    "routing",
    "hash_topk(Tensor gating_output, Tensor input_ids, Tensor table, bool renormalize,"
    " str scoring_func, float routed_scaling_factor) -> (Tensor topk_weights, Tensor topk_ids)",
)
sparsemixer = _op(
    "routing",
    "sparsemixer(Tensor gating_output, float jitter_eps) -> (Tensor topk_weights, Tensor topk_ids)",
)
topk_backward = _op(
    "routing",
    "topk_backward(Tensor grad, Tensor gating_output, Tensor topk_ids, bool renormalize,"
    " str scoring_func, float routed_scaling_factor) -> Tensor",
)
adjust_routing = _op(
    "routing_adjust",
    "adjust_routing(Tensor topk_weights, Tensor topk_ids, Tensor? per_expert_scale,"
    " Tensor? is_padding, SymInt num_experts, SymInt num_shared_experts,"
    " float shared_expert_weight) -> (Tensor topk_weights, Tensor topk_ids)",
)
zero_experts = _op(
    "routing_adjust",
    "zero_experts(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, SymInt num_experts,"
    " int skipped_id) -> (Tensor topk_weights, Tensor topk_ids, Tensor result)",
)
moe_align_block_size = _op(
    "align",
    "moe_align_block_size(Tensor topk_ids, Tensor? expert_map, int block_size, SymInt num_experts,"
    " bool pad_sorted_ids, bool ignore_invalid_experts)"
    " -> (Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)",
)
plan_slots = _op(
    "align",
    "plan_slots(Tensor topk_ids, Tensor? expert_map, SymInt num_experts, str scheme,"
    " ScalarType dtype, bool batch_invariant=False) -> Tensor",
)
count_expert_num_tokens = _op(
    "align",
    "count_expert_num_tokens(Tensor topk_ids, Tensor? expert_map, SymInt num_local_experts)"
    " -> Tensor",
)
# Which adapter each slot has; ``num_experts``: El. A pair is ``adapter * El + expert``.
adapter_ids = _op(
    "align",
    "adapter_ids(Tensor topk_ids, Tensor? expert_map, Tensor? lora_ids, SymInt num_experts,"
    " SymInt num_adapters) -> (Tensor pairs, Tensor adapters, Tensor tokens)",
)
plan_batched = _op(
    "align",
    "plan_batched(Tensor expert_num_tokens, SymInt max_num_tokens, str scheme,"
    " bool batch_invariant=False) -> Tensor",
)
plan_permuted = _op(
    "align",
    "plan_permuted(Tensor expert_first_token_offset, SymInt num_rows, str scheme,"
    " bool batch_invariant=False) -> Tensor",
)
moe_permutation = _op(
    "permute",
    "moe_permutation(Tensor topk_ids, Tensor? expert_map, SymInt num_local_experts)"
    " -> (Tensor expert_first_token_offset, Tensor inv_permuted_idx, Tensor permuted_idx)",
)
gather_rows = _op(
    "permute",
    "gather_rows(Tensor x, Tensor permuted_idx, Tensor expert_first_token_offset, SymInt top_k)"
    " -> Tensor",
)
order_columns = _op(
    "permute",
    "order_columns(Tensor x, Tensor order, Tensor topk_ids, Tensor? expert_map) -> Tensor",
)
moe_unpermute = _op(
    "permute",
    "moe_unpermute(Tensor permuted_hidden_states, Tensor? topk_weights, Tensor inv_permuted_idx,"
    " Tensor? expert_first_token_offset) -> Tensor",
)
moe_quantize = _op(
    "quantize",
    "moe_quantize(Tensor x, Tensor? scale, Tensor? topk_weights, Tensor? topk_ids,"
    " Tensor? expert_map, SymInt num_local_experts, str quant) -> (Tensor q, Tensor q_scale)",
)
activation_quantize = _op(
    "quantize",
    "activation_quantize(Tensor x, Tensor? scale, Tensor? topk_ids, Tensor? expert_map,"
    " SymInt num_local_experts, str activation, str quant) -> (Tensor q, Tensor q_scale)",
)
batched_dispatch = _op(
    "batched",
    "batched_dispatch(Tensor x, Tensor? scale, Tensor? topk_weights, Tensor topk_ids,"
    " SymInt first_expert, SymInt num_local_experts, SymInt max_num_tokens, str quant,"
    " bool drops=True)"
    " -> (Tensor rows, Tensor row_scale, Tensor expert_num_tokens, Tensor num_dropped)",
)
batched_rows = _op(
    "batched",
    "batched_rows(Tensor topk_ids, SymInt first_expert, SymInt num_local_experts,"
    " SymInt max_num_tokens) -> Tensor",
)
batched_activation = _op(
    "batched",
    "batched_activation(Tensor x, Tensor expert_num_tokens, str activation) -> Tensor",
)
batched_quantize = _op(
    "batched",
    "batched_quantize(Tensor x, Tensor? scale, Tensor expert_num_tokens, str quant)"
    " -> (Tensor q, Tensor q_scale)",
)
batched_activation_quantize = _op(
    "batched",
    "batched_activation_quantize(Tensor x, Tensor? scale, Tensor expert_num_tokens,"
    " str activation, str quant) -> (Tensor q, Tensor q_scale)",
)
# ``weight`` are the fields of a `moe_ops.tensors.ExpertWeight`, and ``tiles`` those of a `Tiles`.
# With `expert_order` the rows between the two expert GEMMs (`out` of the GEMM with an activation,
# `a` of the other) are permuted: see `reference/expert_product.py`.
expert_product = _op(
    "expert_product",
    "expert_product(Tensor a, Tensor? a_scale, Tensor?[] weight, Tensor? topk_weights,"
    ' Tensor?[] tiles, SymInt top_k, str scheme, ScalarType out_dtype, str activation="",'
    " bool expert_order=False, bool batch_invariant=False) -> Tensor",
    flops.product,
)
# The first GEMM where a backward pass follows: the activated rows, and the product in slot order.
activated_product = _op(
    "expert_product",
    "activated_product(Tensor a, Tensor? a_scale, Tensor?[] weight, Tensor? topk_weights,"
    " Tensor?[] tiles, SymInt top_k, str scheme, ScalarType out_dtype, str activation,"
    " bool expert_order=False, bool batch_invariant=False) -> (Tensor, Tensor)",
    flops.product,
)
# Adds products to rows that are there already: the low-rank products of adapters.
expert_product_out = _op(
    "expert_product",
    "expert_product.out(Tensor a, Tensor?[] weight, Tensor? topk_weights, Tensor?[] tiles,"
    " SymInt top_k, bool batch_invariant=False, SymInt first_column=0, SymInt column_step=1, *,"
    " Tensor(a!) out) -> ()",
    flops.product,
)
# One launch for one token on Hopper. Compiled programs call this operator if T may be 1.
expert_product_sum = _op(
    "expert_product",
    "expert_product_sum(Tensor a, Tensor? a_scale, Tensor?[] weight, Tensor? topk_weights,"
    " Tensor?[] tiles, str scheme, ScalarType out_dtype, bool expert_order=False,"
    " bool batch_invariant=False) -> Tensor",
    flops.product,
)
activation = _op("activation", "activation(Tensor x, str activation) -> Tensor")
expert_dgrad = _op(
    "expert_dgrad",
    "expert_dgrad(Tensor a, Tensor w, Tensor w_scale, Tensor? w_zero_point,"
    " Tensor? w_global_scale, Tensor?[] tiles, SymInt top_k, str scheme,"
    " bool batch_invariant=False) -> Tensor",
    flops.product,
)
# Gradients of the weights of experts. Rows are one per slot or one per token. ``num_experts``: El.
expert_wgrad = _op(
    "expert_wgrad",
    "expert_wgrad(Tensor dy, Tensor x, Tensor? topk_weights, Tensor?[] tiles, SymInt num_experts,"
    " str scheme, ScalarType out_dtype, bool batch_invariant=False) -> Tensor",
    flops.weight_gradient,
)
# Adds to float32 gradients ``(El, N, K)`` of weights that no scheme quantizes: no sum is rounded.
expert_wgrad_out = _op(
    "expert_wgrad",
    "expert_wgrad.out(Tensor dy, Tensor x, Tensor? topk_weights, Tensor?[] tiles,"
    " SymInt num_experts, bool batch_invariant=False, *, Tensor(a!) out) -> ()",
    flops.weight_gradient,
)
expert_bias_grad = _op(
    "expert_wgrad",
    "expert_bias_grad(Tensor dy, Tensor? topk_weights, Tensor?[] tiles, SymInt num_experts,"
    " str scheme, bool batch_invariant=False) -> Tensor",
)
slot_products = _op(
    "expert_wgrad",
    "slot_products(Tensor x, Tensor y, Tensor topk_ids, Tensor? expert_map,"
    " SymInt num_local_experts, bool by_expert) -> Tensor",
)
moe_activation_backward = _op(
    "activation",
    "moe_activation_backward(Tensor grad, Tensor x, Tensor? topk_weights, Tensor topk_ids,"
    " Tensor? expert_map, SymInt num_local_experts, str activation, bool activated)"
    " -> (Tensor grad_x, Tensor activated_rows, Tensor products)",
)
moe_fused_mul_sum = _op(
    "weight_and_reduce",
    "moe_fused_mul_sum(Tensor inputs, Tensor? topk_weights, Tensor? topk_ids, Tensor? expert_map,"
    " Tensor? num_valid_tokens, SymInt num_local_experts) -> Tensor",
)
moe_fused_mul_sum_out = _op(
    "weight_and_reduce",
    "moe_fused_mul_sum.out(Tensor inputs, Tensor? topk_weights, Tensor? topk_ids,"
    " Tensor? expert_map, Tensor? num_valid_tokens, SymInt num_local_experts, *, Tensor(a!) out)"
    " -> ()",
)
eplb_map_to_physical_and_record = _op(
    "eplb",
    "eplb_map_to_physical_and_record(Tensor topk_ids, Tensor(a!) expert_load_view,"
    " Tensor logical_to_physical_map, Tensor logical_replica_count, Tensor? record_enabled,"
    " Tensor? num_unpadded_tokens, ScalarType indices_type, SymInt seed, Tensor? step=None)"
    " -> Tensor",
)
# The addresses of all ranks' windows are `Windows.peers`. The results of a send are this rank's
# window: the next send overwrites them, after this rank's return. ``state`` is `Windows.state`.
symmetric_send = _op(
    "symmetric",
    "symmetric_send(Tensor x, Tensor? scale, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? expert_ranks, Tensor peers, Tensor(a!) state, SymInt rows_per_rank,"
    " SymInt num_experts, bool on_input, str quant)"
    " -> (Tensor rows, Tensor row_scale, Tensor topk_weights, Tensor topk_ids)",
)
# ``placement`` is int32 ``(2, E)``: the rank that holds each expert, and the expert's row there.
# ``held`` is int32 ``(El,)``: the experts in this rank's rows.
symmetric_send_batched = _op(
    "symmetric_batched",
    "symmetric_send_batched(Tensor x, Tensor? scale, Tensor topk_weights, Tensor topk_ids,"
    " Tensor placement, Tensor held, Tensor peers, Tensor(a!) state, SymInt rows_per_rank,"
    " bool on_input, str quant)"
    " -> (Tensor rows, Tensor row_scale, Tensor expert_num_tokens, Tensor num_dropped,"
    " Tensor topk_ids, Tensor topk_weights)",
)
symmetric_return = _op(
    "symmetric",
    "symmetric_return(Tensor sums, Tensor? expert_ranks, Tensor peers, Tensor(a!) state,"
    " SymInt top_k) -> Tensor",
)
for version, schemas in retired.SCHEMAS.items():
    for schema in schemas:
        name = schema.split("(")[0]
        _library.define(schema)
        _library.impl(name, retired.retired_operator(name, version), "CompositeExplicitAutograd")
flops.register()
