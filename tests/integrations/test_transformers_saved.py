"""Quantized models of transformers that version 0.2 saved: see `data/saved_by_0.2/make.py`."""

from pathlib import Path

import pytest
import torch

import moe_ops

transformers = pytest.importorskip("transformers")

import moe_ops.integrations.transformers as integration  # noqa: E402

MODELS = Path(__file__).parents[1] / "data/saved_by_0.2/models"


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int4_w4a16_g32", "mxfp6_e2m3"])
def test_a_saved_model(scheme, tmp_path):
    """In the form of compressed-tensors, and in our own: the same bits, read and saved again."""
    model, report = integration.from_pretrained(MODELS / scheme, output_loading_info=True)
    assert not any(report.values()), report
    experts = model.model.layers[0].mlp.experts
    assert experts.moe_ops_layer.scheme == moe_ops.get_scheme(scheme)
    saved = torch.load(MODELS / f"{scheme}.pt", weights_only=True)
    assert torch.equal(experts(*saved["inputs"]), saved["output"])
    model.save_pretrained(tmp_path)
    load = pytest.importorskip("safetensors.torch").load_file
    before, after = (load(folder / "model.safetensors") for folder in (MODELS / scheme, tmp_path))
    assert before.keys() == after.keys()
    for name, x in before.items():
        y = after[name]
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
