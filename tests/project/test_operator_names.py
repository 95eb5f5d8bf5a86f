"""An operator's name stands for what it returns: see `operator_names`."""

import ast
import json

import pytest
import torch
from house_numbers import DEFINITIONS, LIBRARY, trees
from operator_names import RECORD, follows, outputs_by_name, returning

from moe_ops.ops import STAGES
from moe_ops.retired import SCHEMAS

X = torch.ones(1, 1)
PLAIN = {
    "Tensor": X, "Optional[Tensor]": X, "List[Optional[Tensor]]": [X], "str": "", "bool": False,
    "int": 1, "Optional[int]": 1, "float": 1.0,
}  # fmt: skip
"""A value of each type of argument."""


def test_no_name_comes_back():
    """Neither as an operator nor as a function of the library; retired ones say so when called."""
    gone = {name for name, outputs in json.loads(RECORD.read_text()).items() if outputs is None}
    retired = {s.split("(")[0] for schemas in SCHEMAS.values() for s in schemas}
    legs = {name.replace(".", "_") for name in STAGES}
    defined = [
        f"{file}: {node.name}"
        for file, tree in trees((*LIBRARY, "benchmarks")).items()
        for node in ast.walk(tree)
        if isinstance(node, DEFINITIONS) and node.name in gone
    ]
    assert not defined and not gone & {*STAGES, *legs} and retired <= gone and len(gone) > 17
    for name in retired:
        operator = getattr(torch.ops.moe_ops, name).default
        given = {a.name: PLAIN[str(a.type)] for a in operator._schema.arguments}
        with pytest.raises(NotImplementedError, match=f"moe_ops::{name} was an operator of moe_o"):
            operator(**given)


@pytest.fixture(scope="module")
def found():
    return outputs_by_name()


@pytest.mark.parametrize("qualified", returning())
def test_a_name_stands_for_its_outputs(qualified, found):
    recorded = json.loads(RECORD.read_text())
    assert qualified in recorded, "record the new operator: python tests/support/operator_names.py"
    assert follows(found[qualified], recorded[qualified]), (
        f"moe_ops::{qualified} returns something else than its name stands for: give it a name "
        f"that is not in {RECORD.name}"
    )
