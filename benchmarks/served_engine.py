"""An engine of vLLM in a process of its own, which serves models of `served_models` one by one.

It reads a request a line and prints its reply as JSON after `MARK`, beside vLLM's own log.
`served_vllm.py` starts it, with the plug-in on or off.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import served_models
import torch
import vllm
from safetensors.torch import save_file
from served_vllm import MARK
from torch import nn
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moe_ops.integrations._engines import say_once

COMPARED, LENGTH = 8, 32
"""Prompts whose continuations are compared, and their tokens."""
BEST = 5
"""Tokens at each position of which log-probabilities are noted."""


@register_model_loader("random")
class RandomLoader(BaseModelLoader):
    """Gives a model's own loader the tensors of `served_models`."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load random tensors; ``model_loader_extra_config`` says of which model."""
        case = self.load_config.model_loader_extra_config
        built = served_models.shell(case["model"], case["layers"])
        with next(model.parameters()).device:
            model.load_weights(served_models.tensors(built, case["scheme"]))


def engine_of(case: dict[str, Any], options: dict[str, Any], folder: Path) -> LLM:
    """Start an engine on a model, with options of ``LLM``; its configuration goes into a folder."""
    config = served_models.described(
        served_models.shell(case["model"], case["layers"]), case["scheme"]
    )
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        model=str(folder),
        load_format="random",
        model_loader_extra_config=case,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        dtype="bfloat16",
        seed=0,
        **options,
    )


def adapters_of(case: dict[str, Any], count: int, folder: Path) -> list[LoRARequest]:
    """Make adapters of a model's experts, in PEFT's format."""
    built, requests = served_models.shell(case["model"], case["layers"]), []
    for number in range(1, count + 1):
        place = folder / f"adapter{number}"
        place.mkdir()
        save_file(served_models.adapter(built, number), place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(served_models.ADAPTER))
        requests.append(LoRARequest(place.name, number, str(place)))
    return requests


def prompts(engine: LLM, count: int, length: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, the same for every engine."""
    generator = torch.Generator().manual_seed(count + length)
    vocabulary = engine.model_config.get_vocab_size()
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def experts_in(model: nn.Module) -> list[str]:
    """The names of the classes of experts that a model's layers run."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    kernels = (getattr(method, "moe_kernel", None) for method in methods)
    return sorted({type(kernel.impl.fused_experts).__name__ for kernel in kernels if kernel})


class Served:
    """The model that is served now, if any: a method for each verb of a request."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.adapters: list[LoRARequest] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, case: dict[str, Any], options: dict[str, Any], adapters: int) -> dict[str, Any]:
        """Start an engine on a model, with so many adapters."""
        begun = time.perf_counter()
        self.folder = tempfile.TemporaryDirectory()
        self.adapters = adapters_of(case, adapters, Path(self.folder.name))
        if adapters:
            rank = served_models.RANK
            options |= {"enable_lora": True, "max_loras": adapters, "max_lora_rank": rank}
        self.engine = engine_of(case, options, Path(self.folder.name))
        seconds = time.perf_counter() - begun
        experts = self.engine.apply_model(experts_in)[0]
        return {"start_s": seconds, "experts": experts, "vllm": vllm.__version__}

    def _continued(self, count: int, length: int, new: int, **sampling: Any) -> list[Any]:
        """Continue prompts greedily, each with the next adapter if there are some."""
        greedy = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **sampling
        )
        turns = self.adapters or [None]
        return self.engine.generate(
            prompts(self.engine, count, length),
            greedy,
            use_tqdm=False,
            lora_request=[turns[i % len(turns)] for i in range(count)],
        )

    def write(self, new: int) -> dict[str, Any]:
        """Greedy tokens, and the best tokens at each position with log-probabilities."""
        done = self._continued(COMPARED, LENGTH, new, logprobs=BEST)
        outputs = [request.outputs[0] for request in done]
        best = [
            [{token: x.logprob for token, x in place.items()} for place in output.logprobs]
            for output in outputs
        ]
        return {"tokens": [list(output.token_ids) for output in outputs], "best": best}

    def time(self, count: int, length: int, new: int) -> float:
        """Seconds in which prompts are continued."""
        start = time.perf_counter()
        self._continued(count, length, new)
        return time.perf_counter() - start

    def busy(self, count: int, length: int, new: int) -> float | None:
        """Seconds that kernels take while prompts are continued.

        None without a GPU, and on GPUs that other processes use.
        """
        if not torch.cuda.is_initialized():
            return None
        cuda = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=cuda) as profile:
            self._continued(count, length, new)
        return 1e-6 * sum(kernel.self_device_time_total for kernel in profile.key_averages())

    def stop(self) -> None:
        """Let go of a model and of what it compiled; its log lines may be written again."""
        self.engine = None
        cleanup_dist_env_and_memory()
        torch.compiler.reset()
        say_once.cache_clear()
        gc.collect()
        torch.cuda.empty_cache()
        if self.folder is not None:
            self.folder.cleanup()


def main() -> None:
    """Answer each line of stdin: a verb and its arguments."""
    served = Served()
    asked = (served.start, served.write, served.time, served.busy, served.stop)
    verbs = {verb.__name__: verb for verb in asked}
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            reply = {"reply": verbs[verb](**arguments)}
        except Exception as error:  # the log says where; other models are served
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(MARK + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
