"""Problems, oracles and comparisons for testing kernels of these operators.

The oracle is the computation in float64 on unrounded intermediates. A float result is correct if
the error of each output row is within a budget set by the error of a same-dtype reference, and that
reference is within a bound derived from the problem. Index results and layouts are compared
bitwise. `run_ranks` runs many ranks in one process.
"""

from moe_ops.testing.bounds import Bounded
from moe_ops.testing.compare import assert_layer_matches, assert_matches_reference
from moe_ops.testing.oracle import Quantized, bounded_oracle, oracle, quantize_inputs
from moe_ops.testing.problems import (
    ROUTINGS,
    Inputs,
    Problem,
    call,
    make_inputs,
    make_routing,
)
from moe_ops.testing.ranks import SimulatedGroup, run_ranks
from moe_ops.testing.references import Roundings, reference_experts

__all__ = [
    "ROUTINGS",
    "Bounded",
    "Inputs",
    "Problem",
    "Quantized",
    "Roundings",
    "SimulatedGroup",
    "assert_layer_matches",
    "assert_matches_reference",
    "bounded_oracle",
    "call",
    "make_inputs",
    "make_routing",
    "oracle",
    "quantize_inputs",
    "reference_experts",
    "run_ranks",
]
