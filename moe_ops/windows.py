"""Memory that all ranks of a group can write: where its parts are, and how operators find it.

Each rank has one window. A window holds what other ranks send to it. An operator gets the addresses
of all windows as one tensor, `Windows.peers`, because a window itself must not be an argument of
it: a compiler may copy what an operator mutates, and other ranks write to the window only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_ops.scheme import parse_quant

ALIGNMENT = 256
"""Alignment in bytes of the parts of a window."""
PROCESSORS = 132
"""SMs of an H200. Programs that wait for other ranks must be resident together: at most one an SM
of those that send, two of those that return."""
MOST_PROGRAMS = PROCESSORS
"""Programs of a rank that may write to other ranks, each with flags of its own."""


class Parts(NamedTuple):
    """Byte offsets of the parts of a window: a constant of the kernels."""

    sent: int
    """int32 ``(R, MOST_PROGRAMS)``: steps that program p of rank r has completed in all sends."""
    returned: int
    """int32 ``(R, MOST_PROGRAMS)``: likewise, in all returns."""
    sizes: int
    """int32 ``(R,)``: P of rank r."""
    ids: int
    """int32 ``(R, P, k)``: the tokens' global experts, -1 for padding."""
    weights: int
    """float32 ``(R, P, k)``."""
    scales: int
    """Scales of the rows."""
    rows: int
    """``(R, P, ..)``: the tokens' rows. Only rows that this rank's experts read are written. In the
    Batched format ``(El, R * P, ..)``: the slots' rows."""
    sums: int
    """``(R, P, H)``: the partial sums that rank r has sent back for this rank's tokens."""
    end: int


