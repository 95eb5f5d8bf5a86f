"""vLLM: its Mixture-of-Experts layers run the experts of this library.

The distribution registers `register` in vLLM's entry-point group ``vllm.general_plugins``, and vLLM
calls it in every process. There is nothing else to do. The environment variable ``MOE_OPS_VLLM=0``
leaves vLLM as it is; ``VLLM_PLUGINS`` of vLLM, if it is set, must name ``moe_ops``.

Where vLLM would ask its Triton experts, it asks this library's experts first. These decline what
they do not serve; vLLM then runs its own experts, and one line of its log says why.
"""

from __future__ import annotations

import os
from importlib import import_module

from moe_ops.integrations._engines import attribute_of, or_say

SWITCH = "MOE_OPS_VLLM"
"""Environment variable that turns the plug-in off if it is ``0``."""
VERSIONS = "0.32, 0.33"
"""Versions of vLLM whose interface this plug-in was written for."""

__all__ = ["SWITCH", "VERSIONS", "register"]


def register() -> None:
    """Let vLLM choose this library's experts; calling this again changes nothing.

    If the installed vLLM has another interface, or anything else goes wrong, its log gets one line
    and vLLM runs its own experts.
    """
    if os.environ.get(SWITCH) != "0":
        or_say("vllm", "vLLM's own experts run", _register)


def _register() -> str | None:
    """Wrap vLLM's functions, or return why not."""
    lacks = import_module(f"{__name__}._interface").missing()
    if lacks:
        version = attribute_of("vllm", "__version__")
        return (
            f"vLLM {version} has no {lacks} as this plug-in knows it (it was written for "
            f"{VERSIONS})"
        )
    import_module(f"{__name__}._oracles").install()
    return None
