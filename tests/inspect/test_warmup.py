"""Warm-up: what it runs, and that nothing is left to compile."""

import json

import pytest
import torch
from compilations import compiled_kernels
from conftest import INTERPRETED
from graphs import E, H, I, K, batch, layer_of
from planning import problem_of_layer
from torch._subclasses.fake_tensor import FakeTensorMode
from tuned_entries import entry, gemm_of, own

import moe_ops
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import assumed
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import PACKED, STREAM
from moe_ops.dispatch.problem import REACH
from moe_ops.dispatch.row_tiles import tile_rule
from moe_ops.dispatch.tiles import is_direct
from moe_ops.dispatch.tuned_file import file_name, parse_tuned_layer
from moe_ops.inspect import warmup
from moe_ops.inspect.devices import TARGETS
from moe_ops.pipeline import gemms
from moe_ops.testing import Problem, make_inputs


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile():
    """No launch of any token count up to 1500 goes through Triton's compiler again."""
    layer, inputs = layer_of(torch.float16)
    ran = moe_ops.warmup(inputs.w1, inputs.w2, K, 1500, router_logits_dtype=torch.float32)
    assert len(ran) < 18
    known = compiled_kernels()
    for tokens in (0, *range(1, 1501, 7), 1500):
        layer(*batch(tokens, dtype=torch.float16))
    assert compiled_kernels() == known
    module = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.float16, device="cuda")
    module.warmup(1500, torch.float32)
    assert compiled_kernels() == known


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme", ["fp8_block128", "fp8_channel", "fp8_tensor", "int8_tensor", "int4_w4a16_g128"]
)
def test_warmup_of_a_quantized_layer(scheme):
    layer = moe_ops.FusedMoE(
        32, K, 256, 384, params_dtype=torch.bfloat16, scheme=scheme, device="cuda"
    )
    layer.warmup(900)
    known = compiled_kernels()
    for tokens in (0, *range(1, 901, 13), 900):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        layer(x, torch.randn(tokens, 32, device="cuda", dtype=torch.bfloat16))
    assert compiled_kernels() == known


HOPPER_FILE = {
    "top_k": 4,
    "8": entry(16, own(STREAM, 64, num_stages=3), gemm_of()),
    "60": entry(16, gemm_of(), own(STREAM, 128)),
    "400": entry(64, own(PACKED, 128), own(PACKED, 256, 4, 3)),
    "700": entry(128, own(PACKED, 128), own(PACKED, 256, 4, 3)),
}


@pytest.mark.skipif(INTERPRETED, reason="there is no interpreter for Gluon")
@pytest.mark.parametrize(
    ("scheme", "file"),
    [("unquantized", None), ("fp8_tensor", None), ("fp8_tensor", HOPPER_FILE),
     ("fp8_block128", None), ("fp8_block128", HOPPER_FILE),
     ("int8_channel", None), ("int8_channel", HOPPER_FILE)],
)  # fmt: skip
def test_warmup_knows_every_kernel_of_hoppers(scheme, file, monkeypatch):
    """Those that launchers choose at any token count are chosen at one that is run."""
    (experts, width, hidden), wide = (32, 384, 256), scheme == "unquantized"
    if file:
        layers = [
            parse_tuned_layer(file_name((32, 384, 256), "NVIDIA H200", scheme), json.dumps(file))
        ]
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))
    dtype, known = torch.bfloat16, moe_ops.get_scheme(scheme)
    w1, w2 = (
        torch.empty(experts, *shape, dtype=dtype if wide else known.weight.dtype, device="meta")
        for shape in ((2 * width, hidden), (hidden, width))
    )
    variants, facts = (
        warmup.Variants(w1, w2, K, known, dtype, "silu", False),
        TARGETS["sm_90"].facts,
    )

    def kernels(tokens):
        """As the launchers choose them."""
        slots, rule = tokens * K, tile_rule(scheme, dtype, w1.device)
        for w, top_k, activation in ((w1, K, "silu"), (w2, 1, "")):
            how = {"num_tokens": tokens, "top_k": top_k, "activation": activation}
            problem = problem_of_layer((*w.shape,), known, rule, slots, **how)
            plan = plan_gemm(problem, facts)
            yield plan.kernel, plan.config, is_direct(slots, experts)

    with assumed(facts):
        ran = warmup.run_variants(lambda tokens: None, 3000, variants)
        warm = {kernel for tokens in ran for kernel in kernels(tokens)}
        # Eight tokens are a row more for each expert, by which kernels are chosen.
        counts = (*range(1, 500), *range(500, 3001, 4))
        all_of_them = {kernel for tokens in counts for kernel in kernels(tokens)}
    assert all_of_them <= warm
    assert len({kernel for kernel, *_ in warm}) >= 3


