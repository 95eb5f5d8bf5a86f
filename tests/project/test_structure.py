"""The layout of the package: parts of operators, directions of imports, sizes, documentation."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from processes import python

from moe_ops.ops import STAGES

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ops", "fake_impls", "tests", "benchmarks", "examples", "docs")
STAGE_FILES = sorted(set(STAGES.values()))
MAX_KERNEL_PARAMETERS, MAX_SCHEMA, MAX_PARAMETERS = 20, 12, 10
GEMM = (
    "operands with their scales and bias, the plan with its sizes, strides, and constants: Triton "
    "binds each by its name, and a tuple of tensors would be taken apart at every launch"
)
ROWS = "rows with their scales and routing, sizes, strides, and constants of the formats"
WIDE_KERNELS = {
    "_expert_gemm_kernel": GEMM,
    "_expert_dgrad_kernel": GEMM,
    "scaled_gemm_kernel": GEMM,
    "scaled_gemm_slot_kernel": GEMM,
    "weight_only_gemm_kernel": GEMM,
    "block_scaled_gemm_kernel": GEMM,
    "amax_kernel": ROWS,
    "quantize_kernel": ROWS,
    "scaled_kernel": ROWS,
    "_copy_kernel": ROWS,
    "_send_batched_kernel": ROWS,
}
"""Kernels with more than `MAX_KERNEL_PARAMETERS` parameters, each with the reason."""
OF_THE_FIELD = {
    "fused_experts", "fused_moe", "gated_experts", "select_experts", "workspace_nbytes",
    "apply", "apply_monolithic",
}  # fmt: skip
"""Public functions and methods that have the parameters that users of vLLM know."""
WIDE = {
    "moe_ops/pipeline/exchange/symmetric.py::__init__": "ten arguments are pinned; a value of some "
    "would be a second way to pass them"
}
"""Other functions with more parameters than `MAX_PARAMETERS`, with the reason."""
LONG_FILE, LONG_FUNCTION = 450, 60
LONG = {}
"""Files (``tests/test_x.py``) and functions (``tests/test_x.py::name``) that are better left longer
than `LONG_FILE` lines or `LONG_FUNCTION` lines of code, each with the reason."""


@functools.cache
def tree(path):
    """A file's syntax tree: each file is parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def sources():
    """Every Python file, without `moe_ops/fake_impls`, which only says where `fake_impls` is."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in paths if not name_of(path).startswith("moe_ops/fake_impls"))


def library():
    return [path for path in sources() if name_of(path).startswith(("moe_ops/", "fake_impls/"))]


def name_of(path):
    return str(path.relative_to(ROOT))


def functions(path):
    """Every function of a file, with its name in `LONG`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{name_of(path)}::{node.name}", node


def test_every_operator_has_all_its_parts():
    lacking = []
    for qualified, stage in STAGES.items():
        plain, name = qualified.split(".")[0], qualified.replace(".", "_")
        for folder in ("moe_ops/kernels", "moe_ops/reference", "fake_impls"):
            body = tree(ROOT / folder / f"{stage}.py").body
            if name not in {node.name for node in body if isinstance(node, ast.FunctionDef)}:
                lacking.append(f"{folder}/{stage}.py: {name}")
        if not re.search(rf"\b{plain}\b", (ROOT / "tests/support/operator_samples.py").read_text()):
            lacking.append(f"tests/support/operator_samples.py: {plain}")
        for path in (f"tests/ops/test_{stage}.py", f"benchmarks/bench_{stage}.py"):
            if not (ROOT / path).exists():
                lacking.append(path)
    assert not lacking


def test_no_file_is_a_link():
    """Checkouts and archives without symbolic links are whole."""
    folders = [ROOT, *(path for package in PACKAGES for path in (ROOT / package).rglob("*"))]
    assert not [name_of(path) for path in folders if path.is_symlink()]


