"""Parameters that were trained: the optimizer's state does not move with their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
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
                "the state too, pass the data of the parameters (x.data) and the optimizer's "
                "tensors of these parameters"
            )
