"""What Triton has compiled is found on disk again, whichever kernel a process uses first."""

import json

import pytest
from conftest import INTERPRETED
from processes import python

pytest.importorskip("triton")
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
