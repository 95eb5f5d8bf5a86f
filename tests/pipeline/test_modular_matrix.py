"""Every prepare with every experts in every scheme, activation and setting, against the oracle.

Which values go together is asked of the classes (`modular.RULES`). The references run all pairs of
values; kernels, which take longer, run every value; the ``nightly`` profile runs the full product.
"""

import os

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from modular import (
    EXPERTS,
    PREPARES,
    RULES,
    roundings,
    router_logits,
    setup,
    twice,
)
from pairwise import cover, every
from strategies import ACTIVATIONS, DTYPES

import moe_ops
from moe_ops.testing import (
    ROUTINGS,
    Problem,
    assert_layer_matches,
    bounded_oracle,
    reference_experts,
)

pytestmark = pytest.mark.kernel

BOTH = (False, True)
FACTORS = {
    "experts": EXPERTS,
    "prepare": PREPARES,
    "scheme": tuple(moe_ops.SCHEMES),
    "activation": ACTIVATIONS,
    "bias": BOTH,
    "expert_map": BOTH,
    "on_input": BOTH,
    "shared": BOTH,
    "chunked": BOTH,
    "inplace": BOTH,
    "asynchronous": BOTH,
}
DATA = {"dtype": DTYPES, "routing": ROUTINGS}
CHUNK = 4


def combinations():
    """Rows of factors; in the full product the kinds of data take turns."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "nightly":
        return cover({**FACTORS, **DATA}, RULES, 1 if INTERPRETED or HAS_CUDA else 2)
    return [
        {**row, "dtype": DTYPES[i % 3], "routing": ROUTINGS[i % 5]}
        for i, row in enumerate(every(FACTORS, RULES))
    ]


COMBINATIONS = combinations()


def name(row):
    """Short, and different for different rows."""
    flags = "-".join(n for n in FACTORS if row[n] is True)
    parts = (row["experts"].__name__, row["scheme"], row["activation"].split("(")[0])
    return "-".join((*parts, str(row["dtype"])[6:], row["routing"], flags))


def problem_of(row) -> Problem:
    """Sizes that no tile and no group divides; a second partial block of 128 along both."""
    sizes = (5, 4, 2, 32, 24) if INTERPRETED else (11, 6, 2, 160, 136)
    if row["routing"] == "holes":  # a single row that is left has one rounding that counts
        sizes = (2 * sizes[0], *sizes[1:])
    local = sizes[1] // 2 if row["expert_map"] else None
    return Problem(
        *sizes, row["dtype"], row["activation"], row["bias"], row["on_input"], local,
        row["routing"], row["scheme"],
    )  # fmt: skip


def test_the_number_of_combinations(capsys):
    """Printed; and all that the issue names is among them."""
    with capsys.disabled():
        print(f"\n{len(COMBINATIONS)} combinations of {', '.join(FACTORS)}")
    for factor, values in FACTORS.items():
        seen = {row[factor] for row in COMBINATIONS}
        assert seen == set(values), f"{factor}: never {set(values) - seen}"


@pytest.mark.parametrize("row", COMBINATIONS, ids=name)
def test_any_combination(row, device):
    problem, kernel = problem_of(row), {"inplace": row["inplace"]}
    if row["shared"]:
        kernel["shared_experts"] = twice
    if row["chunked"]:
        kernel["chunk_size"] = CHUNK
    s = setup(problem, row["experts"], device, row["prepare"], row["asynchronous"], **kernel)
    inputs, exact = s.inputs, s.exact
    if row["experts"].is_monolithic():
        logits = router_logits(problem, device)
        weights, ids = moe_ops.fused_topk(inputs.hidden_states, logits, problem.top_k, True)
        routing = {"topk_weights": weights, "topk_ids": ids}
        inputs, exact = inputs._replace(**routing), exact._replace(**routing)
        actual = s.kernel.apply_monolithic(
            inputs.hidden_states, inputs.w1, inputs.w2, logits, problem.activation,
            problem.num_experts, inputs.expert_map, problem.on_input,
        )  # fmt: skip
    else:
        tokens = inputs.hidden_states.clone()
        actual = s.apply(hidden_states=tokens)
        if row["shared"]:
            shared, actual = actual
            assert torch.equal(shared, 2 * tokens)
        assert (actual is tokens) == row["inplace"]
        assert row["inplace"] or torch.equal(tokens, inputs.hidden_states)
    where = roundings(row["experts"], problem, CHUNK if row["chunked"] else None)
    expected = reference_experts(problem, inputs, s.config, where)
    within = bounded_oracle(problem, exact, s.config, where)
    assert_layer_matches(actual.cpu(), within, expected.cpu())


def test_the_constructor_agrees_with_the_rules():
    """What the rules leave out raises, and nothing else does."""
    flags = ("shared", "chunked", "inplace", "asynchronous")
    rules = [(names, rule) for names, rule in RULES if "scheme" not in names]
    factors = {"experts": EXPERTS, "prepare": PREPARES, **dict.fromkeys(flags, BOTH)}
    problem, good = Problem(), 0
    allowed = [tuple(row.values()) for row in every(factors, rules)]
    for values in (tuple(row.values()) for row in every(factors, ())):
        experts, prepare, shared, chunked, inplace, asynchronous = values
        if asynchronous and not issubclass(
            prepare, moe_ops.pipeline.FusedMoEPrepareAndFinalizeModular
        ):
            continue  # what is wrapped is told its routing
        kernel = {
            "shared_experts": twice if shared else None,
            "chunk_size": CHUNK if chunked else None,
            "inplace": inplace,
        }
        if values in allowed:
            setup(problem, experts, "cpu", prepare, asynchronous, **kernel)
            good += 1
        else:
            with pytest.raises(ValueError, match="must"):
                setup(problem, experts, "cpu", prepare, asynchronous, **kernel)
    assert good == len(allowed)