def test_stages_are_files_everywhere():
    shared = {"__init__", "cached", "grouped", "onednn", "products", "residency", "slots"}
    for folder in ("moe_ops/kernels", "moe_ops/reference", "fake_impls"):
        assert {p.stem for p in (ROOT / folder).glob("*.py")} - shared == set(STAGE_FILES)


def test_contributing_names_what_there_is():
    """Every path, for each stage where it says so, and every make target."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    quoted = re.findall(r"`([^`]+)`", text)
    paths = [q for q in quoted if re.fullmatch(r"[\w./<>-]+(\.py|/)", q) and "/" in q]
    assert len(paths) > 15
    for path in paths:
        for stage in STAGE_FILES if "<stage>" in path else [""]:
            assert (ROOT / path.replace("<stage>", stage)).exists(), path
    bare = [q for q in quoted if q.endswith(".py") and "/" not in q]
    assert not bare, f"without their folder: {bare}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for q in quoted if q.startswith("make ") for t in q.split()[1:] if "=" not in t}
    assert named and named <= targets


LAYERS = {
    "moe_ops": 7, "moe_ops.testing": 7, "moe_ops.bench": 7, "moe_ops.demo": 7,
    "moe_ops.layer": 6, "moe_ops.quantization": 6, "moe_ops.integrations": 6,
    "moe_ops.offload": 6, "moe_ops.training": 6, "moe_ops.tuning": 6,
    "moe_ops.inspect": 5, "moe_ops.pipeline": 4, "moe_ops.functional": 3,
    "moe_ops.routing": 3, "moe_ops.parallel": 3, "moe_ops.ops": 2,
    "moe_ops.gradients": 1, "moe_ops.flops": 1, "moe_ops.kernels": 1, "moe_ops.reference": 1,
    "moe_ops.fake_impls": 1, "moe_ops.support": 1, "moe_ops.loading": 1,
    "moe_ops.checks": 0, "moe_ops.tensors": 0, "moe_ops.scheme": 0, "moe_ops.dispatch": 0,
    "moe_ops.activation": 0, "moe_ops.version": 0, "moe_ops.sizes": 0, "moe_ops.residency": 0,
    "moe_ops.windows": 0, "moe_ops.retired": 0, "moe_ops.brief": 0, "moe_ops.on_demand": 0,
    "moe_ops.doctor": 8, "moe_ops.cli": 9, "moe_ops.__main__": 10,
}  # fmt: skip
"""A package imports from its own layer or a lower one."""
APART = [
    ("moe_ops.kernels", "moe_ops.reference"),
    ("moe_ops.reference", "moe_ops.kernels"),
    ("moe_ops.fake_impls", "moe_ops.kernels"),
    ("moe_ops.fake_impls", "moe_ops.reference"),
]
"""Packages of which the first must not import the second, although the layers allow it."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("moe_ops", *parts) if parts[0] == "fake_impls" else parts
    return ".".join(p for p in parts if p != "__init__")


def package_of(module):
    return ".".join(module.split(".")[:2])


@functools.cache
def imports():
    """For each module of the library the modules that it imports, for type checkers too.

    ``from package import name`` imports the module ``package.name`` if there is one. An import from
    another package also runs that package's ``__init__``.
    """
    modules = {module_of(path): path for path in library()}
    graph = {}
    for module, path in modules.items():
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in modules else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        for name in list(found):
            parents = name.split(".")[2:]  # `moe_ops` itself imports everything
            for _ in parents:
                name = name.rpartition(".")[0]
                if not f"{module}.".startswith(f"{name}."):
                    found.add(name)
        graph[module] = (found & set(modules)) - {module}
    return graph


def imports_of_packages():
    graph = {}
    for module, imported in imports().items():
        package = package_of(module)
        graph.setdefault(package, set()).update({*map(package_of, imported)} - {package})
    return graph


def circles(graph):
    """Circles of imports, enough of them that without one import of each there is none left."""
    graph = {module: set(imported) for module, imported in graph.items()}
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            imported, importer, *_ = circle = error.args[1]
            found.append(" imports ".join(reversed(circle)))
            graph[importer].remove(imported)
        else:
            return found


