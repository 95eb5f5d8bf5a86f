"""The outputs of every operator's name: see `moe_ops.ops`.

Inductor's cache finds a graph by the names and arguments of its operators. Were an operator to
return another shape under its old name, a graph of an earlier version would be taken from the cache
and fail where it checks what it got. So the outputs of every name are on record; null stands at
names that may not come back.

``python tests/support/operator_names.py`` adds new operators, and samples that came after the
others.
"""

import json
from pathlib import Path

import torch
from operator_samples import overload, samples
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ops.ops import STAGES

RECORD = Path(__file__).with_name("operator_names.json")


def layout(tensor):
    """Dtype, shape and stride, as text."""
    sizes = ",".join(map(str, tensor.shape)), ",".join(map(str, tensor.stride()))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes[0]}]({sizes[1]})"


def returning():
    """The operators that allocate; others write to a tensor of their caller."""
    return [name for name in STAGES if overload(name)._schema.returns]


def outputs_by_name():
    """What each operator that allocates returns for its samples, by its fake."""
    found = {}
    calls = samples("cpu")
    for qualified in returning():
        found[qualified] = []
        for arguments in calls[qualified]:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                faked = [mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments]
                result = overload(qualified)(*faked)
            result = result if isinstance(result, tuple) else (result,)
            found[qualified].append(" ".join(layout(tensor) for tensor in result))
    return found


def follows(outputs, recorded):
    """Whether the samples on record have the outputs that they had."""
    return recorded is not None and outputs[: len(recorded)] == recorded


def main():
    """Add what is not on record."""
    recorded = json.loads(RECORD.read_text())
    for name, outputs in outputs_by_name().items():
        if follows(outputs, recorded.get(name, [])):
            recorded[name] = outputs
    RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
