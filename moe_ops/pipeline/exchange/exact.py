"""Several ranks, Standard format: as many rows travel as tokens need, which the host must know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.checking import is_capturing
from moe_ops.pipeline.exchange.groups import check_equal_scales
from moe_ops.pipeline.exchange.one_copy import Copies, OneCopyExchange
from moe_ops.pipeline.exchange.records import Arrived, Outgoing


class ExactAllToAllPrepareAndFinalize(OneCopyExchange):
    """Send a token once to each rank of its experts, and nothing else.

    See `OneCopyExchange` for what travels. Ranks tell each other how many rows they send. The host
    reads these numbers and waits for the device in every call, so a call can be neither compiled
    nor captured. There is no padding: memory and bytes are the least that one copy for each rank
    takes. It is the reference for memory, and of use where prompts are long and kernels are not
    replayed.

    All ranks must call this equally often and in the same order, as `AllGatherPrepareAndFinalize`.
    The results agree with its results as `FixedCapacityPrepareAndFinalize` says. Ranks
    compare a static or global scale of the rows in every call.

    Args:
        group: as in `TokenExchange`.
        max_num_tokens: as in `TokenExchange`; a limit, which changes nothing else.
        expert_ranks: as in `OneCopyExchange`.

    Raises:
        TypeError, ValueError: as `OneCopyExchange`. In a call, on all ranks: scales that differ
            between ranks.
        NotImplementedError: a compiled or captured call, before any collective.

    Source:
        Megatron-LM ``MoEAlltoAllTokenDispatcher``, which sends a copy for each slot.
    """

    def send(self, tokens: Outgoing) -> Callable[[], Arrived]:
        """Refuse compiled and captured calls; otherwise as `OneCopyExchange.send`."""
        if torch.compiler.is_compiling() or is_capturing(tokens.a1):
            raise NotImplementedError(
                "ExactAllToAllPrepareAndFinalize must be called eagerly, because the host reads "
                "how many rows travel, got a call that is compiled or captured; the backends "
                "fixed_capacity and allgather_reducescatter can be"
            )
        return super().send(tokens)

    def copies_of(self, tokens: Outgoing, ranks: Tensor) -> Copies:
        """All copies, by rank; waits until the device has counted them."""
        size = self.group.size
        end, places, slots = ops.moe_permutation(ranks, None, size)
        counts = end.diff()[:, None].double()
        a1_scale = tokens.input_scale
        if a1_scale is not None:
            counts = torch.cat([counts, a1_scale.reshape(1, 1).double().expand(size, 1)], 1)
        others = self.group.wait(self.group.start_exchange(counts))
        sent, received = torch.stack([counts, others]).tolist()
        if a1_scale is not None:
            check_equal_scales([scale for _, scale in received])
        rows = [int(row[0]) for row in sent]
        return Copies(slots[: sum(rows)], end, places, rows, [int(row[0]) for row in received])