def test_imports_point_downwards():
    upward = [
        f"{importer} imports {imported}"
        for importer, names in imports_of_packages().items()
        for imported in names
        if LAYERS[imported] > LAYERS[importer] or (importer, imported) in APART
    ]
    assert not upward


def test_no_modules_import_each_other():
    """Not in a circle either; an import for type checkers only counts like any other."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a imports b imports c imports a"]
    assert not circles(imports())


def test_no_packages_import_each_other():
    graph = imports_of_packages()
    assert not circles(graph)


def test_only_the_registry_imports_inside_functions():
    inside = [
        name
        for path in library()
        if path.name != "ops.py"
        for name, node in functions(path)
        if any(isinstance(inner, (ast.Import, ast.ImportFrom)) for inner in ast.walk(node))
    ]
    assert not inside


def test_only_tests_assert():
    asserting = [
        name_of(path)
        for path in sources()
        if "tests" not in path.parts
        and any(isinstance(n, ast.Assert) for n in ast.walk(tree(path)))
    ]
    assert not asserting


def test_tests_import_no_tests():
    """What test files share is in `tests/support/`; names of test files are unique."""
    files = [path for path in sources() if ROOT / "tests" in path.parents]
    imported = {
        f"{name_of(path)}: {name}"
        for path in files
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        if name and name.startswith("test_")
    }
    assert not imported
    assert len({path.name for path in files}) == len(files)


def test_modules_that_tests_share_are_listed():
    folder = ROOT / "tests/support"
    listed = re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in folder.glob("*.py"))
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == {"conftest.py"}


def test_long_files_and_functions_have_a_reason():
    """Split what is too long, or name it in `LONG` with the reason why it is better whole."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sources()}
    too_long = {name: length for name, length in lengths.items() if length > LONG_FILE}
    for path in sources():
        for name, node in functions(path):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            documented = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            length = node.end_lineno - node.lineno + 1 - documented
            if length > LONG_FUNCTION:
                too_long[name] = length
    assert {name: length for name, length in too_long.items() if name not in LONG} == {}
    assert set(LONG) <= set(too_long), "an exception that is not needed"


