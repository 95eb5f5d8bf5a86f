"""The tensors of a layer as a checkpoint holds them: the inverse of loading."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.layer.forms import converted, form_names
from moe_ops.layer.module import FusedMoE
from moe_ops.layer.parameters import ParameterSpec, parameter_specs
from moe_ops.layer.state import PLAIN, WEIGHTS
from moe_ops.loading.compressed import stored_projection
from moe_ops.scheme import WHOLE
from moe_ops.scheme.formats import split_codes


def checkpoint_tensors(layer: FusedMoE) -> Iterator[tuple[int, str, str, Tensor]]:
    """Yield the tensors of a quantized layer, which `load_checkpoint` reads bit for bit.

    They have the scheme of the layer's checkpoints: blocks that were refined are whole again, and
    padding is left out.

    Args:
        layer: a layer of one rank, not in act-order.

    Yields:
        Expert, shard (``w1``, ``w3`` or ``w2``), the end of the tensor's name, and the tensor,
        which may be a view of a parameter.
    """
    scheme = layer.checkpoint_scheme
    hidden, width = layer.model_hidden_size, layer.intermediate_size
    shards = {"w1": (width, hidden), "w2": (hidden, width)}
    if layer.sizes.gated:
        shards["w3"] = shards["w1"]
    specs = parameter_specs(layer.sizes.plain).values()
    for expert in range(layer.num_experts):
        plain = plain_expert(layer, expert)
        for shard, (n, k) in shards.items():
            own = [spec for spec in specs if spec.is_w13 == (shard != "w2")]
            kinds = {x.kind: _canonical(layer, x, plain[x.name], shard, n, k) for x in own}
            for suffix, x in stored_projection(scheme, kinds, k).items():
                yield expert, shard, suffix, x.contiguous()


def plain_expert(layer: FusedMoE, expert: int) -> dict[str, Tensor]:
    """Return an expert's parameters by name; its weights are in the plain form again."""
    tensors: dict[str, Tensor | None] = {
        name: getattr(layer, name).data[expert : expert + 1]
        for name in parameter_specs(layer.sizes)
    }
    for which in WEIGHTS:
        names = form_names(which)
        stored = tuple(map(tensors.get, names))
        tensors.update(zip(names, converted(stored, layer.sizes.plain.scheme, PLAIN), strict=True))
    return {name: x[0] for name, x in tensors.items() if x is not None}


def _canonical(
    layer: FusedMoE, spec: ParameterSpec, x: Tensor, shard: str, n: int, k: int
) -> Tensor:
    """Return one projection's tensor in canonical form: see `moe_ops.loading.stored`."""
    quant, own = layer.checkpoint_scheme.weight, layer.sizes.plain.scheme.weight
    if quant is None or own is None:
        raise ValueError("layer must be quantized, got one without a scheme")
    x = split_codes(x, 0, own.element) if spec.kind == "zero_point" else x
    x = layer.stage().part(x, spec, shard)
    if spec.kind == "weight":
        return x[:n, : own.data_width(k)]
    if spec.kind in ("scale", "zero_point"):
        x = x.reshape(()).clone() if own.per_tensor else x
        for axis in range(x.dim()):
            length, (old, new) = (n, k)[axis], (quant.group[axis], own.group[axis])
            if new != WHOLE:
                x = x.narrow(axis, 0, cdiv(length, new))
            if old != new:
                x = x[(slice(None),) * axis + (slice(None, None, old // new),)]
        return x
    if spec.kind in ("bias", "channel_scale"):
        return x[:n]
    return x.reshape(()).clone()  # gate and up may share it, and files must not
