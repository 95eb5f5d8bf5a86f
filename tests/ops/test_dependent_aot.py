"""Every kernel takes its turn before it touches memory: seen in its code, without a GPU."""

import ast
import re
from pathlib import Path

import pytest
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
import aot_launches  # noqa: E402
import stage_launches  # noqa: E402
import torch  # noqa: E402
from table_items import every_row  # noqa: E402
from token_layers import Layer  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import moe_ops.kernels  # noqa: E402
from moe_ops.dispatch.blackwell import BLOCK_SCALED  # noqa: E402
from moe_ops.kernels import activation
from moe_ops.kernels._hopper import one_token_sizes as token_sizes
from moe_ops.kernels._runtime import dependent
from moe_ops.ops import STAGES  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
FILES = sorted(Path(moe_ops.kernels.__file__).parent.rglob("*.py"))
GLOBAL = re.compile(
    r"^\s*(@!?%\w+ )?(ld|st|atom|red|prefetch)\S*\.global|cp\.async\.(ca|cg|bulk\.tensor|bulk\.sh)"
)
MANY, WGRAD = "hopper_decode_many_kernel", "hopper_wgrad_kernel"
ALONE = ("hopper_gemm_kernel", "_pack_kernel", "_quantize_pack_kernel", MANY, WGRAD)
"""Launched without the option: they ran slower with it."""
LONG = (MANY, WGRAD, "_expert_dgrad_kernel", "_expert_wgrad_kernel")
"""Kernels that let the next one in only as they end, like those whose names say GEMM."""
TOKEN, TOKEN_SUM = BY_THEMSELVES = ("hopper_token_kernel", "hopper_token_sum_kernel")
"""They wait, and let the next one in, without `take_turn`."""
CONTROL = {
    "take_turn": ["gdc_wait", "gdc_launch_dependents"],
    TOKEN: ["gdc_wait"],
    "copy_rows": ["gdc_launch_dependents"] * 2,
    TOKEN_SUM: ["gdc_wait"],
    "multiply_columns": ["gdc_wait"],
}
"""The only functions that do either."""
TURN = re.compile(r"take_turn\((LONG=True|ROOM=S.ROOM)?\)")


def jitted():
    """Every function of a kernel, by name."""
    found = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            decorators = getattr(node, "decorator_list", [])
            if any("jit" in ast.unparse(decorator) for decorator in decorators):
                found.setdefault(node.name, []).append(node)
    return found


def kernels():
    """The functions that no other one calls: those are launched."""
    functions = jitted()
    called = set()
    for nodes in functions.values():
        for node in nodes:
            called |= {n.id for body in node.body for n in ast.walk(body) if type(n) is ast.Name}
    return {name: nodes for name, nodes in functions.items() if name not in called}


def test_every_kernel_and_nothing_else_takes_its_turn():
    """Whatever a program finds to do: in the kernel's own lines, before it may return."""
    launched = kernels()
    assert len(launched) > 25 and "take_turn" not in launched
    for name, nodes in jitted().items():
        for node in nodes:
            lines = [ast.unparse(statement) for statement in node.body]
            turns = sum(len(TURN.findall(line)) for line in lines)
            assert turns == (name in launched and name not in BY_THEMSELVES), name
            if turns:
                first = [bool(TURN.fullmatch(line)) for line in lines].index(True)
                before = "\n".join(lines[:first])
                assert not re.search(r"\breturn\b|load|store\(|atomic|warp_specialize", before), (
                    name
                )


def test_who_waits_and_lets_in():
    """GEMM 1 of one token lets the next one in at last; GEMM 2 waits, whatever it has read."""
    found = {}
    for name, (node, *_) in jitted().items():
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        names = [ast.unparse(call).split(".")[-1] for call in calls]
        found[name] = [n for n in names if n.startswith("gdc_")]
    assert {name: calls for name, calls in found.items() if calls} == CONTROL
    (rows,), (columns,) = jitted()["copy_rows"], jitted()["multiply_columns"]
    assert ast.unparse(rows.body[-1]) == "gdc_launch_dependents()"
    lines = [ast.unparse(statement) for statement in columns.body]
    before = "\n".join(lines[: lines.index("gdc_wait()")])
    assert not re.search(r"\breturn\b|store\(|atomic|\bh\b|\bout\b", before)