def test_warmup_runs_on_the_cpu(monkeypatch):
    """What it says that it has run it has, with dtypes as calls will have them."""
    inputs, seen = make_inputs(Problem(4, 8, 2, 32, 16), "cpu"), []

    layer = warmup.fused_experts

    def counted(x, w1, w2, weights, ids, **how):
        seen.append((len(x), weights.dtype, ids.dtype))
        return layer(x, w1, w2, weights, ids, **how)

    monkeypatch.setattr(warmup, "fused_experts", counted)
    assert moe_ops.warmup(inputs.w1, inputs.w2, 2, 20) == [1, 2]
    assert seen == [(n, torch.float32, torch.int32) for n in (1, 2)]
    dtypes = {"topk_weights_dtype": torch.float16, "topk_ids_dtype": torch.int64}
    ran = moe_ops.warmup(inputs.w1, inputs.w2, 2, (3, 500), activation="gelu", **dtypes)
    assert ran == [3, 500] and seen[2:] == [(n, torch.float16, torch.int64) for n in ran]
    with pytest.raises(ValueError, match="num_tokens must be at"):
        moe_ops.warmup(inputs.w1, inputs.w2, 2, [3, -1])


def test_warmup_of_one_token_runs_as_compiled_graphs_do_too(monkeypatch):
    """Their second GEMM does not read early, which is a kernel of its own."""
    seen, facts = [], TARGETS["sm_90"].facts

    def run(tokens):
        seen.append((tokens, gemms._APART.get()))

    def weight(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with FakeTensorMode(), assumed(facts):
        scheme = moe_ops.get_scheme("unquantized")
        how = (2, scheme, torch.bfloat16, "silu", False)
        variants = warmup.Variants(weight(64, 128, 128), weight(64, 128, 64), *how)
        assert warmup.run_variants(run, [1, 2], variants) == [1, 2]
    assert seen == [(1, False), (1, True), (2, False)]


def variants_of(experts=64, width=64, hidden=128):
    w1, w2 = (
        torch.empty(experts, *shape, dtype=torch.bfloat16, device="meta")
        for shape in ((2 * width, hidden), (hidden, width))
    )
    scheme = moe_ops.get_scheme("unquantized")
    return warmup.Variants(w1, w2, K, scheme, torch.bfloat16, "silu", False)


def test_experts_of_a_rank_have_the_tiles_of_the_layer():
    with assumed(TARGETS["sm_90"].facts):
        whole, part = variants_of(128), variants_of(32)
        expert_map = torch.arange(128, dtype=torch.int32)
        of_rank = part._replace(expert_map=torch.where(expert_map < 32, expert_map, -1))
        first, alone = (v.of(256)[0][1].block_m for v in (whole, part))
        assert of_rank.of(256)[0][1].block_m == first != alone


def test_tokens_of_all_ranks_arrive():
    """Counts are chosen by what the experts get, and routers by a rank's own tokens."""
    with assumed(TARGETS["sm_90"].facts):
        alone = variants_of()
        of_four = alone._replace(arriving=lambda num_tokens: 4 * num_tokens)
        for tokens in (1, 2, 16, 100, 1000):
            assert of_four.of(tokens)[:-2] == alone.of(4 * tokens)[:-2]
            assert of_four.of(tokens)[-2:] == alone.of(tokens)[-2:]


def test_large_counts_are_not_walked_through():
    variants, asked = variants_of(), []

    def variant_of(tokens):
        asked.append(tokens)
        return variants.of(tokens)

    found = warmup.first_counts(variant_of, 10**9)
    assert len(asked) < 10_000
    *others, last = sorted(found.values())
    assert warmup.EVERY < others[-1] < 2**20
    assert last == REACH // 128 + 1  # from there on 32-bit offsets do not reach all rows
    for tokens in found.values():
        assert tokens == 1 or variants.of(tokens - 1) != variants.of(tokens)


@pytest.mark.parametrize("most", [1, 4095, 4096, 4097, 5000, 70_000, 70_001, 2**31 - 1])
def test_the_first_count_of_every_variant(most):
    bounds = (1, 3, 4096, 4097, 5000, 70_001, 70_003, 2**31 - 1)
    found = warmup.first_counts(lambda tokens: sum(b <= tokens for b in bounds), most)
    assert list(found.values()) == [b for b in bounds if b <= most]


@pytest.mark.parametrize("count", [2**31, 2**70, -1])
def test_counts_that_no_layer_has(count):
    with pytest.raises(ValueError, match="num_tokens must be at"):
        warmup.run_variants(lambda tokens: None, count, variants_of())
