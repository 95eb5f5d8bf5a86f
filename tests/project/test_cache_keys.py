"""What Triton has compiled is found on disk again, whichever kernel a process uses first."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import INTERPRETED

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "support/cache_keys.py"
ORDERS = ("forward", "backward")


def keys_of(order):
    command = [sys.executable, str(SCRIPT), order]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(INTERPRETED, reason="keys are of compiled kernels")
def test_cache_keys_do_not_depend_on_the_order_of_use():
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(keys_of, ORDERS)
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
