"""Tables of layers beside their best peers, and the cells that a peer wins."""

import inside_report
import peers_report
import report
from inside_sglang import SGLANG
from inside_vllm import VLLM


def record_of(*rows):
    header = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04"}
    return {**header, "commit": "0123456789", "rows": list(rows)}


def row(shape, impl, time_us, scheme="bf16", tokens=8, routing="uniform"):
    return {"scheme": scheme, "shape": shape, "M": tokens, "impl": impl, "routing": routing,
            "time_us": time_us, "floor_us": None}  # fmt: skip


ROWS = (
    row("a", "moe_ops", 10.0), row("a", "x", 40.0), row("a", "y", 20.0),
    row("b", "moe_ops", 20.0), row("b", "x", 10.0), row("b", "moe_ops-invariant", 1.0),
    row("c", "moe_ops", 10.0), row("c", "x", 10.0), row("c", "y", 1.0, routing="zipf"),
    row("a", "moe_ops", 5.0, "fp8_block128"), row("a", "x", 15.0, "fp8_block128", 64),
    row("phi-3.5-moe", "moe_ops", 3.0), row("phi-3.5-moe", "y", 2.0),
)  # fmt: skip


def test_headline_beside_the_best_peer():
    """Its cells name the peer that is the best on most layers; untuned layers have one line."""
    text = report.headline([record_of(*ROWS)])
    assert "| `bf16` (3 layers) | - | 1.00 x | - |" in text, "(0.5 * 2 * 1) ** (1 / 3)"
    assert "| all schemes (1 layer that nobody tuned) | - | 1.50 y | - |" in text
    assert "fp8_block128` (" not in text, "no peer was timed with as many tokens"
    assert (
        "A peer is faster in 2 of the 4 cells: `bf16` of b with 8 tokens (2.00, x);"
        " `bf16` of phi-3.5-moe with 8 tokens (1.50, y)." in text
    )
    assert "over 3 models' layers (a, b, c)" in text and "Peers: x; y (a)." in text


def test_every_cell_beside_its_best_peer():
    other = record_of(row("a", "moe_ops", 1.0), row("a", "x", 4.0, tokens=64))
    text = peers_report.report([record_of(*ROWS), other])
    assert text.count("\n### ") == 1, "the other GPU has no peer"
    assert text.endswith(
        "#### G beside peers: bf16\n\n| tokens: | 8 |\n| --- | --: |\n| a | 0.50 y |\n"
        "| b | **2.00 x** |\n| c | 1.00 x |\n| phi-3.5-moe | **1.50 y** |"
    )
    found = peers_report.cells(record_of(*ROWS))
    assert "(2.00, x); and 1 more." in peers_report.in_words(found, 1)
    assert peers_report.in_words(found[:1]) == "No peer is faster in any of the 1 cells."


def test_report_of_layers_inside_vllm():
    """Implementations by the names of their experts, and the versions of vLLM and Humming."""
    assert inside_report.report([], VLLM) == "No results yet."
    rows = [
        {"scheme": "nvfp4_w4a16", "shape": "mixtral", "M": 8, "routing": "uniform", "impl": impl,
         "time_us": time, "floor_us": None, "config": {"vllm": "0.33.0", "humming-kernels": "0.1"}}
        for impl, time in (("moe_ops-in-vllm", 20.0), ("vllm-method-marlin", 40.0),
                           ("vllm-method-humming", 25.0))
    ]  # fmt: skip
    text = inside_report.report([record_of(*rows)], VLLM)
    assert "vLLM 0.33.0 and Humming 0.1 on " in text and "tuned" not in text
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        "| mixtral | moe_ops | **20.0** |",
        "|  | Humming | 25.0 (0.80) |",
        "|  | Marlin | 40.0 (0.50) |",
    ]


def test_report_of_layers_inside_sglang():
    """It says for which layers SGLang's kernels have tuned tiles."""
    versions = {"sglang": "0.5.23", "sglang-kernel": "0.4"}
    rows = [
        {"scheme": "bf16", "shape": shape, "M": 8, "routing": "uniform", "impl": impl,
         "time_us": time, "floor_us": None, "config": {**versions, **facts}}
        for shape, impl, time, facts in (
            ("mixtral", "moe_ops-in-sglang", 20.0, {}),
            ("mixtral", "sglang-triton", 40.0, {"tuned": True}),
            ("qwen3-30b", "sglang-triton", 30.0, {"tuned": False}),
        )
    ]  # fmt: skip
    text = inside_report.report([record_of(*rows)], SGLANG)
    assert "inside SGLang's `MoeRunner`, uniform" in text
    assert "SGLang 0.5.23 and sglang-kernel 0.4 on " in text
    assert "\nSGLang ships tuned tiles for this GPU for mixtral in bf16.\n" in text
    assert "| mixtral | moe_ops | **20.0** |\n|  | SGLang's Triton | 40.0 (0.50) |" in text
    text = inside_report.report([record_of(rows[2])], SGLANG)
    assert "for none of these layers." in text
