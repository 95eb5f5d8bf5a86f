"""transformers' own expert and tensor parallelism, with the experts of each rank on moe_ops."""

import runpy
from pathlib import Path

import pytest
from ranks import BACKENDS, device, spawn

pytest.importorskip("accelerate", reason="transformers places parallel models with it")


def check_text(rank, ranks, tensor_parallel):
    script = Path(__file__).parents[2] / "examples" / "parallel_text.py"
    runpy.run_path(str(script))["main"](device(), tensor_parallel)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_write_the_text_of_one(backend, tensor_parallel):
    spawn(check_text, 2, tensor_parallel, backend=backend)
