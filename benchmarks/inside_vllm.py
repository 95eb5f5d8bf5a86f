"""4-bit layers inside vLLM's modular kernel: this library's experts beside Marlin and Humming.

    python benchmarks/inside_vllm.py

vLLM's own quantization methods make all three (`benchmarks/peers/vllm_methods.py`), which are timed
in one run: int4 in groups of 128, NVFP4 weights and MXFP4, also with the sizes of DeepSeek-V4. The
record is ``inside_vllm.json``, and each row has the versions of vLLM and Humming. Options are those
of ``moe-ops bench``. What is not installed is left out; Humming needs the package that vLLM 0.33
depends on.
"""

from __future__ import annotations

import sys

import inside
from peers import INSIDE
from tables import OURS

VLLM = inside.Engine(
    "vLLM",
    runs="vLLM's modular kernel",
    impls={INSIDE: OURS, "vllm-method-marlin": "Marlin", "vllm-method-humming": "Humming"},
    distributions={"vLLM": "vllm", "Humming": "humming-kernels"},
    defaults={
        "--scheme": "int4_w4a16_g128,nvfp4_w4a16,mxfp4_w4a16",
        "--model": "qwen3-30b,deepseek-v4-flash",
        "--tokens": "1,8,64,512,4096,16384",
    },
)

if __name__ == "__main__":
    sys.exit(inside.main(VLLM))
