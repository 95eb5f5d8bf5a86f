"""What the documentation site says is in the package, and the site needs nothing from elsewhere."""

import ast
import inspect
import json
import math
import re
import textwrap
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from activation_formulas import FORMULAS

import moe_ops
from moe_ops import support
from moe_ops.activation import formula

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
SUBMODULES = (
    "functional", "routing", "pipeline", "parallel", "layer", "loading", "scheme", "testing",
    "training", "quantization",
)  # fmt: skip
CHECKS = ("as_scheme", "get_scheme", "kind_and_key")
"""Functions that check an argument, beside those of `moe_ops.checks`."""


def public_functions():
    """Functions in ``__all__`` of the public modules, each once, without decorators."""
    modules = [moe_ops, *(import_module(f"moe_ops.{name}") for name in SUBMODULES)]
    found = [import_module("moe_ops.integrations.transformers").check]
    found += [getattr(module, name) for module in modules for name in module.__all__]
    return list(dict.fromkeys(inspect.unwrap(f) for f in found if is_function(f)))


def is_function(value):
    return inspect.isfunction(inspect.unwrap(value)) and not inspect.isclass(value)


def refuses(call):
    """Whether a call in a function's body checks an argument."""
    name = ast.unparse(call.func)
    return name.startswith("checks.") or name in CHECKS


def lacks(function):
    """The sections that a function's docstring should have and has not."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    sections = re.findall(r"^(\w+):$", inspect.getdoc(function) or "", re.MULTILINE)
    returns = tree.returns is not None and ast.unparse(tree.returns) != "None"
    raises = any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and refuses(node))
        for node in ast.walk(tree)
    )
    if inspect.isgeneratorfunction(function):  # a context
        returns = False
    wanted = ["Returns"] * returns + ["Raises"] * raises
    return [section for section in wanted if section not in sections]


def test_public_functions_say_what_they_return_and_raise():
    pytest.importorskip("transformers")
    functions = public_functions()
    assert len(functions) > 60
    missing = {f.__qualname__: lacks(f) for f in functions}
    assert not {name: sections for name, sections in missing.items() if sections}


def test_the_site_loads_nothing_from_elsewhere():
    """Search works from disk: the plug-in `offline` would add a script of a network otherwise."""
    config = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"[\w/.-]+\.(?:js|css)\b", config)
    assert any("iframe-worker" in name for name in named)  # the name that the plug-in looks for
    assert all((ROOT / "docs" / name).exists() for name in named)
    assert not re.search(r"polyfills:.*http", config) and "font: false" in config
    assert "navigation.footer" in config  # links to the pages before and after


IN_FORMULAS = {
    **{name: getattr(torch, name) for name in ("erf", "sigmoid", "tanh", "clamp")},
    "min": lambda x, limit: x.clamp(max=limit),
    "max": lambda x, limit: x.clamp(min=limit),
    "sqrt": math.sqrt,
    "pi": math.pi,
}
"""What the formulas of the documentation call."""


def test_written_formulas_are_the_functions():
    """Every activation as it is written out, evaluated in float64, against the oracle's."""
    g, u = (torch.linspace(-9, 9, 91, dtype=torch.float64).roll(7 * i) for i in (1, 3))
    kinds = {key.split("(")[0] for key in FORMULAS}
    assert kinds == {kind.value for kind in moe_ops.MoEActivation}
    for key, function in FORMULAS.items():
        rule = formula(key)
        written = eval(rule.expression(), {**IN_FORMULAS, "g": g, "u": u})
        wanted = function(g, u) if rule.gated else function(g)
        torch.testing.assert_close(written, wanted, msg=f"{key}: {rule.expression()}")


