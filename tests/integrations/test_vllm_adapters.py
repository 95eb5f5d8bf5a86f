"""vLLM serves adapters of experts on the CPU with this library: `make test-vllm`.

vLLM's own experts have no adapters on a CPU: its wrapper for the CPU lacks their products. So the
oracle is LoRA's definition: vLLM's own experts serve, without LoRA, the models into which adapters
are merged. Each prompt of one batch has an adapter or none.
"""

from concurrent.futures import ThreadPoolExecutor

import continuations
import pytest
from vllm_adapters import of_experts, of_gpt_oss
from vllm_models import gpt_oss
from vllm_serve import served

from moe_ops.demo import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EAGER = {"dtype": "float32", "enforce_eager": True}
CASES = {
    "eager": ("demo", (1, 0, 2, 1), EAGER),
    "one graph": ("demo", (1, 0, 2, 1), {"dtype": "float32"}),
    "shared by experts": ("shared", (0, 1, 1, 0), {**EAGER, "enable_moe_shared_loras": True}),
    "gpt-oss": ("gpt-oss", (1, 1, 0, 1), EAGER),
}
"""A model, the adapter of each prompt (0: none), and arguments of ``LLM``."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What this library wrote in each case, and vLLM's own experts for each adapter of a model."""
    folder = tmp_path_factory.mktemp("adapters")
    _, plain = gpt_oss(folder / "gpt_oss")
    adapters = {
        "demo": [of_experts(folder / f"demo{seed}", seed) for seed in (1, 2)],
        "shared": [of_experts(folder / "shared", 3, shared=True)],
        "gpt-oss": [of_gpt_oss(folder / "of_gpt_oss", plain, 5)],
    }
    bases = {"demo": str(MODEL), "shared": str(MODEL), "gpt-oss": str(plain)}
    ours = []
    for model, whose, options in CASES.values():
        asked = [adapters[model][i - 1].adapter if i else None for i in whose]
        ours.append({"model": bases[model], "adapters": asked, **options})
    whole = {(model, 0): path for model, path in bases.items()}
    whole |= {(m, i): x.merged for m, some in adapters.items() for i, x in enumerate(some, 1)}
    theirs = [{"model": path, **EAGER} for path in dict.fromkeys(whole.values())]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        runs = [pool.submit(served, True, *ours), pool.submit(served, False, *theirs)]
        mine, own = (run.result() for run in runs)
    by_path = dict(zip(dict.fromkeys(whole.values()), own, strict=True))
    return dict(zip(CASES, mine, strict=True)), {key: by_path[x] for key, x in whole.items()}


@pytest.mark.parametrize("case", CASES)
def test_adapters_served(written, case):
    """Every token is that of the model with the prompt's adapter merged into it."""
    model, whose, _ = CASES[case]
    ours, own = written[0][case], [written[1][model, number] for number in whose]
    plain = written[1][model, 0]
    for one in (ours, *own):
        assert one.tokens, one.log[-4000:]
    assert "moe_ops: runs the experts: unquantized" in ours.log
    assert "moe_ops: runs the experts' adapters" in ours.log and ours.launches > 0
    expected = plain._replace(
        tokens=[one.tokens[i] for i, one in enumerate(own)],
        best=[one.best[i] for i, one in enumerate(own)],
    )
    assert not continuations.compare(expected, ours).partings
    differs = [a != b for a, b in zip(ours.tokens, plain.tokens, strict=True)]
    assert differs == [number > 0 for number in whose]
