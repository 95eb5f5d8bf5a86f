"""Serve a model with vLLM, in a process of its own: `main` prints what it wrote as JSON.

    python tests/vllm_serve.py '{"model": "path", "dtype": "float32"}'

Prompts are continued greedily. `served` runs this file and reads the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS = ("If the file", "Return the number of", "The following example", "A list of")
TOKENS = 32
MARK = "WRITTEN "
CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2",
}  # fmt: skip
"""Environment of an engine on the CPU, in one process."""


class Written(NamedTuple):
    """What an engine wrote."""

    tokens: list[list[int]]
    """The tokens after each prompt."""
    best: list[list[dict[int, float]]]
    """Log-probabilities of the two best tokens at each position."""
    log: str
    """Everything that the process printed."""


def served(ours: bool, **options: Any) -> Written:
    """Serve with this library's experts or with vLLM's own; ``options`` are those of ``LLM``."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(options)],
        env={**os.environ, **CPU, "MOE_OPS_VLLM": str(int(ours))},
        capture_output=True, text=True, cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    tokens, best = json.loads(line[len(MARK) :])
    by_token = [[{int(t): p for t, p in position.items()} for position in one] for one in best]
    return Written(tokens, by_token, log)


def main() -> None:
    """Serve, and print the result after `MARK`."""
    from vllm import LLM, SamplingParams

    engine = LLM(max_model_len=256, max_num_seqs=8, seed=0, **json.loads(sys.argv[1]))
    how = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
    outputs = [request.outputs[0] for request in engine.generate(PROMPTS, how, use_tqdm=False)]
    best = [
        [{token: found.logprob for token, found in position.items()} for position in one.logprobs]
        for one in outputs
    ]
    print(MARK + json.dumps([[list(one.token_ids) for one in outputs], best]))


if __name__ == "__main__":
    main()
