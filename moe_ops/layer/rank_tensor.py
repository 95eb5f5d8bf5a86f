"""A tensor that tells `torch.distributed.checkpoint` where it lies in a larger one.

A rank's tensors have the names of the other ranks' and hold other experts, or other parts of them.
In a state dict each is a `RankTensor`: an ordinary tensor with this rank's rows, whose pieces have
places in the tensor of a layer on one rank. A checkpoint of such tensors has no ranks. It loads
onto any number of them, whatever experts they hold.

The parameters themselves are not DTensors: a DTensor cannot say that the rows of a rank are those
of experts 0, 5 and 5 again (EPLB), or a piece of the gate rows and a piece of the up rows. And
every use of a weight would have to unwrap it. Where `fully_shard` has made a DTensor of a rank's
tensor, the pieces are pieces of its local tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_PLANNER = "torch.distributed.checkpoint.default_planner"


class RankPiece(NamedTuple):
    """A box of a rank's tensor, and where it lies in the whole layer's tensor."""

    start: tuple[int, ...]
    """Its first entry in the rank's tensor."""
    offsets: tuple[int, ...]
    """Its first entry in the whole layer's tensor."""
    sizes: tuple[int, ...]

    def within(self, start: Sequence[int], sizes: Sequence[int]) -> RankPiece | None:
        """Return the part that lies in a box of the rank's tensor; None: no part does."""
        first = tuple(map(max, self.start, start))
        boxes = zip(self.start, self.sizes, start, sizes, first, strict=True)
        lengths = tuple(min(a + n, b + m) - at for a, n, b, m, at in boxes)
        if min(lengths) <= 0:
            return None
        moved = tuple(at - old for at, old in zip(first, self.start, strict=True))
        return RankPiece(
            tuple(at - old for at, old in zip(first, start, strict=True)),
            tuple(offset + by for offset, by in zip(self.offsets, moved, strict=True)),
            lengths,
        )


class RankTensor(Tensor):
    """A rank's part of a tensor, with the protocol of `torch.distributed.checkpoint`.

    Copies and elementwise results (casts, averages) keep their place. Other results of the same
    shape cannot be saved there: rows may have moved. Results of other shapes are plain tensors. It
    is pickled and saved in every other format as the plain tensor that it is.
    """

    global_shape: torch.Size
    """Shape of the tensor of the layer on one rank."""
    pieces: tuple[RankPiece, ...]
    refusal: str = ""
    """Why `torch.distributed.checkpoint` cannot have it; empty: it can."""
    restored: Callable[[Tensor], Tensor] | None = None
    """Makes the DTensor of which this is the local tensor; None: it is a tensor's own."""

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of an axis.

        `torch.distributed.checkpoint` gets the shape of the whole tensor, with which it compares
        what was saved. (From torch 2.14 on it asks for ``global_shape``.)
        """
        if dim is None and sys._getframe(1).f_globals.get("__name__") == _PLANNER:
            return self.global_shape
        return super().size() if dim is None else super().size(dim)

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:  # noqa: PLW3201 (its name)
        """Return what to save: each piece once, also if several rows hold the same expert."""
        metadata = import_module("torch.distributed.checkpoint.metadata")
        planner = import_module("torch.distributed.checkpoint.planner")
        properties = metadata.TensorProperties.create_from_tensor(self.saved())
        return [
            planner.WriteItem(
                metadata.MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.global_shape),
            )
            for chunk in {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}.values()
        ]

    def __create_chunk_list__(self) -> list[Any]:  # noqa: PLW3201
        """Return what to load, or to save.

        Raises:
            NotImplementedError: ``refusal``.
        """
        chunk = import_module("torch.distributed.checkpoint.metadata").ChunkStorageMetadata
        if self.refusal:
            raise NotImplementedError(self.refusal)
        return [chunk(torch.Size(p.offsets), torch.Size(p.sizes)) for p in self.pieces]

    def __get_tensor_shard__(self, index: Any) -> Tensor:  # noqa: PLW3201
        """Return the memory of a piece.

        When a checkpoint is loaded, ``index.index`` tells replicas of an expert apart.
        """
        same = [i for i, piece in enumerate(self.pieces) if piece.offsets == tuple(index.offset)]
        piece = self.pieces[index.index if index.index in same else same[0]]
        box = (slice(at, at + n) for at, n in zip(piece.start, piece.sizes, strict=True))
        return self.saved()[tuple(box)]

    def saved(self) -> Tensor:
        """Return the tensor of which `torch.distributed.checkpoint` saves or loads the pieces."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Copy the entries; the copy keeps its place."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, which ``torch.load(.., weights_only=True)`` takes."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; results of the shape of a `RankTensor` become one."""
        kwargs = kwargs or {}
        if func is Tensor.new_empty:  # which staging for `async_save` completes itself
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass(), _Watch() as ran:
            result = func(*args, **kwargs)
            placed = [x for x in tree_leaves((args, kwargs)) if hasattr(x, "pieces")]
            name = "" if ran.elementwise else getattr(func, "__name__", str(func))
            return tree_map_only(Tensor, lambda x: _with_place(x, placed, name), result)


