"""Which names of a whole model's tensors belong to one layer."""

from __future__ import annotations

from moe_ops.loading.names import (
    is_of_shared_experts,
    parent_of,
    parse,
    router_tensor,
    split_at_experts,
)


class OwnNames:
    """Tells the names of one layer's tensors from other names.

    Args:
        prefix: the beginning of the layer's names, up to or including ``experts``; empty if it is
            not known. Then the first name of an expert shows it.
        has_shared: whether the layer has shared experts.
    """

    def __init__(self, prefix: str, *, has_shared: bool) -> None:
        self._has_shared = has_shared
        prefix = prefix.removesuffix(".")
        prefix += "." if prefix else ""
        parent = parent_of(prefix)
        self._ends_with_experts = parent is not None
        self._block = prefix if parent is None else parent
        parts = self._block.split(".")
        self._heads = [".".join(parts[i:]) for i in range(len(parts))]
        """The prefix of the block, and its last parts, the longest first, then nothing."""
        self._shown: str | None = None
        """The prefix that names have shown, where the layer does not know its own."""

    def relative(self, name: str) -> str | None:
        """Return a name after the block's prefix; None: the tensor is not of this layer.

        A name that says nothing about its layer is returned as it is.

        Raises:
            ValueError: the prefix is not known, and the names belong to two layers.
        """
        if not self._block:
            return self._after_shown(name)
        head = next(head for head in self._heads if name.startswith(head))
        rest = name[len(head) :]
        under = rest.startswith(("experts.", "w13_", "w2_"))
        beside = head and self._ends_with_experts and not under
        is_shared = self._has_shared and is_of_shared_experts(rest)
        return None if beside and not is_shared and router_tensor(rest) is None else rest

    def owns(self, head: str) -> bool:
        """Whether a name of this layer may begin with ``head``.

        Raises:
            ValueError: see `relative`.
        """
        block = parent_of(head)
        head = head if block is None else block
        if self._block:
            return head in self._heads
        if self._shown is None:
            self._shown = head
        if self._shown and head != self._shown:
            raise ValueError(
                "weights must be those of one layer if it has no prefix= of its own, got names "
                f"that begin with {self._shown!r} and {head!r}"
            )
        return head == self._shown

    def _after_shown(self, name: str) -> str | None:
        split = split_at_experts(name, has_shared=self._has_shared)
        if split is not None:
            return split[1] if self.owns(split[0]) else None
        if self._shown:
            return name.removeprefix(self._shown) if name.startswith(self._shown) else None
        if parse(name) is not None:
            self.owns("")
        return name
