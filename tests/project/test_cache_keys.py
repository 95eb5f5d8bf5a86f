"""What Triton has compiled is found on disk again, whichever kernel a process uses first."""

import dataclasses
import json
import sys
from pkgutil import resolve_name

import pytest
from conftest import INTERPRETED
from processes import python

pytest.importorskip("triton")
KERNELS = "moe_ops.kernels."
SCRIPT = """
import runpy, sys
sys.argv = [sys.argv[0], {order!r}]
sys.path.insert(0, "tests/support")
runpy.run_path("tests/support/cache_keys.py", run_name="__main__")
"""


def keys_of(order):
    done = python(SCRIPT.format(order=order))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(INTERPRETED, reason="keys are of compiled kernels")
def test_cache_keys_do_not_depend_on_the_order_of_use():
    first, second = keys_of("forward"), keys_of("backward")
    assert len(first) > 200
    assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.skipif(INTERPRETED, reason="keys are of compiled kernels")
def test_constants_of_a_name_have_one_value_in_a_kernel():
    """Triton sorts constants by name, then by an address: two values would change places."""
    from cache_keys import functions

    for name, function in functions().items():
        function.cache_key  # noqa: B018
        seen = {}
        for (constant, _), (value, _) in function.used_global_vals.items():
            assert seen.setdefault(constant, value) == value, f"{name}: {constant}"


@pytest.mark.skipif(INTERPRETED, reason="keys are of compiled kernels")
@pytest.mark.parametrize(
    ("where", "name", "changed"),
    [
        ("one_token_sizes.TokenSizes", "groups", property(lambda self: 7)),
        ("gemm.Constants", "PART_ROWS", 7),
    ],
)
def test_what_kernels_read_of_a_constant_is_in_the_key(where, name, changed, monkeypatch):
    """A property and a class attribute, as another version of this library may have them."""
    from triton.compiler import ASTSource

    from moe_ops.kernels._hopper.gathered import hopper_gemm_kernel

    constants = resolve_name(f"moe_ops.kernels._hopper.{where}")
    values = dict.fromkeys((field.name for field in dataclasses.fields(constants)), 1)

    def key():
        return ASTSource(hopper_gemm_kernel, {}, {"C": constants(**values)}).hash()

    old = key()
    assert key() == old
    monkeypatch.setattr(constants, name, changed)
    assert key() != old


@pytest.mark.skipif(INTERPRETED, reason="keys are of compiled kernels")
def test_constants_of_kernels_are_keyed():
    """Every dataclass beside the kernels."""
    from cache_keys import functions

    from moe_ops.kernels._runtime.cache_keys import KeyedConstants

    functions()  # imports all modules
    here = {name: vars(module) for name, module in sys.modules.items() if name.startswith(KERNELS)}
    kinds = {kind for name in here for kind in here[name].values() if is_constant(kind)}
    assert len(kinds) > 4 and all(issubclass(kind, KeyedConstants) for kind in kinds)


def is_constant(kind):
    """Whether something is a dataclass of a module with kernels."""
    own = isinstance(kind, type) and kind.__module__.startswith(KERNELS)
    return own and dataclasses.is_dataclass(kind)
