"""What `workspace_nbytes` plans is what the launchers plan, whatever dtypes the operands have."""

from collections import Counter
from functools import cache
from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from pairwise import cover
from planning import problem_of_call as described
from planning import problem_of_layer
from products import weight_of

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.device import assumed
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.operands import COLUMNS, GEMMS, SETTINGS
from moe_ops.dispatch.row_tiles import gemm_rule, tile_rule
from moe_ops.dispatch.tiles import plan_sizes
from moe_ops.inspect.devices import TARGETS
from moe_ops.inspect.scratch import problem_of_call, scratch_sizes
from moe_ops.kernels._gemm import run
from moe_ops.ops import STAGES
from moe_ops.scheme import (
    SCHEMES,
    FusedMoEQuantConfig,
    exact_fp8_scheme,
    get_scheme,
    is_packed,
    pack_weight,
    packs,
    quantize_weight,
)
from moe_ops.scheme.packed import widens_rows
from moe_ops.testing import Problem, make_inputs, quantize_inputs
from moe_ops.tuning.search import Subject

E, K, H, I = 32, 4, 256, 128  # noqa: E741
BF16, FLOATS = torch.bfloat16, (torch.bfloat16, torch.float16, torch.float32)
H200 = TARGETS["sm_90"].facts


def launched_problem(name, arguments, keywords):
    """The problem of an operator's launcher, which launches nothing."""
    found = []

    def no_kernel(result, problem, *rest, in_waves):
        found.append(problem)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_prepared", no_kernel)
        patch.setattr(run, "PREPARED", {})
        module = import_module(f"moe_ops.kernels.{STAGES[name]}")
        getattr(module, name.replace(".", "_"))(*arguments, **keywords)
    return found[0]


class Problems(TorchDispatchMode):
    """Collects the problem of every expert GEMM as it is planned before and at the launch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        planned = problem_of_call(func, args)
        if planned is not None:
            name = func.name().split("::")[1]
            self.found.append((name, planned, launched_problem(name, args, kwargs or {})))
        return out


def forms(scheme, dtype):
    """Both weights without data, in the plain and the packed form."""
    shapes = ((E, 2 * I, H), (E, H, I))
    both = [quantize_weight(torch.empty(s, dtype=dtype, device="meta"), scheme) for s in shapes]
    return [both, *([[pack_weight(q, scheme) for q in both]] if packs(scheme, H, I) else [])]


def scale_dtypes(scheme, scale):
    """Dtypes of scales that the pipeline takes; powers of two may be stored as such."""
    if scale is None or scale.dtype not in FLOATS:
        return [None]
    return [*FLOATS, *([torch.uint8] if scheme.activation is not None else [])]


def called(scheme, weights, dtype, tokens):
    """The problems of a layer's call."""
    quant, given = scheme.activation, {}
    if quant is not None and (quant.static or quant.global_scale):
        name = "a{}_gscale" if quant.global_scale else "a{}_scale"
        given = {name.format(i): torch.empty(1, device="meta") for i in (1, 2)}
    config = FusedMoEQuantConfig.from_weights(scheme, *weights, **given)
    x = torch.empty(tokens, H, dtype=dtype, device="meta")
    routing = x.new_empty(tokens, K, dtype=torch.float32), x.new_empty(tokens, K, dtype=torch.int32)
    with assumed(H200), Problems() as problems:
        moe_ops.fused_experts(x, *(w.data for w in weights), *routing, quant_config=config)
    assert len(problems.found) == 2
    return problems.found


def test_scratch_plans_what_launchers_plan():
    """Every scheme, form of the weight, dtype of its scales, and number of tokens of a kind."""
    wrong, seen = [], 0
    for scheme in SCHEMES.values():
        for weights in forms(scheme, BF16):
            for scale in scale_dtypes(scheme, weights[0].scale):
                cast = [
                    w if scale is None else w._replace(scale=w.scale.to(scale)) for w in weights
                ]
                for tokens in (1, 300):
                    for name, planned, launched in called(scheme, cast, BF16, tokens):
                        row = (scheme.name, weights[0].data.dtype, scale, tokens, name)
                        wrong += [row] * (planned != launched)
                        seen += 1
    assert not wrong and seen > 300, wrong


