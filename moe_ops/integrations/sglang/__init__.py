"""SGLang: its Triton runner of Mixture-of-Experts layers runs this library.

The distribution registers `register` in SGLang's entry-point group ``sglang.srt.plugins``, and
SGLang calls it in every process. The environment variable ``MOE_OPS_SGLANG=0`` leaves SGLang as it
is; ``SGLANG_PLUGINS`` of SGLang, if it is set, must name ``moe_ops``.

Layers without an exchange of tokens that SGLang would run with its Triton kernels run here (start
the server with ``--moe-runner-backend triton`` where it would choose other kernels). What is not
served runs SGLang's own function, and one line of the log says why. gpt-oss in MXFP4 stays in MXFP4
there, where SGLang dequantizes its weights for the Triton runner. MXFP4, and int4 and int8 with
groups, are packed where kernels of the GPU read that form. A layer can also be made with
``MoeRunner(resolve_moe_runner_backend("moe_ops"), config)``, which has nothing to fall back to.
"""

from __future__ import annotations

import os
from importlib import import_module

from moe_ops.integrations._engines import or_say

SWITCH = "MOE_OPS_SGLANG"
"""Environment variable that turns the plug-in off if it is ``0``."""
VERSION = "0.5.23"
"""Version of SGLang whose interface this plug-in was written for."""

__all__ = ["SWITCH", "VERSION", "register"]


def register() -> None:
    """Let SGLang's Triton runner run this library; calling this again changes nothing.

    If the installed SGLang has another interface, or anything else goes wrong, its log gets one
    line and SGLang runs its own kernels.
    """
    if os.environ.get(SWITCH) != "0":
        or_say("sglang", "SGLang's own kernels run", _register)


def _register() -> str | None:
    """Wrap SGLang's functions, or return why not."""
    interface = import_module(f"{__name__}._interface")
    lacking = interface.formats()
    if lacks := lacking[interface.TRITON]:
        return f"it has no {lacks} as this plug-in knows it (it was written for SGLang {VERSION})"
    if import_module(f"{__name__}._runner").install():
        for kind, module in interface.MODULES.items():
            if lacking[kind] is None:
                import_module(f"{__name__}.{module}").install()
    return None
