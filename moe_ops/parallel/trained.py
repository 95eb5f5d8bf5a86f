"""Parameters that were trained: the optimizer's state must move with their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

_TRAINED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Whether each watched parameter has received a gradient."""


def watch(parameters: Iterable[Tensor]) -> None:
    """Note from now on which of the parameters receive gradients, if they require them."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_leaf and parameter not in _TRAINED:
            _TRAINED[parameter] = False
            parameter.register_post_accumulate_grad_hook(_note)


def _note(parameter: Tensor) -> None:
    _TRAINED[parameter] = True


def check_untrained(tensors: Mapping[str, Tensor]) -> None:
    """Check that no tensor whose rows are about to move has received gradients.

    Args:
        tensors: by the names that errors give them.

    Raises:
        NotImplementedError: one has: an optimizer may hold state for its rows, which would stay.
    """
    for name, x in tensors.items():
        if _TRAINED.get(x, False) or (x.is_leaf and x.grad is not None):
            raise NotImplementedError(
                f"{name} must not be trained while its rows move, because the optimizer's state "
                "for them would stay behind, got a parameter that has received gradients. To move "
                "the state too, pass what layer.expert_tensors(optimizer) returns"
            )


def training_state(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[Tensor]:
    """Return parameters of experts, their gradients, and the optimizer's tensors with their rows.

    An optimizer's tensor without axes, such as its number of steps, belongs to no row.

    Args:
        parameters: by name; row e of each belongs to the same expert.
        optimizer: their optimizer.

    Raises:
        ValueError: the optimizer does not have a parameter that requires grad.
        NotImplementedError: one of its tensors has other rows than the parameter.
    """
    optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}
    tensors = []
    for name, x in parameters.items():
        if x.requires_grad and id(x) not in optimized:
            raise ValueError(f"optimizer must have {name}, which requires grad, got others")
        # Not the parameter itself, which `check_untrained` refuses. A graph of an earlier forward
        # sees that its rows have moved.
        tensors.append(x.detach())
        if x.grad is not None:
            tensors.append(x.grad)
        for key, value in optimizer.state.get(x, {}).items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if value.shape[0] != x.shape[0]:
                raise NotImplementedError(
                    f"optimizer.state of {name} must have a row for each of its {x.shape[0]} "
                    f"experts, got {key!r} of shape {tuple(value.shape)}"
                )
            tensors.append(value)
    return tensors