FORMS = {
    name: [form for form in ("plain", "packed") if form == "plain" or packs(scheme, 128, 128)]
    for name, scheme in SCHEMES.items()
}
FP8 = {exact.key for s in SCHEMES.values() if (exact := exact_fp8_scheme(s)) is not None}
"""Keys of the schemes in which a weight is held as fp8."""
FACTORS = {
    "scheme": (*SCHEMES, *FP8),
    "form": ("plain", "packed"),
    "dtype": FLOATS,
    "scale": (None, *FLOATS, torch.uint8),
    "operator": ("product", "sum", "add"),
    "activation": ("", "silu", "relu2_no_mul"),
    "rows": ("stored", "scaled", "numbers"),
    "layout": ("whole", "columns", "shifted"),
    "mode": ("", "batch_invariant", "expert_order"),
    "tokens": (1, 3, 300, None),
    "sizes": ((8, 128, 192), (32, 72, 232)),
}


def dynamic(scheme):
    """Whether there are rows that an operator may quantize: of a plain weight, undecoded ones."""
    return get_scheme(scheme).activation is not None


RULES = [
    (("scheme", "form"), lambda s, f: f in FORMS.get(s, ["plain"])),
    (("form", "sizes"), lambda f, sizes: f == "plain" or sizes[1] % 64 == 0),
    (("form", "layout"), lambda f, layout: (f, layout) != ("packed", "columns")),
    (("scheme", "scale"), lambda s, scale: scale in scale_dtypes(get_scheme(s), scale_of(s))),
    (("scheme", "operator"), lambda s, op: op != "add" or s == "unquantized"),
    (("operator", "activation"), lambda op, f: op == "product" or f == ""),
    (("operator", "tokens"), lambda op, tokens: op != "sum" or tokens is not None),
    (("operator", "mode"), lambda op, mode: (op, mode) != ("add", "expert_order")),
    (("scheme", "mode"), lambda s, mode: mode != "expert_order" or s == "unquantized"),
    (("scheme", "rows"), lambda s, rows: dynamic(s) or rows == "numbers"),
    (("scheme", "rows"), lambda s, r: r != "scaled" or takes_scale(get_scheme(s).activation)),
    (("scheme", "rows"), lambda s, r: r != "scaled" or not get_scheme(s).dequantizes_both),
    (
        ("scheme", "form", "rows"),
        lambda s, f, r: (
            r == "stored"
            or not get_scheme(s).dequantizes_both
            or (f == "packed" and widens_rows(get_scheme(s)))
        ),
    ),
]


def takes_scale(quant):
    """Whether rows of numbers may come with the scale that quantizes them."""
    return quant is not None and quant.per_tensor


@cache
def scale_of(scheme):
    return quantize_weight(torch.empty(1, 128, 128, dtype=BF16, device="meta"), scheme).scale


def placed(x, layout):
    """A tensor of this shape whose rows are further apart, or which begins elsewhere."""
    if layout == "columns":
        return x.new_empty(*x.shape[:-1], x.shape[-1] + 24)[..., : x.shape[-1]]
    return x.new_empty(x.numel() + 1)[1:].view(x.shape) if layout == "shifted" else x