class WindowLayout(NamedTuple):
    """The sizes that all ranks of an exchange agree on, from which the parts of a window follow."""

    ranks: int
    max_num_tokens: int
    """The largest P, rows of each rank."""
    hidden_size: int
    top_k: int
    itemsize: int
    """Bytes of a number of the activations. Quantized rows have at most as many."""
    num_local_experts: int = 0
    """Experts of a rank in the Batched format; 0: the Standard format."""
    masked: bool = False
    """Whether ranks that have died can be left out: `Windows.live`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size * self.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales: of groups of 16 in float32, which no scheme exceeds."""
        return 4 * -(-self.hidden_size // 16)

    def check_room(self, name: str, rows_per_rank: int, top_k: int, row_bytes: int) -> None:
        """Raise ValueError for sizes of a call, ``name`` being its rows, that do not fit."""
        at_most("rows_per_rank", rows_per_rank, self.max_num_tokens)
        at_most("top_k", top_k, self.top_k)
        at_most(f"bytes of a row of {name}", row_bytes, self.row_bytes)

    @property
    def parts(self) -> Parts:
        """Byte offsets."""
        return _parts_of(self)


@lru_cache(maxsize=256)
def _parts_of(layout: WindowLayout) -> Parts:
    """Byte offsets."""
    tokens = layout.ranks * layout.max_num_tokens
    flags, numbers = 4 * layout.ranks * MOST_PROGRAMS, 4 * layout.ranks
    routing = 4 * tokens * layout.top_k
    sums, scales = tokens * layout.row_bytes, tokens * layout.scale_bytes
    copies = max(1, layout.num_local_experts)
    sizes = (
        flags, flags, numbers, routing, routing, scales * copies, sums * copies, sums,
    )  # fmt: skip
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return Parts(*offsets)


def at_most(name: str, value: int, most: int) -> None:
    """Raise ValueError for a size of a call that is larger than that of the windows."""
    if value > most:
        raise ValueError(f"{name} must be at most {most} for these windows, got {value}")


def programs_of(rows_per_rank: int) -> int:
    """Programs that write P rows of each rank; all ranks get the same number."""
    return max(1, min(rows_per_rank, PROCESSORS))


def nothing() -> None:
    """Return None: no call is in flight."""


FAILED = 2 * MOST_PROGRAMS
"""Index in `Windows.state` of the device's own note that a rank did not answer."""
INTERRUPTED = 2**31 - 1
"""`Windows.error` once this rank itself left an exchange, by an exception such as Ctrl-C's."""


class Window:
    """One rank's window.

    Args:
        layout: its sizes.
        own: uint8, its memory.
    """

    def __init__(self, layout: WindowLayout, own: Tensor) -> None:
        self.layout, self.own = layout, own

    def arrived(
        self, rows: Tensor, scales: Tensor, top_k: int, quant: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows in this rank's window, their scales, and the tokens' weights and ids.

        Args:
            rows: a tensor of the rows' dtype and shape: ``(R * P, ..)``, or in the Batched format
                ``(El, R * P, ..)``.
            scales: a tensor of the scales' dtype and shape. A scale that rows share lies in no
                window: it is returned as it is.
            top_k: k.
            quant: how rows are quantized on the way, or empty.

        Raises:
            ValueError: rows, scales, experts or slots for which the window has no room.
        """
        layout, at, (*experts, tokens, width) = self.layout, self.layout.parts, rows.shape
        layout.check_room("x", tokens // layout.ranks, top_k, width * rows.dtype.itemsize)
        if experts:
            at_most("len(held)", experts[0], layout.num_local_experts)
        if scales.dim() == rows.dim() and not (quant and parse_quant(quant).per_tensor):
            own = scales.shape[-1] * scales.dtype.itemsize
            at_most("bytes of a row's scales", own, layout.scale_bytes)
            scales = self.part(at.scales, scales.dtype, *scales.shape)
        return (
            self.part(at.rows, rows.dtype, *rows.shape),
            scales,
            self.part(at.weights, torch.float32, tokens, top_k),
            self.part(at.ids, torch.int32, tokens, top_k),
        )

    def part(self, offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """A part of this rank's window, with a storage of its own over the window's memory.

        To PyTorch the parts do not alias each other, as outputs of an operator must not.
        """
        size = dtype.itemsize
        for length in shape:
            size *= length
        storage = self.own.untyped_storage()[offset : offset + size]
        return self.own.new_empty(0, dtype=dtype).set_(storage).view(shape)


class Windows(Window):
    """The windows of a group of ranks, as one rank sees them.

    ``state`` is int32: steps that each program has completed in sends, in returns, then `FAILED`.
    ``in_flight()`` returns the ids that a call in flight got, or None: as long as somebody holds
    these ids, its tokens are in the window. ``again()`` returns the ids of the call whose rows were
    sent for gradients, as long as the window has them.

    ``live`` is int64 ``(R + 1,)`` if the layout is ``masked``: 1 for each live rank, 0 for each
    dead one, then the number of this rank's slots that were left out, whose experts are on dead
    ranks. Otherwise it is None: all ranks are live.

    ``generation`` names the allocation of shared windows, by the same text on all ranks.

    Args:
        layout: their sizes.
        own: uint8, the memory of this rank's window.
        rank: this rank.
        peers: int64 ``(R + 1,)`` on the device, the address of each rank's window, then that of
            ``error``.
        error: int32 ``(1,)`` on the host, which the device can write: 0; or ``1 + r`` if rank r did
            not answer in time, ``-1 - r`` if it has another P, `INTERRUPTED`.
        timeout: seconds to wait for a rank.
        addresses: the addresses in ``peers``.
        keep: what must live as long as the windows.
    """

    def __init__(
        self,
        layout: WindowLayout,
        own: Tensor,
        rank: int,
        peers: Tensor,
        error: Tensor,
        timeout: float,
        addresses: tuple[int, ...],
        keep: Any = None,
    ) -> None:
        super().__init__(layout, own)
        self.rank, self.peers, self.error = rank, peers, error
        self.timeout, self.addresses, self.keep = timeout, addresses, keep
        self.in_flight: Callable[[], Any] = nothing
        self.again: Callable[[], Any] = nothing
        self.generation: str | None = None
        self.state = torch.zeros(FAILED + 1, dtype=torch.int32, device=own.device)
        self.live: Tensor | None = None
        if layout.masked:
            self.live = torch.ones(layout.ranks + 1, dtype=torch.int64, device=own.device)
            self.live[-1] = 0
        self.answer = error.numpy()  # reads without PyTorch
        _OPEN[peers.data_ptr()] = self

    @property
    def timeout_ns(self) -> int:
        """Nanoseconds to wait for a rank."""
        return int(self.timeout * 1e9)

    def failure(self) -> str:
        """What `error` says, which is not 0."""
        error, ranks = int(self.answer[0]), self.layout.ranks
        if error == INTERRUPTED:
            return (
                f"rank {self.rank} of {ranks} was interrupted while it exchanged rows with the "
                "others, which may miss some: construct the exchange anew on all ranks"
            )
        if error > 0:
            return (
                f"rank {self.rank} of {ranks} waited {self.timeout:g} s for rank {error - 1}, "
                "which did not answer; results since then are NaN"
            ) + (": call set_live_ranks on all live ranks" if self.layout.masked else "")
        return (
            "hidden_states must have the same number of tokens on every rank with "
            f"equal_num_tokens, got another number on rank {-1 - error} than on rank {self.rank}; "
            "results since then are NaN"
        )

    def live_ranks(self) -> list[int]:
        """The ranks that this one exchanges rows with, itself among them."""
        if self.live is None:
            return list(range(self.layout.ranks))
        return self.live[:-1].nonzero().flatten().tolist()

    def num_dropped_slots(self) -> int:
        """The last number of ``live``; the host waits for the device."""
        return 0 if self.live is None else int(self.live[-1])

    def restart(self, live_ranks: Sequence[int]) -> None:
        """Begin to count steps anew, with these ranks alone: no rank has failed, no call in flight.

        Nobody may write to the window meanwhile. The number of slots left out stays.
        """
        at, ranks = self.layout.parts, range(self.layout.ranks)
        self.own[at.sent : at.sizes] = 0
        self.state.zero_()
        self.error.zero_()
        if self.live is not None:
            self.live[:-1] = torch.tensor([int(rank in live_ranks) for rank in ranks], device="cpu")
        self.in_flight = self.again = nothing


_OPEN: WeakValueDictionary[int, Windows] = WeakValueDictionary()


def windows_of(peers: Tensor) -> Windows:
    """The windows to which a tensor of addresses belongs.

    Raises:
        ValueError: a tensor that is not `Windows.peers` itself. A copy would have to be read to
            find them, for which the host would wait.
    """
    windows = _OPEN.get(peers.data_ptr())
    if windows is None or peers.shape != windows.peers.shape:
        raise ValueError("peers must be the tensor `peers` of open Windows, got another tensor")
    return windows


def open_windows() -> list[Windows]:
    """All windows of this process."""
    return list(_OPEN.values())
