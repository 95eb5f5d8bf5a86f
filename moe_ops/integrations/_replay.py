"""Recording and replaying the routing of transformers' models.

A router of transformers chooses by ``topk`` over its experts, and takes the weights from the values
of that ``topk`` or gathers them by its indices. So inside a block with experts the indices are
replaced, and whatever the router does to weights, bias and groups included, stays its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_ops import checks
from moe_ops.integrations._reach import is_decorated

Routing = Mapping[str, Tensor | Sequence[Tensor]]
"""Name of an experts module -> the experts of its tokens, ``(T, k)``: of every forward, or one
tensor for each forward."""
SCORES = (
    torch.softmax, torch.sigmoid, Tensor.softmax, Tensor.sigmoid, nn.functional.softmax,
    nn.functional.sigmoid, nn.functional.softplus,
)  # fmt: skip
"""Functions that make scores of logits."""
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of the forward of experts."""
CHOICES = (torch.topk, Tensor.topk)
GATHERS = (torch.gather, Tensor.gather)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record which experts the tokens of each forward go to.

    Args:
        model: a model of transformers, with any experts implementation.

    Yields:
        Name of each experts module -> its ids, one tensor ``(T, k)`` int32 for each forward, in
        order. A forward that was captured in a CUDA graph adds one tensor, which replays overwrite.

    Raises:
        ValueError: a model without experts that transformers dispatches.
    """
    routing: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, experts, _ in _experts_in(model):
            routing[name] = []
            hook = experts.register_forward_pre_hook(_recorder(routing[name]), with_kwargs=True)
            stack.callback(hook.remove)
        yield routing


@contextmanager
def replay_routing(model: nn.Module, routing: Routing) -> Iterator[None]:
    """Send the tokens of every forward to given experts, with the weights of the model's routers.

    Routers weight these experts as if they had chosen them, with gradients to their logits. A slot
    whose id is no expert (-1, or out of range) is skipped and takes no part in the weights of the
    token's other slots. Experts that are not named choose for themselves.

    Args:
        model: a model of transformers, with any experts implementation.
        routing: what `record_routing` yields, or a tensor ``(T, k)``, int32 or int64, of a module
            for all forwards: this is for `torch.compile`, CUDA graphs (replays read the tensor
            again) and gradient checkpointing, whose backward pass must run inside of this context.

    Raises:
        TypeError: ids of a wrong dtype.
        ValueError: a name that is no experts module of the model; in a forward, another number of
            tokens than the ids have, or more forwards than a sequence has tensors.
        NotImplementedError: in a forward, a router that does not choose by ``topk`` (Phi-3.5-MoE,
            Zaya), or another number of experts.

    Source:
        Rollout routing replay (arXiv 2510.11370).
    """
    blocks = {name: (experts, block) for name, experts, block in _experts_in(model)}
    for name, chosen in routing.items():
        checks.one_of("a name of routing", name, tuple(blocks))
        for ids in [chosen] if isinstance(chosen, Tensor) else chosen:
            checks.tensor(f"routing[{name!r}]", ids, 2, checks.INDICES)
    with ExitStack() as stack:
        for name, chosen in routing.items():
            experts, block = blocks[name]
            _install(stack, _Replayed(name, chosen, experts.num_experts), experts, block)
        yield


def _experts_in(model: nn.Module) -> list[tuple[str, Any, nn.Module]]:
    """Name, experts and parent of each experts module, whose router runs in the parent."""
    blocks = [
        (name, module, model.get_submodule(name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if is_decorated(module)
    ]
    if not blocks:
        raise ValueError(
            "model must have experts that transformers dispatches, got "
            f"{type(model).__name__} without any"
        )
    return blocks


def _recorder(seen: list[Tensor]) -> Callable[..., None]:
    def record(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        seen.append(ids.detach().to(torch.int32, copy=True))

    return record


class _Replayed(TorchFunctionMode):
    """Names the experts of a block's tokens, forward by forward, in place of its router.

    `torch.compile` traces a mode that exists before the forward.
    """

    def __init__(self, name: str, steps: Tensor | Sequence[Tensor], num_experts: int) -> None:
        super().__init__()
        self.name, self.steps, self.num_experts = name, steps, num_experts
        self.forwards, self.scored = 0, False
        self.ids: Any = None
        """The ids of the forward that is under way."""
        self.chosen: Tensor | None = None
        """These ids, 0 where there is no expert, once the router has asked for them."""

    def begin(self) -> None:
        """Take the ids of the next forward."""
        self.chosen, self.scored = None, False
        if isinstance(self.steps, Tensor):
            self.ids = self.steps
            return
        if self.forwards == len(self.steps):
            raise ValueError(
                f"routing[{self.name!r}] must have a tensor for each forward, got {len(self.steps)}"
            )
        self.ids = self.steps[self.forwards]
        self.forwards += 1

    def valid(self) -> Tensor:
        """Which slots name an expert."""
        return (self.ids >= 0) & (self.ids < self.num_experts)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHOICES and self._is_choice(*args, **kwargs):
            values = self._gather(args[0])
            return type(func(*args, **kwargs))((values, self.chosen))
        if func in GATHERS and self._is_weight(*args, **kwargs):
            return self._gather(args[0])
        self.scored = self.scored or func in SCORES
        return func(*args, **kwargs)

    def _is_choice(self, scores: Tensor, k: int, *args: Any, **kwargs: Any) -> bool:
        """Whether ``topk`` chooses experts among all."""
        sizes = (self.num_experts, self.ids.shape[1])
        return scores.dim() == 2 and (scores.shape[1], k) == sizes

    def _is_weight(self, scores: Tensor, dim: int, index: Tensor, **kwargs: Any) -> bool:
        """Whether ``gather`` takes the scores of the experts that ``topk`` or a table has named."""
        return index is self.chosen or (
            self.chosen is None
            and scores.dim() == 2
            and scores.shape[1] == self.num_experts
            and index.shape == self.ids.shape
        )

    def _gather(self, scores: Tensor) -> Tensor:
        """Gather the scores at the given experts.

        A slot without an expert has the score 0 or the logit -inf. The weights of a token without
        any expert may become NaN: nothing reads them, and the mask stops their gradient.
        """
        name, valid = f"routing[{self.name!r}].shape[0]", self.valid()
        checks.size(name, self.ids.shape[0], "the number of tokens", scores.shape[0])
        if self.chosen is None:
            self.chosen = torch.where(valid, self.ids, 0).to(torch.int64)
        values = scores.gather(1, self.chosen)
        return values.masked_fill(~valid, 0.0 if self.scored else -torch.inf)


def _install(stack: ExitStack, replayed: _Replayed, experts: Any, block: nn.Module) -> None:
    """Replay in ``block`` until ``stack`` is closed."""
    run, own = block.forward, vars(block).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        replayed.begin()
        with replayed:
            return run(*args, **kwargs)

    def skip(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Skip slots that name no expert: an id behind the last expert, weight 0."""
        if replayed.chosen is None:
            raise NotImplementedError(
                f"routing[{replayed.name!r}] must be of a router that chooses among its "
                f"{replayed.num_experts} experts by topk, as many as there are columns, got "
                f"{replayed.ids.shape[1]} columns; leave it out to let the router choose"
            )
        valid = replayed.valid()
        arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        weights = arguments["top_k_weights"]
        arguments["top_k_index"] = torch.where(valid, replayed.chosen, replayed.num_experts)
        arguments["top_k_weights"] = torch.where(valid, weights, 0.0)
        return (), arguments

    hook = experts.register_forward_pre_hook(skip, with_kwargs=True)
    stack.callback(hook.remove)
    block.forward = forward
    stack.callback(_restore, block, own)


def _restore(block: nn.Module, own: Any) -> None:
    """Give a block its forward back."""
    if own is None:
        del block.forward
    else:
        block.forward = own