def test_gpus_that_ran_have_records():
    """Tests of operators and layers are in the records of every GPU that support pages name."""
    for gpu in support.MEASURED:
        paths = RESULTS.glob(f"nvidia-{gpu.lower()}*/gpu_tests*.json")
        ran = {name for path in paths for name in json.loads(path.read_text())["files"]}
        assert {"tests/ops/test_align.py", "tests/layer/test_layer_schemes.py"} <= ran, gpu
    readme = (ROOT / "README.md").read_text()
    assert all(f"{gpu}s" in readme for gpu in support.MEASURED)
    assert all(row.measured == tuple(support.MEASURED) for row in support.SUPPORT)


def templates():
    """Every text of the package, with ``..`` for what is formatted into it."""

    def text(node):
        if isinstance(node, ast.Constant):
            field = r"\{[^{}]*\}"  # of a template
            return re.sub(field, "..", node.value) if isinstance(node.value, str) else ".."
        parts = node.values if isinstance(node, ast.JoinedStr) else (node.left, node.right)
        return "".join(text(x) if isinstance(x, TEXTS) else ".." for x in parts)

    for path in (ROOT / "moe_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, TEXTS):
                yield text(node)


TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp)


def quoted_errors():
    """The errors that are headings of the page, with ``..`` for numbers and names."""
    page = (ROOT / "docs/support/errors.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) == len(re.findall(r"^### ", page, re.MULTILINE)) > 30
    return quoted


def test_errors_of_the_troubleshooting_page_are_those_of_the_package():
    """Each quoted error is part of one text, word for word; its numbers are left out."""
    texts = set(templates())
    gone = [error for error in quoted_errors() if not any(error in text for text in texts)]
    assert not gone


def wrong_calls():
    """Calls that the page tells how to mend."""
    x, w1, w2 = torch.randn(3, 256), torch.randn(4, 256, 256), torch.randn(4, 256, 128)
    weights, ids = torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    scheme, layer = "fp8_channel", moe_ops.FusedMoE(4, 2, 256, 128)
    q1, q2 = (moe_ops.quantize_weight(w, scheme) for w in (w1, w2))

    def config(name, s1=q1.scale, s2=q2.scale):
        return moe_ops.FusedMoEQuantConfig(name, w1_scale=s1, w2_scale=s2)

    def call(x=x, w1=w1, w2=w2, **rest):
        return moe_ops.fused_experts(x, w1, w2, weights, ids, **rest)

    def backward():
        s1 = q1.scale.clone().requires_grad_()
        call(w1=q1.data, w2=q2.data, quant_config=config(scheme, s1)).sum().backward()

    per_expert = config("fp8_tensor", torch.ones(4), torch.ones(4))
    yield partial(call, w1=w1[:, 1:])
    yield partial(call, w1=q1.data)
    yield partial(call, quant_config=scheme)
    yield partial(call, quant_config=config("fp8_block128", None))
    yield partial(call, w1=q1.data, w2=q2.data, quant_config=config("fp8_block128"))
    yield partial(call, x.to("meta"))
    yield partial(call, x.bfloat16())
    yield partial(call, w1=w1.repeat(1, 2, 2)[:, ::2, ::2])
    yield partial(moe_ops.fused_moe, x, w1, w2, torch.randn(3, 4), 9)
    yield partial(call, global_num_experts=8)
    yield partial(call, activation="tanh")
    yield partial(call, activation="situ")
    yield partial(moe_ops.get_scheme, "fp8")
    yield partial(call, w1=q1.data, w2=q2.data, quant_config=per_expert, batch_invariant=True)
    yield backward
    yield partial(moe_ops.load_checkpoint, layer, {"experts.down_proj": w2}, progress=False)
    yield partial(moe_ops.load_checkpoint, layer.to("meta"), {}, progress=False)
    yield partial(moe_ops.quantize_, layer, "mxfp4_w4a8")


def test_quoted_errors_come():
    """Every wrong call raises an error of the page, each another one."""
    patterns = {e: ".*".join(map(re.escape, e.split(".."))) for e in quoted_errors()}
    seen = []
    for call in wrong_calls():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        (found,) = (e for e, pattern in patterns.items() if re.match(pattern, str(error.value)))
        seen.append(found)
    assert len(set(seen)) == len(seen) == 18
