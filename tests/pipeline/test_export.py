"""torch.export and AOTInductor: dynamic token counts, saved, loaded and run at one token."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import python
from torch import nn

import moe_ops

E, K, H = 8, 2, 32
ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, device=device)
        self.experts = moe_ops.FusedMoE(E, K, H, 24, device=device, has_bias=True)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)
            parameter.requires_grad_(False)

    def forward(self, x):
        return x + self.experts(x, self.router(x))


def exported(device, kind=Block):
    torch.manual_seed(0)
    block = kind(device).eval()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    x = torch.randn(7, H, device=device)
    return block, torch.export.export(block, (x,), dynamic_shapes=({0: tokens},))


def test_exported_program_runs_at_any_token_count(device, tmp_path):
    block, program = exported(device)
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for tokens in (7, 1, 64, 2, 1000):
        x = torch.randn(tokens, H, device=device)
        torch.testing.assert_close(loaded(x), block(x))
    called = {str(n.target) for n in program.graph.nodes if "moe_ops" in str(n.target)}
    assert "moe_ops.expert_product.default" in called


class Functions(nn.Module):
    """Experts without a layer; weights that require grad end a trace with an error of torch's."""

    def __init__(self):
        super().__init__()
        self.router, self.w1 = nn.Linear(H, E), nn.Parameter(torch.randn(E, 48, H))
        self.w2 = torch.randn(E, H, 24)

    def forward(self, x):
        return moe_ops.fused_moe(x, self.w1, self.w2, self.router(x), K)

    def run(self, x):
        """Call the experts by a function, of which torch knows no parameters."""
        return moe_ops.fused_moe(x, self.w1, self.w2, x[:, :E], K)


class Leaves(torch.fx.Tracer):
    """What the error of `torch.fx.symbolic_trace` advises."""

    def is_leaf_module(self, module, name):
        return isinstance(module, moe_ops.FusedMoE) or super().is_leaf_module(module, name)


def test_older_tracers_say_what_to_use(tmp_path):
    """TorchScript and FX cannot hold a layer: an error names the tool, and another one."""
    x, block, parts = torch.randn(7, H), Block("cpu"), Functions()
    older, file = {"dynamo": False, "verbose": False}, str(tmp_path / "block.onnx")
    script, symbolic = "TorchScript .*torch.export", "symbolic_trace .*torch.export"
    cases = {
        "jit.trace": (lambda: torch.jit.trace(block, (x,)), script),
        "jit.trace of a layer": (lambda: torch.jit.trace(block.experts, (x, x[:, :E])), script),
        "jit.trace of a function": (lambda: torch.jit.trace(parts, (x,)), script),
        "jit.trace of a closure": (lambda: torch.jit.trace(lambda x: parts.run(x), (x,)), script),
        "jit.script": (lambda: torch.jit.script(block), script),
        "jit.script of a layer": (lambda: torch.jit.script(block.experts), script),
        "onnx": (lambda: torch.onnx.export(block, (x,), file, **older), script),
        "fx": (lambda: torch.fx.symbolic_trace(block), symbolic),
        "fx of a function": (lambda: torch.fx.symbolic_trace(parts), symbolic),
    }
    wrong = {}
    for name, (call, text) in cases.items():
        with pytest.raises(Exception) as error:  # noqa: PT011 (the table says what is right)
            call()
        if error.type is not NotImplementedError or not re.search(text, str(error.value)):
            wrong[name] = f"{error.typename}: {error.value}"
    assert not wrong
    traced = torch.fx.GraphModule(block, Leaves().trace(block))
    assert torch.equal(traced(x), block(x))


def test_draft_export_finds_changes_where_there_is_no_tensor():
    """torch's own fault: the same call exports, and the limits quote the error."""
    limits = " ".join((ROOT / "docs/limits.md").read_text().split())
    with pytest.raises(RuntimeError, match="argument 'e_score_correction_bias'") as error:
        torch.export.draft_export(Block("cpu"), (torch.randn(7, H),))
    quoted = "specified that the operator does not mutate the argument, but this seems to be "
    assert quoted in str(error.value) and quoted in limits


LOADING = """
import torch
{before}
program = torch.export.load({path!r}).module()
print(tuple(program(torch.randn(1, {H})).shape))
"""


def quoted(text):
    """The beginning of an error of torch's, which the page about export must quote."""
    assert text in (ROOT / "docs/guides/export.md").read_text()
    return text


@pytest.mark.slow
def test_a_loading_process_must_import_moe_ops(tmp_path):
    _, program = exported("cpu")
    path = str(tmp_path / "block.pt2")
    torch.export.save(program, path)

    def load(before):
        return python(LOADING.format(before=before, path=path, H=H))

    without = load("")
    reason, raised = "failed to resolve torch.ops.moe_ops.", "RuntimeError: We ran into an error"
    assert without.returncode != 0 and quoted(reason) in without.stderr
    assert quoted(raised) in without.stderr
    with_import = load("import moe_ops")
    assert with_import.returncode == 0, with_import.stderr
    assert with_import.stdout.strip() == f"(1, {H})"


QUICKLY = {"aot_inductor.compile_wrapper_opt_level": "O0"}
"""Settings of Inductor: the C++ of a package takes half a minute to optimize."""
PLAIN_PACKAGE = """
import torch
class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x
program = torch.export.export(Double(), (torch.ones(2),))
path = torch._inductor.aoti_compile_and_package(
    program, package_path={path!r}, inductor_configs={quickly!r}
)
torch._inductor.aoti_load_package(path)(torch.ones(2))
"""


@pytest.fixture(scope="module")
def working_aoti(tmp_path_factory):
    """Some builds of torch crash on loading any package, which would take this process with it."""
    path = str(tmp_path_factory.mktemp("plain") / "plain.pt2")
    code = PLAIN_PACKAGE.format(path=path, quickly=QUICKLY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"torch {torch.__version__} cannot load a package without moe_ops in it either")


class Quantized(Block):
    """Experts in fp8 behind the router of a block."""

    def __init__(self, device):
        super().__init__(device)
        weights = (torch.randn(E, *shape, device=device) / 6 for shape in ((48, H), (H, 24)))
        first, second = (moe_ops.quantize_weight(w.bfloat16(), "fp8_channel") for w in weights)
        self.first, self.second = first.data, second.data
        self.config = moe_ops.FusedMoEQuantConfig.from_weights("fp8_channel", first, second)

    def forward(self, x):
        weights, ids = moe_ops.fused_topk(x, self.router(x), K, True)
        how = (self.first, self.second, weights, ids)
        return moe_ops.fused_experts(x, *how, quant_config=self.config)


class Both(nn.Module):
    """Plain and quantized experts in one package, which is compiled once."""

    def __init__(self, device):
        super().__init__()
        self.plain, self.quantized = Block(device), Quantized(device)

    def forward(self, x):
        return self.plain(x), self.quantized(x)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("working_aoti")
def test_aot_inductor(device, tmp_path):
    """AOTInductor of torch 2.11 hands dtypes to operators as other ones: plain experts alone."""
    block, program = exported(device, Both if torch.__version__ >= "2.13" else Block)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "block_aoti.pt2"), inductor_configs=QUICKLY
    )
    compiled = torch._inductor.aoti_load_package(package)
    for tokens in (7, 1, 64):
        x = torch.randn(tokens, H, device=device)
        torch.testing.assert_close(compiled(x), block(x))
    code = f"import torch; torch._inductor.aoti_load_package({package!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert quoted("Could not find schema for moe_ops::") in done.stderr
