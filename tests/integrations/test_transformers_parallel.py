"""transformers' own expert and tensor parallelism, with the experts of each rank on moe_ops."""

import runpy
from pathlib import Path

import pytest
from ranks import BACKENDS, device, spawn

pytest.importorskip("accelerate", reason="transformers places parallel models with it")


EXAMPLES = Path(__file__).parents[2] / "examples"


def check_text(rank, ranks, tensor_parallel):
    runpy.run_path(str(EXAMPLES / "parallel_text.py"))["main"](device(), tensor_parallel)


def check_finetuning(rank, ranks, folder):
    runpy.run_path(str(EXAMPLES / "finetune_ranks.py"))["main"](device(), folder)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_write_the_text_of_one(backend, tensor_parallel):
    spawn(check_text, 2, tensor_parallel, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_continues_what_two_have_trained(backend, tmp_path):
    spawn(check_finetuning, 2, str(tmp_path), backend=backend)
