"""What a GPU cannot run is said with the scheme, the GPU, and what would run on it."""

from dataclasses import replace

import pytest
import torch
from selections import BATCHED, STANDARD, layer_inputs
from table_items import every_row
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops.dispatch.blackwell import BLOCK_SCALED, TILES_FROM
from moe_ops.dispatch.device import assumed
from moe_ops.inspect.devices import TARGETS
from moe_ops.pipeline import layer_checks
from moe_ops.scheme import TENSORS, min_capability, schemes_instead, what_lacks
from moe_ops.support import ARCHITECTURES, SUPPORT, block_scaled_note

RUN = {(row.scheme, arch) for row in SUPPORT for arch in row.architectures}


@every_row("scheme", moe_ops.SCHEMES)
@every_row("arch", ARCHITECTURES)
def test_every_scheme_runs_or_names_what_does(scheme, arch):
    """And what it names runs there, if it can with the same weights."""
    value = moe_ops.SCHEMES[scheme]
    text = what_lacks(value, arch)
    assert (text is None) == ((scheme, arch) in RUN)
    if text is not None:
        weights, names = schemes_instead(value, arch)
        assert text.startswith(f"{scheme} does not run on sm_{arch}, 8-bit floats need sm_89: ")
        assert names and f"{' or '.join(names)} would ({weights})" in text
        for name in names:
            other = moe_ops.SCHEMES[name]
            assert (name, arch) in RUN and other.weight.element == value.weight.element
            assert (other.weight == value.weight) == (weights == "the same weights")


def test_no_gpu_below_ampere():
    """Nothing is named that does not run either."""
    assert what_lacks(moe_ops.SCHEMES["unquantized"], 75) == (
        "unquantized does not run on sm_75, matrix products need sm_80: nothing would"
    )
    assert "nothing would" in what_lacks(moe_ops.SCHEMES["nvfp4"], 75)


@pytest.fixture
def ampere(monkeypatch):
    """A machine whose GPU is an A100, with fake tensors on it."""
    monkeypatch.setattr(layer_checks, "known_arch", lambda device: 80)


def as_on_gpu(x):
    return (
        None
        if x is None
        else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    )


@every_row("scheme", [n for n, s in moe_ops.SCHEMES.items() if s.weight])
def test_calls_say_it_before_anything_is_launched(scheme, ampere):
    """A layer's tensors on an A100: those of schemes with 8-bit floats are refused."""
    config = replace(STANDARD, hidden_dim=96)  # of no other test, whose checks are remembered
    arguments, quant = layer_inputs(config, scheme)
    with FakeTensorMode():
        arguments = [as_on_gpu(x) for x in arguments]
        tensors = dict(zip(TENSORS, map(as_on_gpu, quant.tensors), strict=True))
        tokens = quant.scheme.activation
        if tokens is not None and (tokens.static or tokens.global_scale):
            names = ("a1_scale", "a2_scale") if tokens.static else ("a1_gscale", "a2_gscale")
            tensors |= dict.fromkeys(names, torch.empty(1, device="cuda"))
        quant = moe_ops.FusedMoEQuantConfig(quant.scheme, **tensors)
        if min_capability(quant.scheme.activation) == 80:
            moe_ops.fused_experts(*arguments, quant_config=quant)
            return
        with pytest.raises(NotImplementedError, match=f"^{scheme} does not run on sm_80, .* would"):
            moe_ops.fused_experts(*arguments, quant_config=quant)


@every_row("config", [STANDARD, BATCHED])
def test_selection_says_it(config, ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    config = replace(config, device="cuda")
    with assumed(TARGETS["sm_80"].facts), pytest.raises(NotImplementedError) as raised:
        moe_ops.select_kernel(config, "mxfp4_mxfp8")
    assert "TritonExperts: kernel does not support current device NVIDIA A100" in str(raised.value)
    text = "mxfp4_mxfp8 does not run on sm_80, 8-bit floats need sm_89: mxfp4_w4a16 or mxfp4 would"
    assert text in str(raised.value)


def test_where_products_are_block_scaled():
    """`explain` and the note of the README name the path, and that no GPU has run it."""
    config = replace(STANDARD, hidden_dim=2048, intermediate_size=768, num_experts=128)
    for device, target in TARGETS.items():
        for name in moe_ops.SCHEMES:
            arch = target.facts.arch if target.facts else 0
            text = str(moe_ops.explain(config, name, device=device))
            assert (TILES_FROM in text) == (name in BLOCK_SCALED.get(arch, ())), (name, device)
    assert (
        "`mxfp4_mxfp8`, `mxfp4_w4a8`, `mxfp4_w4a8_token` on sm_100, sm_103." in block_scaled_note()
    )
    assert "has not run on one" in block_scaled_note()