def call_of(scheme, form, dtype, scale, operator, activation, rows, layout, mode, tokens, sizes):
    """An operator's call without data."""
    (experts, n, k), known = sizes, get_scheme(scheme)
    shape = (experts, 2 * n if activation == "silu" else n, k)
    q = quantize_weight(torch.empty(shape, dtype=dtype, device="meta"), known)
    q = q if form == "plain" else pack_weight(q, known)
    if scale is not None:
        q = q._replace(scale=q.scale.to(scale))
    w, top_k = placed(q.data, layout), K if operator == "product" and tokens is not None else 1
    slots = K * (64 if tokens is None else tokens)
    a, quant = torch.empty(slots // top_k, k, dtype=dtype, device="meta"), known.activation
    a_scale = a.new_empty(1, dtype=torch.float32) if rows == "scaled" else None
    if rows == "stored":
        a_scale = a.new_empty(quant.row_scale_shape(len(a), k), dtype=quant.scale_dtype)
        a = a.new_empty(len(a), quant.data_width(k), dtype=quant.dtype)
    a = placed(a, layout)
    ids = None if tokens is None else torch.empty(tokens, K, dtype=torch.int32, device="meta")
    rule = gemm_rule(scheme, a, [None, ids, None], mode == "batch_invariant")
    plan = a.new_empty(plan_sizes(slots, experts, rule).entries, dtype=torch.int32)
    weights = None if ids is None or rows == "scaled" else ids.float()
    step = 2 if layout == "shifted" else 1
    given = {
        "a": a, "a_scale": a_scale, "weight": weight_of((w, *q[1:])), "tiles": [plan, ids, None],
        "top_k": top_k, "scheme": scheme, "activation": activation, "topk_weights": weights,
        "out_dtype": dtype, mode: True, "column_step": step, "out": a.new_empty(slots, step * n),
    }  # fmt: skip
    func = {
        "product": ops.expert_product, "sum": ops.expert_product_sum, "add": ops.expert_product_out,
    }[operator]  # fmt: skip
    if operator == "product" and weights is not None:
        given["topk_weights"] = weights.flatten() if quant is None else None
    return func, {a.name: given[a.name] for a in func._schema.arguments if a.name in given}


def test_every_call_is_planned_as_it_is_launched():
    """All pairs of what operators may be given; see `FACTORS`."""
    wrong, seen = [], Counter()
    for row in cover(FACTORS, RULES):
        with assumed(H200):
            func, given = call_of(**row)
            with Problems() as problems:
                func(**given)
        for name, planned, launched in problems.found:
            seen[name] += 1
            asked = launched.summed, launched.adds > 0 and not launched.boxes
            if planned != launched or asked != (name.endswith("_sum"), name.endswith(".out")):
                wrong.append((name, row, planned, launched))
        wrong += [(row, "no plan")] * (not problems.found)
    assert not wrong, wrong[:3]
    assert {*seen} == {*GEMMS} and seen.total() > 120, seen


def test_settings_stand_as_the_schemas_say():
    for operator in (ops.expert_product, ops.expert_product_out, ops.expert_product_sum):
        arguments = operator._schema.arguments
        others = [a.name for a in arguments if "Tensor" not in str(a.type)]
        assert others == [name for name in (*SETTINGS, *COLUMNS) if name in others], operator
        assert operator is not ops.expert_product or others == [*SETTINGS]
        assert operator.name().split("::")[1] in GEMMS


def layer_plans(scheme, weights, tokens):
    """The plans of a whole layer's GEMMs, as costs, warm-up and the tuner ask for them."""
    packed = is_packed(weights[0].data)
    rule = tile_rule(scheme.key, BF16, torch.device("meta"))
    layer = (((E, 2 * I, H), "silu", K), ((E, H, I), "", 1))
    with assumed(H200):
        for which, (shape, activation, top_k) in enumerate(layer, 1):
            how = {"num_tokens": tokens, "top_k": top_k, "activation": activation}
            problem = problem_of_layer(shape, scheme, rule, tokens * K, fragments=packed, **how)
            yield plan_gemm(problem, H200)
            subject = Subject((E, I, H), K, scheme, H200)
            if subject.in_fragments(which) == packed:
                yield plan_gemm(subject.problem(tokens, which), H200)


def test_plans_of_a_layer_are_those_of_its_launchers():
    wrong = []
    for scheme in SCHEMES.values():
        for weights in forms(scheme, BF16):
            for tokens in (1, 300):
                ran = [p for *_, p in called(scheme, weights, BF16, tokens)]
                own = [plan_gemm(problem, H200)[:2] for problem in ran]
                asked = {plan[:2] for plan in layer_plans(scheme, weights, tokens)}
                if asked != {*own}:
                    wrong.append((scheme.name, weights[0].data.dtype, tokens, own, asked))
    assert not wrong, wrong


SCALE = r"must have the dtype of {}, torch.bfloat16, .* in the packed form, got torch.float32"


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "int8_w8a16_g128", "int4_w4a16_g128_zp"])
def test_scales_that_no_kernel_reads(scheme):
    """The error is about the scales, not about the form, before anything runs."""
    known, (packed,) = SCHEMES[scheme], forms(SCHEMES[scheme], BF16)[1:]
    wide = [w._replace(scale=w.scale.float()) for w in packed]
    for tokens in (1, 300):
        for _, planned, launched in called(known, wide, BF16, tokens):
            for problem in (planned, launched):
                with pytest.raises(NotImplementedError, match="w_scale " + SCALE.format("a")):
                    plan_gemm(problem, H200)
                with pytest.raises(NotImplementedError, match="w must be in the plain form"):
                    plan_gemm(problem, TARGETS["sm_80"].facts)

    def on_gpu(x):
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")

    for first in (True, False):  # the one whose scales are right
        with FakeTensorMode():
            pair = (packed[0], wide[1]) if first else (wide[0], packed[1])
            w1, w2 = (type(w)(*map(on_gpu, w)) for w in pair)
            x = torch.empty(3, H, dtype=BF16, device="cuda")
            ids = x.new_empty(3, K, dtype=torch.int32)
            config = FusedMoEQuantConfig.from_weights(known, w1, w2)
            name = rf"quant_config.w{1 + first}_scale "
            with pytest.raises(NotImplementedError, match=name + SCALE.format("hidden_states")):
                moe_ops.fused_experts(x, w1.data, w2.data, ids.float(), ids, quant_config=config)


