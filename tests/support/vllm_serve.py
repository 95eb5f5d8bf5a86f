"""Serve models with vLLM, in a process of its own: `main` prints what it wrote as JSON.

    python tests/support/vllm_serve.py '[{"model": "path", "dtype": "float32"}]'

Prompts are continued greedily. `served` runs this file and reads the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

PROMPTS = ("If the file", "Return the number of", "The following example", "A list of")
TOKENS = 32
MARK = "WRITTEN "
CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Environment of an engine on the CPU, in one process."""


class Written(NamedTuple):
    """What an engine wrote."""

    tokens: list[list[int]]
    """The tokens after each prompt."""
    best: list[list[dict[int, float]]]
    """Log-probabilities of the two best tokens at each position."""
    launches: int
    """Calls of this library's operators while the engine wrote."""
    log: str
    """Everything that the process printed for this model."""


def served(ours: bool, *models: dict[str, Any]) -> list[Written]:
    """Serve models one after the other, with this library's experts or with vLLM's own.

    Args:
        ours: whether the plug-in is on.
        models: the arguments of ``LLM`` for each model; ``adapters`` beside them: the folder of
            each prompt's adapter, or None.
    """
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(models)],
        env={**os.environ, **CPU, "MOE_OPS_VLLM": str(int(ours))}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    written, log = [], []
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            tokens, best, launches = json.loads(line[len(MARK) :])
            by_token = [[{int(t): p for t, p in x.items()} for x in one] for one in best]
            written.append(Written(tokens, by_token, launches, "\n".join(log)))
            log = []
        else:
            log.append(line)
    assert len(written) == len(models)
    return written


def main() -> None:
    """Serve each model, and print its result after `MARK`."""
    for options in json.loads(sys.argv[1]):
        try:
            result = write(options)
        except Exception:  # the log says why; the other models are served
            traceback.print_exc()
            result = [], [], 0
        print(MARK + json.dumps(result), flush=True)
        forget()


def write(options: dict[str, Any]) -> tuple[Any, Any, int]:
    """Return tokens, log-probabilities and the number of calls of operators of one model."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = options.pop("adapters", None)
    if adapters is not None:
        folders = sorted({folder for folder in adapters if folder})
        options |= {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": 8}
        asked = {x: LoRARequest(Path(x).name, i, x) for i, x in enumerate(folders, 1)}
        adapters = [asked.get(folder) for folder in adapters]
    engine = LLM(max_model_len=256, max_num_seqs=8, seed=0, **options)
    how = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        outputs = [
            x.outputs[0]
            for x in engine.generate(PROMPTS, how, use_tqdm=False, lora_request=adapters)
        ]
    events = profiled.key_averages()
    launches = sum(event.count for event in events if event.key.startswith("moe_ops::"))
    best = [
        [{token: found.logprob for token, found in position.items()} for position in one.logprobs]
        for one in outputs
    ]
    return [list(one.token_ids) for one in outputs], best, launches


def forget() -> None:
    """Let go of a model and of what it compiled; its log lines may be written again."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from moe_ops.integrations._engines import say_once

    cleanup_dist_env_and_memory()
    torch.compiler.reset()
    say_once.cache_clear()


if __name__ == "__main__":
    main()
