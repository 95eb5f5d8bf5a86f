"""Transformers models of real sizes with random weights, and their steps: prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations import mxfp4
from transformers.integrations.hub_kernels import get_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moe_ops
import moe_ops.integrations.transformers as integration

SEED = 2026
SDPA = "sdpa_without_masks"
"""Attention through SDPA for steps that need no mask: `_Slots` holds no key that is not seen."""
ALL_ATTENTION_FUNCTIONS.register(SDPA, sdpa_attention_forward)

MXFP4 = "mxfp4_w4a16"
KERNEL_PARTS = ("routing", "matmul_ogs", "swiglu", "tensor", "tensor_details.layout")
"""Parts of triton_kernels (3.5 and before) that transformers calls."""
_SCALES = (119, 122)
"""Range of random e8m0 scales. With random nibbles weights have a standard deviation of about 0.02,
as the weights of other tensors have."""


class Spec(NamedTuple):
    """A model's architecture and sizes, as its checkpoint publishes them."""

    architecture: type[transformers.PreTrainedConfig]
    sizes: dict[str, Any]
    attention: str
    stored: str = "bf16"
    """Scheme of the experts in the checkpoint."""

    def config(self, layers: int | None) -> Any:
        """The configuration; ``layers`` replaces the number of layers and nothing else."""
        changes = {} if layers is None else {"num_hidden_layers": layers}
        return self.architecture(**{**self.sizes, **changes})


_TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
}  # fmt: skip
SPECS = {
    "qwen3-30b-a3b": Spec(
        transformers.Qwen3MoeConfig,
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "max_position_embeddings": 40960, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        SDPA,
    ),
    "gpt-oss-120b": Spec(
        transformers.GptOssConfig,
        {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        "eager",  # what transformers has for attention with sinks without packages of kernels
        MXFP4,
    ),
    "tiny-qwen3": Spec(
        transformers.Qwen3MoeConfig,
        {**_TINY, "moe_intermediate_size": 32, "num_experts": 8, "norm_topk_prob": True},
        SDPA,
    ),
    "tiny-gpt-oss": Spec(
        transformers.GptOssConfig,
        {**_TINY, "sliding_window": 8, "num_local_experts": 8},
        "eager",
        MXFP4,
    ),
}  # fmt: skip


# Models


class Impl(NamedTuple):
    """What runs the experts."""

    name: str
    experts: str
    """The experts implementation of transformers that this library or transformers registers."""
    decode_only: str | None = None
    """Why prefill is left out."""


OURS = Impl("moe_ops", integration.NAME)
HF_MXFP4 = Impl("hf-mxfp4", "eager")
"""Transformers' own path for MXFP4 experts, which replaces the forward of whole MoE blocks."""
COPIES = "batched_mm copies an expert's weights for every slot"
IMPLS = {
    impl.name: impl
    for impl in (
        OURS,
        Impl("hf-grouped_mm", "grouped_mm"),
        Impl("hf-batched_mm", "batched_mm", decode_only=COPIES),
        HF_MXFP4,
    )
}


def shell(spec: Spec, layers: int | None, dtype: torch.dtype, scheme: str) -> Any:
    """The model on ``meta``.

    If the model's checkpoint stores experts in MXFP4 and ``scheme`` is that, it has transformers'
    modules for such experts.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            spec.config(layers), dtype=dtype, attn_implementation=spec.attention
        )
        if scheme == MXFP4 == spec.stored:
            for block in moe_blocks(model):
                block.experts = _mxfp4_experts(model.config)
    return model.eval().requires_grad_(False)


def _mxfp4_experts(config: Any) -> nn.Module:
    experts = mxfp4.Mxfp4GptOssExperts(config)
    for name in ("gate_up_proj", "down_proj"):
        count, rows, width = getattr(experts, name).flatten(2).shape  # in bytes, of 16 a block
        scales = torch.empty(count, rows, width // 16, dtype=torch.uint8)
        experts.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
    return experts


def moe_blocks(model: nn.Module) -> list[Any]:
    """The MoE blocks of a model."""
    return [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]


def size_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def filled(model: Any, device: torch.device) -> Any:
    """The model with random weights, made on the device: no checkpoint and no copy on the host.

    Transformers initializes tensor by tensor: N(0, 0.02) for matrices, ones for norms, zeros for
    biases. Equal sizes give equal weights.
    """
    torch.manual_seed(SEED)
    model.to_empty(device=device)
    model.initialize_weights()
    for block in moe_blocks(model):
        if isinstance(block.experts, mxfp4.Mxfp4GptOssExperts):
            for name, tensor in block.experts.named_parameters():
                if name.endswith("bias"):
                    tensor.zero_()
                else:
                    tensor.random_(*(_SCALES if name.endswith("scales") else (0, 256)))
    return model


def prepare(model: Any, impl: Impl, scheme: str, stored: str) -> None:
    """Make an implementation run the experts of a filled model, in place.

    Raises:
        ImportError: kernels that the implementation needs are not installed.
    """
    if impl is HF_MXFP4:
        _swizzle(model, triton_kernels())
    elif scheme == MXFP4 == stored:
        integration.adapt(model)
    else:
        model.set_experts_implementation(impl.experts)
        if scheme != "bf16":
            moe_ops.quantize_(model, scheme, progress=False)


def triton_kernels() -> Any:
    """The kernels of transformers' MXFP4 path: from the hub, else of a triton_kernels with routing.

    Raises:
        ImportError: neither is there.
    """
    try:
        return get_kernel("kernels-community/gpt-oss-triton-kernels", version=1)
    except Exception as error:  # the hub raises errors of its own without a network
        hub = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        for part in KERNEL_PARTS:
            import_module(f"triton_kernels.{part}")
    except ImportError as error:
        raise ImportError(f"{error}, and no kernels of the hub: {hub}") from error
    return import_module("triton_kernels")


def _swizzle(model: Any, kernels: Any) -> None:
    """Bring MXFP4 experts to the form in which ``from_pretrained`` leaves them."""
    mxfp4.triton_kernels_hub = kernels
    for block in moe_blocks(model):
        experts = block.experts
        device = experts.gate_up_proj.device
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (getattr(experts, key) for key in (name, f"{name}_scales"))
            delattr(experts, f"{name}_scales")
            mxfp4.swizzle_mxfp4_convertops(blocks, scales, experts, name, device, kernels)
        block.forward = _mxfp4_forward(block)


def _mxfp4_forward(block: Any) -> Callable[..., Any]:
    """Transformers' forward of an MXFP4 block: that of a class from 5.21 on, before a function."""
    if hasattr(mxfp4, "Mxfp4GptOssMLP"):
        return mxfp4.Mxfp4GptOssMLP(block.router, block.experts).forward
    return partial(mxfp4.mlp_forward, block)


# Steps


class _Slots(StaticLayer):
    """Keys and values of one layer: ``start`` old tokens, and room for the new ones of a step.

    Every step writes its tokens behind the old ones, and the position never moves: repeated steps
    do the same work.
    """

    is_compileable = False

    def __init__(self, start: int, room: int) -> None:
        super().__init__(max_cache_len=start + room)
        self.start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.start :].copy_(key_states)
        self.values[:, :, self.start :].copy_(value_states)
        return self.keys, self.values


