"""Where tests run, and what fresh memory holds.

The same tests run three ways: on the CPU an operator is its reference; with TRITON_INTERPRET=1 it
is its Triton kernel in the interpreter (tests marked ``kernel``); on a GPU it is the real kernel.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch._dynamo
import torch._dynamo.guards
from hypothesis import HealthCheck, Phase, settings

# Tests see the package's tuned files alone, and not those that a user has tuned.
os.environ["MOE_OPS_TUNED_DIR"] = str(Path(__file__).parent.parent / "moe_ops" / "configs")
# `make gpu-test GPUS=4`: workers take turns over the first four GPUs, and each sees its own alone.
# Processes that a worker starts do not choose again: ranks on the CPU see none.
if WORKER := os.environ.get("PYTEST_XDIST_WORKER"):
    GPUS = int(os.environ.pop("MOE_OPS_GPUS", "1"))
    if GPUS > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(WORKER.removeprefix("gw")) % GPUS)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_CUDA = torch.cuda.is_available() and not INTERPRETED
COMPILED_FOR = 90
"""The architecture for which each value of each parameter is compiled once; for one of the others,
one item of each test."""
MOST_COMPILED = 329
"""Limit on the compile items that `make test` runs: each takes seconds, and all of them must leave
room for the other tests in the 12 minutes of `.ci/run`."""

# Dynamo compiles the same graphs in six sevenths of the time without its cache of fake tensors, in
# which graphs that are compiled once find little, and without collecting garbage each time.
torch._dynamo.config.fake_tensor_cache_enabled = False
torch._dynamo.config.run_gc_after_compile = False
# It also measures the guards of each graph, and empties the processor's caches before.
torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
# And it looks for what the guards of a graph have in common, longer than it saves in a few calls.
torch._dynamo.guards.PyExprCSEPass.count = lambda self, expressions: None
torch._dynamo.guards.PyExprCSEPass.replace = lambda self, expression: ([], expression)

# Without a GPU torch writes down the whole stack, three times, for who will have seeded one.
torch.manual_seed = torch.manual_seed if HAS_CUDA else torch.default_generator.manual_seed

# Fresh memory is NaN (or the largest integer): rows that a kernel forgets are seen.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
warnings.filterwarnings("ignore", message=".*deterministic.*")

common = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "print_blob": True,
}
# The interpreter takes about a second for what a GPU does in a millisecond.
settings.register_profile("ci", max_examples=6 if INTERPRETED else 25, derandomize=True, **common)
# For `mutants.py`: what fails need not be made small.
unshrunk = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", settings.get_profile("ci"), phases=unshrunk)
settings.register_profile("dev", max_examples=100, **common)
settings.register_profile("nightly", max_examples=1000, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Asserts in what tests share say as much as their own.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("support/*.py")))

if INTERPRETED:
    import checked_memory
    import interpreter

    _library = interpreter.install()
    _memory = checked_memory.install()


pytest_plugins = ["record"]


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(scope="session")
def one_of_two(request):
    """``one_of_two(n)``: which of two similar kernels case n of a test compiles, 0 or 1.

    Both GEMMs of a layer share their loop over K, so a test of many schemes or tiles compiles one
    of them for each. If everything is compiled it is None, as `aot.compile_launch` takes it.
    """
    return lambda n: None if request.config.getoption("exhaustive") else n % 2


def pytest_addoption(parser):
    text = f"compile everything, not only for sm_{COMPILED_FOR} each value of each parameter"
    parser.addoption("--exhaustive", action="store_true", help=text)


def params_of(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def other_arch(test, archs):
    """The architecture besides ``COMPILED_FOR`` that a test keeps: tests share them out."""
    others = sorted(archs - {COMPILED_FOR})
    return others[crc32("::".join(test).encode()) % len(others)] if others else None


def shown_by_others(items):
    """Compile items that `make test` leaves out.

    For ``COMPILED_FOR`` items stay until every value of each parameter of their test occurs in one
    of them; for one other architecture the first item of each test stays.
    """
    of_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("aot"):
            of_test[item.path.name, item.originalname].append(item)
    return [item for test, compiled in of_test.items() for item in left_out_of(test, compiled)]


def left_out_of(test, items):
    """Items of one test that show nothing new: of the others, those with the most stay first."""
    archs = [params_of(item).get("arch", COMPILED_FOR) for item in items]
    other = other_arch(test, {*archs})
    shown = [
        {(name, str(value)) for name, value in {**params_of(item), "": ""}.items()}
        if arch == COMPILED_FOR else {("arch", "another")} if arch == other else set()
        for item, arch in zip(items, archs, strict=True)
    ]  # fmt: skip
    missing, stay = set().union(*shown), set()
    while missing:
        best = max(range(len(items)), key=lambda i: len(shown[i] & missing))
        stay.add(best)
        missing -= shown[best]
    return [item for i, item in enumerate(items) if i not in stay]


def check_compiled(items):
    """UsageError if more items compile kernels than `make test` has time for."""
    count = sum(bool(item.get_closest_marker("aot")) for item in items)
    if count > MOST_COMPILED:
        raise pytest.UsageError(
            f"at most {MOST_COMPILED} items may compile kernels without --exhaustive, got {count}: "
            "mark what others show too with pytest.mark.exhaustive (`pairwise.half_exhaustive`)"
        )


def runs_here(item):
    """Whether an item has what it needs: a GPU, a kernel to interpret, what ``skipif`` asks for."""
    marked = {mark.name for mark in item.iter_markers()}
    needs_more = "gpu" in marked and not HAS_CUDA or INTERPRETED and "kernel" not in marked
    return not needs_more and not any(mark.args[0] is True for mark in item.iter_markers("skipif"))


def pytest_ignore_collect(collection_path):
    """In the interpreter, import only the files that name the marker of its tests."""
    if INTERPRETED and collection_path.match("test_*.py"):
        return "mark.kernel" not in collection_path.read_text() or None
    return None


def leave_out(config, items, others):
    """Deselect ``others``: an item that is skipped takes pytest and its workers milliseconds."""
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def pytest_collection_modifyitems(config, items):
    leave_out(config, items, {item for item in items if not runs_here(item)})
    if not config.getoption("exhaustive"):
        others = {item for item in items if item.get_closest_marker("exhaustive")}
        others.update(shown_by_others([item for item in items if item not in others]))
        leave_out(config, items, others)
        check_compiled(items)


def collect_rarely():
    """Keep the garbage collector from what has been imported, and from running often.

    A compilation makes so many objects that a tenth of its time went into looking through them.
    """
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without collecting garbage: modules and items stay until the end.

    The search for garbage took a third of the time, and again some of every test's.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        # pytest adds its handlers to every logger that does not propagate, six times for each item:
        # torch has more than 50. And a trace of each compilation is made for whoever handles it.
        for logger in logging.root.manager.loggerDict.values():
            logger.propagate = True
        collect_rarely()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Graphs are compiled here, not taken from what another version of the library left behind."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers are given this process's
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="moe_ops_tests_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_runtest_setup(item):
    """Random tensors of a test are the same alone, in any order, and on every machine."""
    torch.manual_seed(crc32(item.nodeid.encode()))


def pytest_report_header(config):
    leg = "interpreter" if INTERPRETED else "cuda" if HAS_CUDA else "cpu reference"
    examples = settings().max_examples
    return f"moe_ops: operators run on {leg}; hypothesis: at most {examples} examples a test"
