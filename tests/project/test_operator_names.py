"""An operator's name stands for what it returns: see `operator_names`."""

import json

import pytest
from operator_names import RECORD, follows, outputs_by_name, returning


@pytest.fixture(scope="module")
def found():
    return outputs_by_name()


@pytest.mark.parametrize("qualified", returning())
def test_a_name_stands_for_its_outputs(qualified, found):
    recorded = json.loads(RECORD.read_text())
    assert qualified in recorded, "record the new operator: python tests/operator_names.py"
    assert follows(found[qualified], recorded[qualified]), (
        f"moe_ops::{qualified} returns something else than its name stands for: give it a name "
        f"that is not in {RECORD.name}"
    )