class Step(NamedTuple):
    """One call of a model with static inputs."""

    phase: str
    """``decode``: a token for each of several sequences; ``prefill``: a prompt."""
    tokens: int
    call: Callable[[], Tensor]
    """Returns the logits of each sequence's last token."""


def decode(model: Any, batch: int, context: int) -> Step:
    """A step of ``batch`` sequences that have ``context`` tokens each, of random keys and values.

    Layers with a sliding window hold that window, so that no layer has a key to mask.
    """
    config = model.config
    ids, positions = _ids(model, batch, 1), torch.full((batch, 1), context, device=model.device)
    windows = [config.sliding_window if slides else context + 1 for slides in _slides(config)]
    cache = _cache(model, batch, [min(context, window - 1) for window in windows], 1)
    generator = torch.Generator(model.device).manual_seed(SEED)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.normal_(generator=generator)
    masks = _masks(config, None, None)
    return Step("decode", batch, _call(model, ids, positions, cache, masks))


def prefill(model: Any, tokens: int) -> Step:
    """One prompt, whose keys and values go to a cache; the logits are those of its last token."""
    config = model.config
    ids, positions = _ids(model, 1, tokens), torch.arange(tokens, device=model.device)[None]
    cache = _cache(model, 1, [0] * config.num_hidden_layers, tokens)
    full = sliding = None
    if any(_slides(config)):  # attention that takes masks
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=model.device)
        full, sliding = hidden.triu(1), hidden.triu(1) | hidden.tril(-config.sliding_window)
    masks = _masks(config, *(_added(mask, model.dtype) for mask in (full, sliding)))
    return Step("prefill", tokens, _call(model, ids, positions, cache, masks))


def _call(
    model: Any, ids: Tensor, positions: Tensor, cache: Cache, masks: dict[str, Any]
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out = model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **masks,
        )
        return out.logits[:, -1]

    return call


def _ids(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + batch)
    size = model.config.vocab_size
    return torch.randint(size, (batch, length), generator=generator).to(model.device)


def _slides(config: Any) -> list[bool]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds]


def _cache(model: Any, batch: int, starts: list[int], room: int) -> Cache:
    config = model.config
    cache = Cache(layers=[_Slots(start, room) for start in starts])
    sizes = (batch, config.num_key_value_heads, config.head_dim)
    cache.early_initialization(*sizes, dtype=model.dtype, device=model.device)
    return cache


def _masks(config: Any, full: Tensor | None, sliding: Tensor | None) -> dict[str, Any]:
    """The masks as a model with several kinds of layers takes them; others make none here."""
    if not any(_slides(config)):
        return {}
    return {"attention_mask": {"full_attention": full, "sliding_attention": sliding}}


def _added(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if hidden is None:
        return None
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


@contextmanager
def routed(model: nn.Module) -> Iterator[list[int]]:
    """Note how many experts of each MoE layer get a token; nothing of `HF_MXFP4`."""
    active: list[int] = []

    def note(experts: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[1] if len(args) > 1 else None
        if isinstance(ids, Tensor):
            active.append(ids.unique().numel())

    hooks = [block.experts.register_forward_pre_hook(note) for block in moe_blocks(model)]
    try:
        yield active
    finally:
        for hook in hooks:
            hook.remove()
