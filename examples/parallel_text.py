"""A transformers model whose experts are spread over ranks writes the text of one rank.

    torchrun --nproc-per-node 2 examples/parallel_text.py                     # whole experts
    torchrun --nproc-per-node 2 examples/parallel_text.py --tensor-parallel   # parts of experts

transformers places the experts, maps ids, and sums over the ranks (which needs the package
``accelerate``); the experts of each rank run on moe_ops. On GPUs (one for each rank, over NCCL) or
on the CPU (over gloo).
"""

import os
import sys
from inspect import signature

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import moe_ops  # noqa: F401  (registers "moe_ops" in transformers)
from moe_ops.demo import MODEL

PROMPT, NEW_TOKENS = "If the file", 24


def loaded(**options):
    """The model in float32, whose experts run on moe_ops."""
    options = {"dtype": torch.float32, "experts_implementation": "moe_ops", **options}
    return AutoModelForCausalLM.from_pretrained(MODEL, **options).eval()


def whole_experts(ranks):
    """The arguments for expert parallelism, which have changed in transformers 5.21."""
    if "ep_size" in signature(DistributedConfig).parameters:
        return {"ep_size": ranks}
    return {"enable_expert_parallel": True}


def main(device, tensor_parallel=False):
    """Run on the ranks of a group that is initialized."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.to(device)
    spread = DistributedConfig(tp_size=ranks, **({} if tensor_parallel else whole_experts(ranks)))
    texts = []
    for model in (loaded().to(device), loaded(distributed_config=spread)):
        with torch.no_grad():
            texts.append(model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False))
    if not torch.equal(*texts):
        raise RuntimeError(f"other texts: {[tokenizer.decode(text[0]) for text in texts]}")
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    print(f"rank {rank} of {ranks} computes {experts.num_experts} experts: "
          f"{tokenizer.decode(texts[0][0])!r}")  # fmt: skip


if __name__ == "__main__":
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    main(device, "--tensor-parallel" in sys.argv)
    dist.destroy_process_group()
