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
from dataclasses import replace
from importlib import metadata

from peers import INSIDE, PEERS

from moe_ops.bench import layer
from moe_ops.bench.harness import Row

IMPLS = (INSIDE, "vllm-method-marlin", "vllm-method-humming")
DEFAULTS = {
    "--scheme": "int4_w4a16_g128,nvfp4_w4a16,mxfp4_w4a16",
    "--model": "qwen3-30b,deepseek-v4-flash",
    "--tokens": "1,8,64,512,4096,16384",
    "--routing": "uniform",
}
"""Options that are passed on unless they are given."""
DISTRIBUTIONS = ("vllm", "humming-kernels")
"""Distributions whose versions a row has."""


def time_case(case: layer.Case, impl: str) -> Row:
    """Time one implementation, and add the versions of vLLM and Humming to the row."""
    row = layer.time_case(case, impl)
    installed = {x.metadata["Name"]: x.version for x in metadata.distributions()}
    versions = {name: installed[name] for name in DISTRIBUTIONS if name in installed}
    return replace(row, config={**row.config, **versions})


WORK = layer.Work("inside_vllm.json", time_case, layer.print_times)


def main() -> int:
    """Run the layer benchmark on what is installed, and return its exit status."""
    passed = sys.argv[1:]
    names = {argument.partition("=")[0] for argument in passed}
    for name in IMPLS:
        lacks = PEERS[name].missing()
        if lacks:
            print(f"{name} is left out, it needs {lacks}", file=sys.stderr)
    usable = [name for name in IMPLS if PEERS[name].missing() is None]
    if not usable:
        return 1
    if {"--config", "--sizes"} & names:
        names.add("--model")
    arguments = [*passed]
    for name, value in {**DEFAULTS, "--impls": ",".join(usable)}.items():
        if name not in names:
            arguments += [name, value]
    return layer.main(arguments, prog="inside_vllm.py", work=WORK)


if __name__ == "__main__":
    sys.exit(main())
