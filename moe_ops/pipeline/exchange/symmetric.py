"""Several ranks that write to each other's memory: one kernel sends, one returns and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from moe_ops import checks, ops
from moe_ops.parallel.live_ranks import check_live_ranks, group_of_live_ranks
from moe_ops.pipeline.exchange.base import TokenExchange
from moe_ops.pipeline.exchange.groups import check_expert_ranks
from moe_ops.pipeline.exchange.memory import allocate, allocate_shared, out_of_window, restart
from moe_ops.pipeline.exchange.messages import sum_of_ranks
from moe_ops.pipeline.exchange.records import Arrived, Needs, Outgoing
from moe_ops.pipeline.prepare_finalize import Receiver
from moe_ops.sizes import MAX_EXPERTS
from moe_ops.windows import WindowLayout, Windows, nothing

ON_DEAD_RANK = ("raise", "mask")
"""What can be done about a rank that has died."""


class SymmetricPrepareAndFinalize(TokenExchange):
    """Write tokens straight into the memory of their experts' ranks, and sums into the tokens'.

    See `TokenExchange` for what all exchanges share. Results are the bits of
    `AllGatherPrepareAndFinalize`.

    **Prepare** is one kernel. It quantizes each token's row in registers, writes it once to every
    rank that holds one of the token's experts, and waits until all ranks have written. The experts
    read their rows, scales, ids and weights where the other ranks wrote them. **Finalize** is one
    kernel too: it writes the partial sums of other ranks' tokens to these ranks, waits, and adds
    the sums of this rank's tokens.

    Nothing waits for the host, and no state is on the host: both kernels may be captured in CUDA
    graphs and replayed with other routing, and compiled. Multicast is not used.

    **Windows.** Each rank has one window, for ``R * max_num_tokens`` rows and as many sums. It is
    allocated by `connect`, which all ranks must reach together; the first eager call does so. What
    ``prepare`` returns lies in the window until the ranks' next ``prepare``, so one call may be in
    flight at a time, or ``in_flight`` calls with as many windows. Layers that run one after the
    other can share windows: see ``share``.

    **Interrupts.** On a CPU, an exception such as KeyboardInterrupt while a rank waits for others
    is a failure that stays, as the others may have its rows already: `check` and all later calls of
    this rank raise, and the others get no answer from it. Construct the exchange anew on all ranks.

    **Gradients.** In grad mode prepare copies what has arrived, so that the window is free for
    other calls; inference under `torch.no_grad` does not pay for that. The backward pass sends
    gradients of the results as prepare sends tokens, and returns gradients of the rows as finalize
    returns sums. Gradients of router weights travel in a collective.

    **Token counts.** Ranks may have different numbers of tokens, also 0. The experts get P rows of
    each rank, whose padding has ids of -1. P is ``max_num_tokens``, or the number of tokens of the
    call with ``equal_num_tokens``.

    **Failures.** A rank that waits longer than ``timeout`` gives up. Its results are NaN from then
    on, and `check` and all of its later calls raise. On a CPU the call itself raises. So a rank
    that died is an error on the others. With ``on_dead_rank="mask"`` the others may then go on
    without it: see `set_live_ranks`.

    Args:
        group: see `TokenExchange`.
        max_num_tokens: the largest number of tokens that any rank passes; the same on all ranks.
        hidden_size: H of the rows.
        top_k: the largest k of a call.
        dtype: dtype of the activations, or a larger one; None: torch's default dtype.
        expert_ranks: int32 ``(E,)``, the rank that holds each expert: a row travels to these ranks
            only. None: rows travel to all ranks.
        equal_num_tokens: see `TokenExchange`.
        timeout: seconds to wait for another rank; the same on all ranks.
        share: objects of one group with the same sizes, timeout and name use the same windows, so
            their calls count together as in flight. None: windows of its own.
        in_flight: the largest number of calls that are prepared and not finalized at the same time,
            each with windows of its own: 2 for `run_micro_batches`. All ranks prepare and finalize
            in the same order.
        on_dead_rank: "raise": after a rank has died all calls raise. "mask": they raise until
            `set_live_ranks`, and then leave it out. The same on all ranks. Calls have no gradients
            with "mask", since router weights' gradients travel in a collective of all ranks.

    Raises:
        TypeError, ValueError: as `TokenExchange`, sizes below 1, a ``timeout`` that is not
            positive, an unknown ``on_dead_rank``, "mask" without ``expert_ranks``. In a call:
            tokens of another H, k or dtype; more tokens than ``max_num_tokens``.
        RuntimeError: in a call: another rank did not answer in an earlier call (on a CPU: or in
            this one); a compiled or captured call before `connect`; more than ``in_flight`` calls
            in flight.
        NotImplementedError: a compiled call with ``in_flight`` above 1; with "mask" in a call: one
            scale for the rows of all ranks, which comes from the data (``fp8_tensor``).

    Source:
        DeepEP's low-latency kernels and torchtitan's symmetric-memory all-to-all, whose epochs are
        on the host. Here each program counts its exchanges in device memory.
    """

    takes = frozenset(
        {
            "hidden_size",
            "top_k",
            "dtype",
            "expert_ranks",
            "equal_num_tokens",
            "share",
            "on_dead_rank",
        }
    )
    max_num_tokens: int

    def __init__(
        self,
        group: Any,
        max_num_tokens: int,
        hidden_size: int,
        top_k: int,
        *,
        dtype: torch.dtype | None = None,
        expert_ranks: Tensor | None = None,
        equal_num_tokens: bool = False,
        timeout: float = 30.0,
        share: str | None = None,
        in_flight: int = 1,
        on_dead_rank: str = "raise",
    ) -> None:
        checks.at_least(1, max_num_tokens=max_num_tokens, hidden_size=hidden_size, top_k=top_k)
        checks.at_least(1, in_flight=in_flight)
        checks.number("timeout", timeout)
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        checks.one_of("on_dead_rank", on_dead_rank, ON_DEAD_RANK)
        super().__init__(group, max_num_tokens, equal_num_tokens=equal_num_tokens)
        if expert_ranks is not None:
            check_expert_ranks(expert_ranks, self.group.size)
        elif on_dead_rank == "mask":
            raise ValueError(
                'on_dead_rank must be "raise" unless each expert is on one rank, that of '
                'expert_ranks, got "mask"'
            )
        itemsize = (dtype or torch.get_default_dtype()).itemsize
        layout = WindowLayout(self.group.size, max_num_tokens, hidden_size, top_k, itemsize)
        self.layout = layout._replace(masked=on_dead_rank == "mask")
        self.timeout, self.share, self.in_flight = float(timeout), share, in_flight
        self.expert_ranks = expert_ranks
        self._windows: list[Windows] = []

    @classmethod
    def make(cls, needs: Needs) -> TokenExchange:
        """Make the exchange of a layer, which shares its windows with other layers.

        Raises:
            ValueError: no ``max_num_tokens``.
        """
        if needs.max_num_tokens is None:
            raise ValueError(
                "max_num_tokens must be given for all2all_backend 'symmetric', got None"
            )
        return super().make(needs)

    def supports_async(self) -> bool:
        """False: kernels run on the current stream. `AsyncPrepareAndFinalize` runs them beside."""
        return False

    def connect(self, device: torch.device | str) -> list[Windows]:
        """Allocate the windows on ``device``, unless they are there; all ranks together.

        The first eager call does this. Call it before a first call that is compiled or captured.
        """
        device = torch.device(device)
        if not self._windows or self._windows[0].own.device != device:
            self.attach([self._allocated(device, number) for number in range(self.in_flight)])
        return self._windows

    def _allocated(self, device: torch.device, number: int) -> Windows:
        """Windows for one call in flight: of its own, or those that others share."""
        if self.share is None:
            return allocate(self.layout, self.group, device, self.timeout)
        name = f"{self.share} {number}"
        return allocate_shared(name, self.layout, self.group, device, self.timeout)

    def attach(self, windows: list[Windows]) -> None:
        """Use windows that are allocated already, one for each call in flight."""
        self._windows, device = windows, windows[0].own.device
        if self.expert_ranks is not None:
            self.expert_ranks = self.expert_ranks.to(device)
        tensors = [self.expert_ranks, *(t for w in windows for t in (w.peers, w.state))]
        for tensor in tensors:
            if tensor is not None:  # compilers must not copy them
                torch._dynamo.mark_static_address(tensor)

    def has_gradients(self) -> bool:
        """Whether calls have gradients: not with ``on_dead_rank="mask"``."""
        return not self.layout.masked

    def set_live_ranks(self, ranks: Sequence[int], group: Any) -> None:
        """Go on with these ranks alone: all of them call this together, between two calls.

        Slots whose experts are on other ranks are left out from then on, and counted by
        `num_dropped_slots`; `EplbState.set_live_ranks` lets replicas take over. Nothing is written
        to the memory of other ranks, and their tokens have no ids. The mask is in device memory:
        captured graphs may be replayed. Of exchanges that share windows, one calls this (that with
        the most ``in_flight``). The host waits for the device and for the live ranks. Failures, and
        calls in flight, are forgotten. The process of a rank that is left out must have ended.

        Args:
            ranks: the live ranks of the exchange's group, with this one; the same on all of them.
            group: a process group of these ranks alone; None if there is only one. `new_group`
                makes it with ``backend="gloo", use_local_synchronization=True``.

        Raises:
            TypeError: ``ranks`` is not a sequence of int, or ``group`` not a group.
            ValueError: ``on_dead_rank`` is "raise"; no ranks, a rank twice, one outside the group,
                not this one; a ``group`` of other processes.
            RuntimeError: before `connect`.
        """
        if not self.layout.masked:
            raise ValueError('on_dead_rank must be "mask" to leave ranks out, got "raise"')
        live = check_live_ranks(ranks, self.group.size)
        if self.group.size > 1:
            group = group_of_live_ranks(live, self.group.process_group(), group)
        if not self._windows:
            raise RuntimeError("connect(device) must be called before set_live_ranks")
        restart(self._windows, live, group)

    def num_dropped_slots(self) -> int:
        """Slots of this rank's tokens whose expert was on a dead rank, in all calls so far.

        The host waits for the device. Exchanges that share windows count together.
        """
        return sum(windows.num_dropped_slots() for windows in self._windows)

    def check(self) -> None:
        """Raise if another rank has not answered; does not wait for the device.

        Raises:
            RuntimeError: with the rank that did not answer in time.
        """
        for windows in self._windows:
            if windows.answer[0]:
                raise RuntimeError(windows.failure())

    def _check_done(self, windows: Windows) -> None:
        """Run `check` after an operator of the CPU, which has waited for the other ranks."""
        if not torch.compiler.is_compiling() and not windows.own.is_cuda:
            self.check()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the windows out: a copy allocates or shares its own."""
        return {**self.__dict__, "_windows": []}

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Quantize and write to the ranks of the experts."""
        a1, scale, quant = tokens.a1, tokens.input_scale, tokens.quant
        one_scale = tokens.everywhere or (quant is not None and quant.of_all_rows)
        if one_scale and self.layout.masked:  # it takes a collective
            raise NotImplementedError(
                "quant_config must not have one scale for the rows of all ranks with on_dead_rank "
                f'"mask", got {tokens.quant_config.scheme.name}'
            )
        windows = self._ready(a1, tokens.topk_ids)
        on_input, key = tokens.on_input, "" if quant is None else quant.key
        if quant is not None and (quant.of_all_rows or (scale is not None and scale.numel() != 1)):
            a1, scale = self.rows_of(tokens)
            on_input, key = False, ""
        shared = scale if scale is not None and scale.dim() == 1 and not key else None
        size = a1.shape[0] if self.equal_num_tokens else self.max_num_tokens
        rows, row_scale, weights, ids = ops.symmetric_send(
            a1,
            None if shared is not None else scale,
            tokens.topk_weights,
            tokens.topk_ids,
            None if tokens.everywhere else self.expert_ranks,
            windows.peers,
            windows.state,
            size,
            tokens.num_experts,
            on_input,
            key,
        )
        self._check_done(windows)
        there = row_scale if shared is None else shared
        self._begin(windows, ids)
        return lambda: Arrived(rows, None if quant is None else there, weights, ids)

    def send_back(self, sums: Tensor, topk_ids: Tensor) -> Receiver:
        """Write partial sums to their tokens' ranks, and add."""
        if not self._windows:
            raise RuntimeError("prepare must be called before finalize")
        windows = self._given_up("in_flight", topk_ids)
        if windows is None:
            raise ValueError("topk_ids must be the tensor that prepare returned, got another one")
        where = (windows.peers, windows.state)
        out = ops.symmetric_return(sums, self.expert_ranks, *where, topk_ids.shape[1])
        self._check_done(windows)
        return lambda: out

    def kept(self, arrived: Arrived) -> Arrived:
        """Copy what lies in the window, with zeros for rows that were not sent to this rank.

        The call is in flight as long as somebody holds the copied ids.
        """
        ids = arrived.topk_ids
        taken = arrived.rows, arrived.topk_weights, ids
        rows, weights, copied = out_of_window(self._are_here(ids), *taken)
        if not torch.compiler.is_compiling():
            self._begin(next(w for w in self._windows if w.in_flight() is ids), copied)
        return arrived._replace(rows=rows, topk_weights=weights, topk_ids=copied)

    def _are_here(self, topk_ids: Tensor) -> Tensor:
        """Mask of the tokens that were sent to this rank."""
        ranks, here = self.expert_ranks, topk_ids >= 0
        if ranks is not None:
            own = torch.cat([ranks == self._windows[0].rank, here.new_zeros(1)])
            here = own[topk_ids.clamp(max=len(ranks) - 1).long()]
        return here.any(-1)

    def send_again(self, rows: Tensor, topk_ids: Tensor) -> Receiver:
        """Write rows to the ranks of the experts once more; `send_gradients_back` may follow."""
        if torch.compiler.is_compiling():
            windows = self._windows[0]
        else:
            self.check()
            free = [w for w in self._windows if w.in_flight() is None]
            windows = next((w for w in free if w.again() is None), None) or self._free(free)
            windows.again = ref(topk_ids)
        size = rows.shape[0]
        ids = topk_ids[windows.rank * size : (windows.rank + 1) * size]
        most = MAX_EXPERTS if self.expert_ranks is None else len(self.expert_ranks)
        arrived, *_ = ops.symmetric_send(
            rows,
            None,
            ids.new_zeros(ids.shape, dtype=torch.float32),
            ids,
            self.expert_ranks,
            windows.peers,
            windows.state,
            size,
            most,
            False,
            "",
        )
        self._check_done(windows)
        (gradients,) = out_of_window(self._are_here(topk_ids), arrived)
        return lambda: gradients

    def send_gradients_back(
        self, rows: Tensor | None, topk_weights: Tensor | None, topk_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient of the rows through the windows, that of the weights in a collective.

        Raises:
            RuntimeError: gradients of more calls than ``in_flight`` travel at the same time.
        """
        dx = dweights = None
        if rows is not None:
            windows, top_k = self._given_up("again", topk_ids), topk_ids.shape[1]
            if windows is None:
                raise RuntimeError(
                    "in_flight must be at least the number of calls whose gradients travel at the "
                    f"same time, got {self.in_flight}"
                )
            where = (windows.peers, windows.state)
            dx = ops.symmetric_return(rows.contiguous(), self.expert_ranks, *where, top_k)
            self._check_done(windows)
        if topk_weights is not None:
            travelling = self.group.start_exchange(topk_weights.contiguous())
            dweights = sum_of_ranks(self.group.wait(travelling), self.group.size)
        return dx, dweights

    def _ready(self, a1: Tensor, topk_ids: Tensor) -> Windows:
        """The windows, once the call fits them."""
        self.check_room(a1)
        layout = self.layout
        checks.size("a1.shape[1]", a1.shape[1], "hidden_size", layout.hidden_size)
        if topk_ids.shape[1] > layout.top_k:
            raise ValueError(
                f"topk_ids must have at most top_k = {layout.top_k} columns, got "
                f"{topk_ids.shape[1]}"
            )
        if a1.dtype.itemsize > layout.itemsize:
            raise TypeError(
                f"a1 must have numbers of at most {layout.itemsize} bytes, got {a1.dtype}"
            )
        traced = torch.compiler.is_compiling()
        if not traced:
            self.check()
        if self._windows and (traced or self._windows[0].own.device == a1.device):
            return self._free(self._windows)
        if traced or (a1.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "connect(device) must be called on all ranks before a call is compiled or captured"
            )
        return self._free(self.connect(a1.device))

    def _free(self, windows: list[Windows]) -> Windows:
        """The first windows that hold no tokens of a call in flight."""
        if torch.compiler.is_compiling():
            if self.in_flight > 1:
                raise NotImplementedError("in_flight must be 1 where calls are compiled")
            return windows[0]
        free = [window for window in windows if window.in_flight() is None]
        if not free:
            raise RuntimeError(
                f"in_flight must be at least the number of calls that are prepared and not "
                f"finalized, got {self.in_flight}"
            )
        return free[0]

    def _begin(self, windows: Windows, ids: Tensor) -> None:
        """Note that a call is in flight as long as somebody holds the ids that it got."""
        if not torch.compiler.is_compiling():
            windows.in_flight, windows.again = ref(ids), nothing

    def _given_up(self, use: str, topk_ids: Tensor) -> Windows | None:
        """The windows whose ``use`` is that of these ids, which end it; None: no windows have it.

        ``use`` is "in_flight" or "again".
        """
        if torch.compiler.is_compiling():
            return self._windows[0]
        for windows in self._windows:
            if getattr(windows, use)() is topk_ids:
                setattr(windows, use, nothing)
                return windows
        return None