def test_every_launch_has_the_option():
    """Kernels are started by `Launch`, which adds it, or name it."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                allowed = given.get("launch_pdl") == "ENABLED" or path.name == "launch.py"
                allowed |= getattr(node.func.value, "id", None) in ALONE
                assert allowed, f"{path.name}:{node.lineno}"


def launch_small(empty):
    activation.activation(empty(4, 64), "silu")


def compiled(arch, launch, *, nth=None):
    found = {}
    for kernel in aot.compile_launch(arch, launch, nth=nth):
        found.setdefault(kernel.metadata.name, []).append(kernel)
    return found


def check_turn(kernel):
    """One wait, then one trigger (none in a long kernel), nothing of global memory before them."""
    lines = [line for line in kernel.asm["ptx"].splitlines() if not line.lstrip().startswith(".")]
    (wait,) = (n for n, line in enumerate(lines) if "griddepcontrol.wait" in line)
    name = kernel.metadata.name
    triggers = [n for n, line in enumerate(lines) if "griddepcontrol.launch_dep" in line]
    assert len(triggers) == ("gemm" not in name and name not in LONG), name
    memory = [n for n, line in enumerate(lines) if GLOBAL.search(line)]
    assert kernel.metadata.launch_pdl == (name not in ALONE), name
    order = [wait, *triggers, *memory[:1]]
    assert memory and order == sorted(order), (name, order)
    entry = "\n".join(lines[:wait])
    assert not re.search(r"\b(ret|exit);", entry) and "@" not in lines[wait], name
    if "warp_specialize" not in kernel.asm["ttgir"]:
        assert "bra" not in entry, name


def check_rows_turn(kernel):
    """One wait before memory is touched; both warps that copy let the next one in.

    At one of two places: a few weights before the end, or where there is nothing to copy. The
    second place is the same code in both warps: Triton writes it once from 3.8 on, before twice.
    """
    lines = kernel.asm["ptx"].splitlines()
    (wait,) = (n for n, line in enumerate(lines) if "griddepcontrol.wait" in line)
    memory = [n for n, line in enumerate(lines) if GLOBAL.search(line)]
    assert memory and wait < memory[0] and "@" not in lines[wait]
    places = 4 if aot.RELEASE in ("3.6", "3.7") else 3
    assert kernel.asm["ptx"].count("griddepcontrol.launch_dep") == places
    assert kernel.metadata.launch_pdl


def check_sum_turn(kernel):
    """It waits before rows are read and anything is written; before that it reads the ids.

    And weights, in warps that have no pointers of what others write. Unless it is early, it waits
    before that as well.
    """
    early, code = constants(kernel).EARLY, kernel.asm["ttgir"]
    lines = kernel.asm["ptx"].splitlines()
    waits = [n for n, line in enumerate(lines) if "griddepcontrol.wait" in line]
    memory = [n for n, line in enumerate(lines) if GLOBAL.search(line)]
    assert len(waits) == 2 - early and not any("@" in lines[wait] for wait in waits)
    assert (memory[0] < waits[0]) == early
    given = re.search(r"ttg.warp_specialize\((.*?)\)", code)[1].split(", ")
    of_routing = {"%topk_ids", "%expert_map"}  # what GEMM 1 has read
    others = {f"%{name}" for name in kernel.src.fn.arg_names} - of_routing
    assert not set(given) & (others - {"%w_desc", "%w_scale", "%num_ids", "%num_experts"})
    start = code.index("default {", code.index("ttg.warp_specialize"))
    before = aot.WAIT.split(code[start:], maxsplit=1)[0]
    assert before != code[start:]
    assert set(re.findall(r"tt.splat (%\w+) : !tt.ptr", before)) <= of_routing
    assert "tt.load" in before and "tt.store" not in before
    assert kernel.metadata.launch_pdl and "griddepcontrol.launch_dep" not in kernel.asm["ptx"]


def constants(kernel):
    """Those that the launcher of one token made."""
    return next(c for c in kernel.src.constants.values() if isinstance(c, token_sizes.TokenSizes))


def launch_shared(empty):
    """What other tests compile too."""
    quants = [q for q in stage_launches.QUANTS if q.startswith("int8") and "1x16" not in q]
    for quant in quants:
        tokens, width = (1, 2880) if "1x*" in quant else (4096, 16384)
        ways = stage_launches.ways_of(quant)
        stage_launches.launch_quantization(tokens, quant, width, ways)(empty)
    stage_launches.launch_stages(4096)(empty)
    stage_launches.launch_topk(160, 6, 8, "softmax")(empty)
    stage_launches.launch_adjustments(160, 6)(empty)
    stage_launches.launch_weight_gradients(16, torch.bfloat16, 1536, 2880)(empty)
    stage_launches.launch_backward(empty)
    aot_launches.launch_gemms(16, torch.bfloat16, "silu")(empty)
    Layer(empty, (128, 2048, 768, 8), "fp8_channel").sum()
    for _, launch in stage_launches.SYNCHRONIZED.values():
        launch(empty)


@pytest.fixture(scope="module")
def on_hopper(request):
    """Kernels by name, as their launchers make them; without --exhaustive the first of each.

    That is one which another test compiles too, where there is one.
    """
    nth = None if request.config.getoption("exhaustive") else 0
    samples = aot_launches.launch_samples(STAGES)

    def launch(empty):
        for some in (launch_shared, samples, aot_launches.launch_more):
            some(empty)
        aot_launches.launch_residency(empty, 4, 2)

    found = compiled(90, launch, nth=nth)
    for name, more in compiled(90, aot_launches.launch_early, nth=nth).items():
        found.setdefault(name, []).extend(more)
    return found


@every_row("name", kernels())
def test_nothing_comes_before_the_turn(name, on_hopper):
    """In PTX, where loads of a loop's first steps have been moved to its front."""
    if name == "block_scaled_gemm_kernel":
        scaled = aot_launches.launch_samples(["expert_product"], BLOCK_SCALED[100])
        found = compiled(100, scaled)[name]
    else:
        found = on_hopper.get(name)
    assert found, "no sample launches it"
    check = {TOKEN: check_rows_turn, TOKEN_SUM: check_sum_turn}.get(name, check_turn)
    for kernel in found:
        check(kernel)
    if name == TOKEN_SUM:
        assert {constants(kernel).EARLY for kernel in found} == {False, True}


@pytest.mark.parametrize(("arch", "has"), [(80, False), (100, True), (103, True), (120, True)])
def test_other_architectures(arch, has):
    ((kernel,),) = compiled(arch, launch_small).values()
    assert kernel.metadata.launch_pdl == has
    assert ("griddepcontrol" in kernel.asm["ptx"]) == has
    if has:
        check_turn(kernel)


def test_it_can_be_turned_off(monkeypatch):
    """The option only: the instructions do nothing without it."""
    monkeypatch.setattr(dependent, "ENABLED", False)
    ((kernel,),) = compiled(90, launch_small).values()
    assert not kernel.metadata.launch_pdl and "griddepcontrol.wait" in kernel.asm["ptx"]


def test_not_on_other_vendors_gpus(monkeypatch):
    import triton

    driver = aot.TargetOnly(90)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    assert dependent.launch_options() == {"launch_pdl": True}
    driver.target = GPUTarget("hip", "gfx942", 64)
    assert dependent.launch_options() == {}