def test_references_take_any_scales_of_packed_weights():
    """On a CPU the packed form is unpacked."""
    scheme, outs = "int4_w4a16_g128", []
    problem = Problem(3, 4, 2, H, I, BF16, scheme=scheme)
    (x, w1, w2, weights, ids, *_), config, _ = quantize_inputs(problem, make_inputs(problem))
    for dtype in (BF16, torch.float32):
        both = [
            pack_weight(q._replace(scale=q.scale.to(dtype)), scheme) for q in config.weights(w1, w2)
        ]
        config_ = FusedMoEQuantConfig.from_weights(scheme, *both)
        data = (x, both[0].data, both[1].data)
        outs.append(moe_ops.fused_experts(*data, weights, ids, quant_config=config_))
    assert torch.equal(*outs)


def test_operands_that_no_kernel_reads():
    """What is wrong with an operand of a packed weight is named."""
    scheme = "int4_w4a16_g128"
    q = forms(SCHEMES[scheme], BF16)[1][0]
    tiles = (None, None, None)
    rows = torch.empty(8, H + 8, dtype=BF16, device="meta")
    cases = [
        (rows[:, :H], q.data, ""),
        (rows[:, 1 : H + 1], q.data, "rows of a must begin at multiples of 16 bytes"),
        (rows[:, :H].float(), q.data, "the result must be torch.bfloat16 or torch.float16"),
    ]
    for a, w, why in cases:
        call = {"a": a, "w": w, "w_scale": q.scale, "tiles": tiles, "scheme": scheme}
        problem = described("expert_product", **call)
        assert problem.unread.startswith(why) and bool(why) != problem.boxes, problem.unread
        if why:
            with pytest.raises(NotImplementedError, match=why):
                plan_gemm(problem, H200)


def test_scratch_is_asked_with_the_scale():
    """Wide scales raise where memory is counted as well."""
    scheme = SCHEMES["int4_w4a16_g128"]
    w = forms(scheme, BF16)[1][1]
    a, ids = torch.empty(8, I, dtype=BF16, device="meta"), torch.empty(2, 4, device="meta").int()
    rest = (None, [ids.new_empty(64), ids, None], 1, scheme.key, a.dtype)
    assert scratch_sizes(ops.expert_product, (a, None, weight_of(w), *rest), H200) is not None
    wide = weight_of(w._replace(scale=w.scale.float()))
    with pytest.raises(NotImplementedError, match="w_scale must have the dtype of a"):
        scratch_sizes(ops.expert_product, (a, None, wide, *rest), H200)
