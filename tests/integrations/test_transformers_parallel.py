"""transformers' own expert and tensor parallelism, with the experts of each rank on moe_ops."""

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import BACKENDS, device, spawn
from tiny_transformers import build
from torch.distributed.tensor import DTensor

pytest.importorskip("accelerate", reason="transformers places parallel models with it")


EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {
    "mixtral": "MixtralExperts", "deepseek_v3": "DeepseekV3Experts", "glm4_moe": "Glm4MoeExperts",
    "gpt_oss": "GptOssExperts",
}  # fmt: skip
"""Architectures with a plan for their experts. They differ in routers, shared experts, biases."""
NO_PARTS = {"gpt_oss"}
"""Architectures of which transformers has no plan for parts of experts."""


def check_text(rank, ranks, tensor_parallel):
    runpy.run_path(str(EXAMPLES / "parallel_text.py"))["main"](device(), tensor_parallel)


def check_finetuning(rank, ranks, folder):
    torch.optim.AdamW = partial(torch.optim.AdamW, foreach=True)  # the default on GPUs
    runpy.run_path(str(EXAMPLES / "finetune_ranks.py"))["main"](device(), folder)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_write_the_text_of_one(backend, tensor_parallel):
    spawn(check_text, 2, tensor_parallel, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_continues_what_two_have_trained(backend, tmp_path):
    spawn(check_finetuning, 2, str(tmp_path), backend=backend)


def whole(x):
    """The parts of all ranks, put together; torch 2.11 cannot where each rank has several pieces.

    Halves of a gated weight are cut each: a rank has a piece of every half.
    """
    (cut,) = x.placements
    halves = getattr(cut, "split_factor", 1)
    if halves == 1:
        return x.full_tensor()
    part = x.to_local().contiguous()
    parts = [torch.empty_like(part) for _ in range(x.device_mesh.size())]
    dist.all_gather(parts, part, group=x.device_mesh.get_group())
    pieces = zip(*(p.chunk(halves, cut.dim) for p in parts), strict=True)
    return torch.cat([piece for half in pieces for piece in half], cut.dim)


def check_gradients(rank, ranks, folder, tensor_parallel):
    """Gradients of a model over ranks are those of the model on one."""
    example = runpy.run_path(str(EXAMPLES / "parallel_text.py"))
    more = {} if tensor_parallel else example["whole_experts"](ranks)
    spread = example["DistributedConfig"](tp_size=ranks, **more)
    for kind, experts in MODELS.items():
        model, arguments = build(f"transformers.models.{kind}.modeling_{kind}", experts)
        if rank == 0:
            model.save_pretrained(f"{folder}/{kind}")
        dist.barrier()
        arguments["input_ids"] = arguments["input_ids"].to(device())
        gradients = []
        for options in ({"device_map": device()}, {"distributed_config": spread}):
            options |= {"dtype": torch.float32, "experts_implementation": "moe_ops"}
            trained = type(model).from_pretrained(f"{folder}/{kind}", **options)
            logits = trained(**arguments).logits
            g = torch.Generator().manual_seed(3)
            logits.backward(torch.randn(logits.shape, generator=g).to(device()))
            gradients.append({name: x.grad for name, x in trained.named_parameters()})
        one, of_rank = gradients
        assert one.keys() == of_rank.keys()
        for name, wanted in one.items():
            found, is_spread = of_rank[name], isinstance(of_rank[name], DTensor)
            if ".experts." in name:
                assert is_spread != (tensor_parallel and kind in NO_PARTS), f"{kind}: {name}"
            found = whole(found) if is_spread else found
            error = (found - wanted).norm() / wanted.norm()
            assert error <= 1e-4, f"{kind}: {name} has another gradient, by {error:.1e}"


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend, tensor_parallel, tmp_path):
    """Architectures with other routers and weights, by the plans that transformers has for them."""
    spawn(check_gradients, 2, str(tmp_path), tensor_parallel, backend=backend)