_COPIES = {
    "_pin_memory", "_to_copy", "copy_", "detach", "empty_like", "fill_.Scalar", "full_like",
    "lift_fresh", "ones_like", "scalar_tensor", "view.dtype", "zeros_like",
}  # fmt: skip
"""ATen operators without PyTorch's tag ``pointwise`` that leave every entry in its place."""


class _Watch(TorchDispatchMode):
    """Notes whether all operators that run leave every entry in its place."""

    elementwise = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        self.elementwise &= (
            torch.Tag.pointwise in func.tags or func.name().removeprefix("aten::") in _COPIES
        )
        return func(*args, **(kwargs or {}))


def _with_place(x: Tensor, placed: Sequence[RankTensor], name: str) -> Tensor:
    """Return the result of a function with the place of the arguments that have its shape.

    Args:
        x: the result; a plain tensor unless it is one of the arguments.
        placed: the arguments that know their place.
        name: the function, if it may have moved entries; empty: it has not.
    """
    like = [] if isinstance(x, RankTensor) else [t for t in placed if t.shape == x.shape]
    if not like:
        return x
    result = x.as_subclass(type(like[0]))
    result.__dict__.update(like[0].__dict__)
    if name or any(t.pieces != result.pieces for t in like):
        result.refusal = result.refusal or (
            "tensors of a FusedMoE over several ranks must be those of its state_dict, copies of "
            "them or elementwise functions, such as casts and averages, for "
            f"torch.distributed.checkpoint, got the result of {name or 'two with other experts'}"
        )
    return result


def rank_tensor(
    x: Any, global_shape: Sequence[int], pieces: Sequence[RankPiece], refusal: str = ""
) -> RankTensor:
    """Return a tensor, or the local tensor of a DTensor, that knows its place."""
    restored = None
    if hasattr(x, "placements"):
        kind, utils = type(x), import_module("torch.distributed.tensor._utils")
        mesh, placements, shape, stride = x.device_mesh, x.placements, x.shape, x.stride()
        sizes, start = utils.compute_local_shape_and_global_offset(shape, mesh, placements)
        pieces = [part for piece in pieces if (part := piece.within(start, sizes)) is not None]

        def restored(local: Tensor) -> Tensor:
            return kind.from_local(local, mesh, placements, shape=shape, stride=stride)

        x = x.to_local()
    place = {
        "global_shape": torch.Size(global_shape),
        "pieces": tuple(pieces),
        "refusal": refusal,
        "restored": restored,
    }
    result = x.as_subclass(RankTensor)
    result.__dict__.update(place)
    return result


def plain_tensor(x: Any) -> Any:
    """Return the tensor or DTensor of which a `RankTensor` was made; other values as they are."""
    if not isinstance(x, RankTensor):
        return x
    local = x.as_subclass(Tensor)
    return local if x.restored is None else x.restored(local)
