"""Layers inside SGLang's ``MoeRunner``: the runner core of the plug-in beside SGLang's Triton one.

    python benchmarks/inside_sglang.py

Both get the same dispatch output and the same weights, as SGLang's quantization methods pass them
(`benchmarks/peers/sglang.py`), and are timed in one run. The core gets weights in the form that the
GPU reads. MXFP4 is dequantized for SGLang's kernels, as its method of gpt-oss does. The record is
``inside_sglang.json``. Each row has the versions of SGLang and its compiled kernels, and rows of
SGLang's kernels say whether it ships tiles for these sizes on this GPU (``tuned``). Options are
those of ``moe-ops bench``.
"""

from __future__ import annotations

import sys
from typing import Any

import inside
from peers import IN_SGLANG, SGLANG_TRITON, sglang
from tables import OURS

from moe_ops.bench.layer import Case


def tuned(case: Case, impl: str) -> dict[str, Any]:
    """Say of SGLang's own kernels whether their tiles were tuned."""
    if impl != SGLANG_TRITON:
        return {}
    return {"tuned": sglang.has_tuned_tiles(sglang.held(case.experts))}


SGLANG = inside.Engine(
    "SGLang",
    runs="SGLang's `MoeRunner`",
    impls={IN_SGLANG: OURS, SGLANG_TRITON: "SGLang's Triton"},
    distributions={"SGLang": "sglang", "sglang-kernel": "sglang-kernel"},
    defaults={
        "--scheme": "bf16,fp8_block128,fp8_channel,int4_w4a16_g128,mxfp4_w4a16",
        "--model": "qwen3-30b,mixtral,gpt-oss-120b",
        "--tokens": "1,8,64,512,4096",
    },
    facts=tuned,
)

if __name__ == "__main__":
    sys.exit(inside.main(SGLANG))
