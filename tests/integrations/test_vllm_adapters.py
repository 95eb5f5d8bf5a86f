"""vLLM serves adapters of experts on the CPU with this library: `make test-vllm`.

vLLM's own experts have no adapters on a CPU: its wrapper for the CPU lacks their products. So the
oracle is LoRA's definition: vLLM's own experts serve, without LoRA, the models into which adapters
are merged. Each prompt of one batch has an adapter or none.
"""

import pytest
from vllm_models import demo_adapter
from vllm_serve import compare, served

from moe_ops.demo import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
WHOSE = (1, 0, 2, 1)
"""Each prompt's adapter; 0: none."""
FLOAT32 = {"dtype": "float32"}
MODES = {"eager": {**FLOAT32, "enforce_eager": True}, "one graph": FLOAT32}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What this library wrote in each mode, and vLLM's own experts: none, merged, merged."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [demo_adapter(folder / f"adapter{seed}", seed) for seed in (1, 2)]
    adapters, merged = ([str(path) for path in paths] for paths in zip(*made, strict=True))
    asked = [None if number == 0 else adapters[number - 1] for number in WHOSE]
    models = [{"model": str(MODEL), "adapters": asked, **mode} for mode in MODES.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        ours = dict(zip(MODES, served(True, *models), strict=True))
        whole = [{"model": path, **MODES["eager"]} for path in (str(MODEL), *merged)]
        return ours, served(False, *whole)


@pytest.mark.parametrize("mode", MODES)
def test_adapters_served(written, mode):
    """Every token is that of the model with the prompt's adapter merged into it."""
    ours, theirs = written[0][mode], written[1]
    for one in (ours, *theirs):
        assert one.tokens, one.log[-4000:]
    assert "moe_ops: runs the experts: unquantized, silu" in ours.log
    assert "moe_ops: runs the experts' adapters" in ours.log and ours.launches > 0
    own = [theirs[number] for number in WHOSE]
    expected = own[0]._replace(
        tokens=[one.tokens[i] for i, one in enumerate(own)],
        best=[one.best[i] for i, one in enumerate(own)],
    )
    compare(mode, expected, ours, ties=False)
    plain = theirs[0].tokens
    assert all((ours.tokens[i] != plain[i]) == (number > 0) for i, number in enumerate(WHOSE))