def is_jitted(node):
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def parameters(node):
    given = node.args
    return len([a for a in (*given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")])


def test_kernels_have_few_parameters():
    wide = {
        node.name
        for path in library()
        for _, node in functions(path)
        if is_jitted(node) and parameters(node) > MAX_KERNEL_PARAMETERS
    }
    assert wide == set(WIDE_KERNELS)


def test_operators_and_functions_have_few_parameters():
    """Operators' three legs have the parameters of their schemas, and launchers ``config``."""
    import torch

    many = []
    for qualified in STAGES:
        name, _, which = qualified.partition(".")
        schema = getattr(getattr(torch.ops.moe_ops, name), which or "default")._schema
        many += [qualified] if len(schema.arguments) > MAX_SCHEMA else []
    legs = {qualified.replace(".", "_") for qualified in STAGES}
    many += [
        name
        for path in library()
        for name, node in functions(path)
        if not is_jitted(node) and node.name not in OF_THE_FIELD | legs
        if parameters(node) > MAX_PARAMETERS
    ]
    assert many == [*WIDE]


def test_public_functions_are_documented():
    import moe_ops

    for name in moe_ops.__all__:
        value = getattr(moe_ops, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name} has no docstring"


def test_import_is_light(tmp_path):
    """A sixteenth of what torch takes at most once bytecode is cached, no Triton, no warning.

    That is 50 ms where torch takes 0.8 s. Time of the process, not of the clock, and relative to
    torch's: other tests run beside, and processors differ. A process that has torch fills the cache
    of what is imported after it; others may be disturbed, so one of five must be so fast. Torch's
    objects are frozen: whether a collection of all of them (75 ms) falls into our part is chance.
    """
    code = (
        "import gc, sys, time; start = time.process_time(); import torch;"
        "torchs = time.process_time() - start; before = set(sys.modules); gc.freeze();"
        f"sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False;"
        "t = time.process_time(); import moe_ops; print((time.process_time() - t) / torchs);"
        "assert 'triton' not in sys.modules or 'triton' in before"
    )
    assert python(code).returncode == 0
    command, parts = [sys.executable, "-W", "error", "-c", code], []
    while not parts or parts[-1] >= 1 / 16:
        assert len(parts) < 5, parts
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 0 and not run.stderr, run.stderr
        parts.append(float(run.stdout))


def test_backward_passes_are_differentiable_once():
    """Each is decorated with `moe_ops.gradients.once`, so that a second derivative raises."""
    for path in library():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef) or node.name == "_One":
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "backward":
                    decorators = [ast.unparse(d).split("(")[0] for d in method.decorator_list]
                    assert decorators == ["staticmethod", "once"], (name_of(path), node.name)


ENGINES = {"vllm": "moe_ops/integrations/vllm/", "sglang": "moe_ops/integrations/sglang/"}
"""Serving engines, and the only folders whose modules may import them."""


def test_engines_are_imported_by_their_plug_ins_alone():
    """Not by the module with the entry point either, which an engine imports in every process.

    `moe_ops.integrations`, and with it transformers, is not imported with the package.
    """
    for path in library():
        for node in ast.walk(tree(path)):
            imported = [getattr(node, "module", None) or ""] * isinstance(node, ast.ImportFrom)
            imported += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for engine in {name.split(".")[0] for name in imported} & set(ENGINES):
                assert name_of(path).startswith(ENGINES[engine]), name_of(path)
                assert path.name != "__init__.py", name_of(path)
    code = (
        "import sys, moe_ops; names = set(sys.modules);"
        "assert not {name for name in names if name.startswith('moe_ops.integrations')};"
        "import moe_ops.integrations.vllm, moe_ops.integrations.sglang;"
        "new = {name.split('.')[0] for name in set(sys.modules) - names};"
        "assert not new & {'vllm', 'sglang', 'transformers', 'triton'}, new"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr


def test_records_that_dynamo_traces_have_plain_defaults():
    """No objects of the library, besides enums: Dynamo of torch 2.11 cannot wrap a default."""
    for name in ("moe_ops.layer", "moe_ops.integrations.transformers"):
        importlib.import_module(name)
    ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "moe_ops"]
    records = {v for m in ours for v in vars(m).values() if hasattr(v, "_field_defaults")}
    assert len(records) > 50
    for record in records:
        for field, default in record._field_defaults.items():
            kind = type(default)
            fine = issubclass(kind, Enum) or not kind.__module__.startswith("moe_ops")
            assert fine, f"{record.__name__}.{field} is {default!r} by default"


def test_names_on_demand():
    """Those that type checkers see; their modules are not imported with the package."""
    import moe_ops

    for package in (moe_ops, moe_ops.pipeline):
        path = Path(package.__file__)
        (block,) = (
            node for node in tree(path).body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )  # fmt: skip
        seen = {name.name: node.module for node in block.body for name in node.names}
        late = package._LATER.items()
        assert seen == {name: f"{package.__name__}.{module}" for name, module in late}
        assert set(package.__all__) <= set(dir(package)) and set(package._LATER) <= {
            *package.__all__
        }
    code = (
        "import sys, moe_ops; late = {f'moe_ops.{name}' for name in moe_ops._LATER.values()};"
        "assert not late & set(sys.modules) and moe_ops.layer is sys.modules['moe_ops.layer'];"
        "from moe_ops import *; assert explain is moe_ops.explain and late <= set(sys.modules);"
        "moe_ops.missing"
    )
    run = python(code)
    assert run.stderr.endswith("AttributeError: module 'moe_ops' has no attribute 'missing'\n")


def test_runs_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, moe_ops;"
        "w1, w2 = torch.ones(4, 6, 8), torch.ones(4, 8, 3);"
        "print(moe_ops.fused_moe(torch.ones(2, 8), w1, w2, torch.rand(2, 4), 2).shape)"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr
