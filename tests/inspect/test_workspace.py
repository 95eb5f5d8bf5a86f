"""What a call allocates: `workspace_nbytes` against sums by hand, and against calls that run."""

import ctypes
import weakref

import pytest
import torch
from live_memory import allocator_peaks
from modular import SEPARATE, setup
from torch._C._dynamo.eval_frame import set_eval_frame

import moe_ops
from moe_ops import ops
from moe_ops.dispatch.tiles import num_tiles, padded_slots
from moe_ops.inspect.workspace import PeakMemory
from moe_ops.testing import Problem

BF16 = torch.bfloat16
T, H, I, E, K = 64, 256, 192, 8, 4  # noqa: E741
EXPERTS = {
    "standard": moe_ops.pipeline.TritonExperts,
    "batched": moe_ops.pipeline.BatchedTritonExperts,
}
CALLS = [("standard", None), ("standard", 16), ("batched", None)]


def nbytes(*sizes):
    """Of tensors, each rounded up to the allocator's unit."""
    return sum(-(-n // 512) * 512 for n in sizes)


def plan(rows, largest=128, smallest=16):
    entries = 4 + padded_slots(rows, E, largest) + 2 * num_tiles(rows, E, smallest)
    return nbytes(4 * entries)


def test_standard_by_hand():
    """The plan, and either both intermediates or the last of them with the output."""
    h, y, out = 2 * T * K * I, 2 * T * K * H, 2 * T * H
    expected = plan(T * K) + max(nbytes(h, y), nbytes(y, out))
    for activation in ("silu", "relu2_no_mul"):  # the product is activated as it is stored
        options = {"device": "cpu", "activation": activation}
        assert moe_ops.workspace_nbytes(T, H, I, E, K, BF16, **options) == expected


def test_quantized_by_hand():
    """Rows of tokens are freed after the first GEMM; the intermediate is in bytes."""
    h, y, out = nbytes(T * K * I, 4 * T * K * 2), nbytes(2 * T * K * H), nbytes(2 * T * H)
    expected = plan(T * K) + max(h + y, y + out)
    assert moe_ops.workspace_nbytes(T, H, I, E, K, BF16, scheme="fp8_block128") == expected
    # A scale of all rows is known after the last of them: the intermediate exists twice.
    h = nbytes(T * K * I, 4)
    expected = plan(T * K) + max(nbytes(2 * T * K * I) + h, h + y, y + out)
    assert moe_ops.workspace_nbytes(T, H, I, E, K, BF16, scheme="fp8_tensor") == expected


def test_packed_by_hand():
    """Hopper's kernels of many rows copy the rows of a wide GEMM before they multiply.

    Those between the GEMMs lie by expert already, or are quantized on the way.
    """
    tokens, width, sizes = 512, 256, (512, H, 256, E, K, BF16)
    slots = tokens * K
    h, y, out = 2 * slots * width, 2 * slots * H, 2 * tokens * H
    least = max(nbytes(h, y), nbytes(y, out))
    assert moe_ops.workspace_nbytes(*sizes, device="cpu") == plan(slots) + least
    assert moe_ops.workspace_nbytes(*sizes, device="sm_80") == plan(slots) + least
    # Plans that may have tiles of 192 rows are longer.
    assert moe_ops.workspace_nbytes(*sizes, device="sm_90") == plan(slots, 192) + least
    wide = nbytes(2 * slots * 1600, 2 * (slots + 127 * E) * H)
    found = moe_ops.workspace_nbytes(tokens, H, 1600, E, K, BF16, device="sm_90")
    assert found == plan(slots, 192) + wide
    # Batch-invariant plans have one tile, on Hopper those of other modes.
    mode = {"batch_invariant": True}
    invariant = [moe_ops.workspace_nbytes(*sizes, device=d, **mode) for d in ("cpu", "sm_90")]
    assert invariant == [plan(slots, 64, 64) + least, plan(slots, 192) + least]
    rows, groups = slots + 127 * E, 4 * 2  # bytes of a row's scales
    expected = nbytes(4) + plan(slots) + nbytes(h, y, rows * width, groups * rows)
    assert moe_ops.workspace_nbytes(*sizes, scheme="fp8_block128", device="sm_90") == expected
    # Elsewhere rows are quantized before the GEMM, which does not hold them in both forms.
    expected = plan(slots) + nbytes(slots * width, groups * slots, y)
    assert moe_ops.workspace_nbytes(*sizes, scheme="fp8_block128", device="sm_80") == expected
    # An expert's 42 rows are not worth it.
    few = [moe_ops.workspace_nbytes(84, *sizes[1:], device=d) for d in ("cpu", "sm_90")]
    assert few[0] - plan(84 * K) == few[1] - plan(84 * K, 192)


def test_a_long_prompt_by_hand():
    """16384 tokens of DeepSeek-V3: the largest sum is that of the second GEMM.

    It holds the intermediate twice, as it is and packed in 8 bits, and its result.
    """
    tokens, hidden, width, experts, k = 16384, 7168, 2048, 256, 8
    slots = tokens * k
    rows = slots + 127 * experts
    first = [tokens * hidden, 4 * tokens * (hidden // 128), 2 * slots * width]
    first += [rows * hidden, 4 * rows * (hidden // 128)]
    second = [2 * slots * width, rows * width, 4 * rows * (width // 128), 2 * slots * hidden]
    last = [2 * slots * hidden, 2 * tokens * hidden]
    assert nbytes(*last) > nbytes(*first) and nbytes(*second) > nbytes(*last)
    entries = 4 + rows + 2 * num_tiles(slots, experts, 16)
    sizes = (tokens, hidden, width, experts, k, BF16)
    found = moe_ops.workspace_nbytes(*sizes, scheme="fp8_block128", device="sm_90")
    assert found == nbytes(4 * entries, 4, *second)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_block128", "fp8_channel", "int8_tensor"])
def test_rows_are_freed_after_the_first_gemm(scheme, on_input):
    """By `fused_experts` and by `FusedMoEKernel`, also rows that contain router weights."""
    problem = Problem(T, E, K, H, I, BF16, scheme=scheme, on_input=on_input)
    s = setup(problem, moe_ops.pipeline.TritonExperts)
    alive, gemm = [], ops.expert_product

    def watched(a, *rest):
        alive.append([ref() is not None for ref in refs])
        refs.append(weakref.ref(a))
        return gemm(a, *rest)

    for run in (
        lambda: moe_ops.fused_experts(
            *s.inputs[:5], quant_config=s.config, apply_router_weight_on_input=on_input
        ),
        lambda: s.kernel.apply(**s.arguments()),
    ):
        refs = []
        alive.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "expert_product", watched)
            run()
        assert alive == [[], [False]]


@pytest.fixture(autouse=True)
def no_frame_hook():
    """Dynamo's frame hook keeps arguments of calls alive.

    Compiled calls may leave it on. A thread that ends with it leaves the interpreter with a
    function for frames, in which calls hold their arguments even if no hook is set.
    """
    python = ctypes.pythonapi
    get, put = (
        python._PyInterpreterState_GetEvalFrameFunc,
        python._PyInterpreterState_SetEvalFrameFunc,
    )
    python.PyInterpreterState_Get.restype = get.restype = ctypes.c_void_p
    get.argtypes, put.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p]
    state, before = python.PyInterpreterState_Get(), set_eval_frame(None)
    function = get(state)
    put(state, ctypes.cast(python._PyEval_EvalFrameDefault, ctypes.c_void_p))
    yield
    put(state, function)
    set_eval_frame(before)


def test_batched_by_hand():
    """Dispatched rows are gone when the second GEMM returns as many."""
    counts = nbytes(4 * E, 4)
    rows, h, y = (nbytes(2 * E * T * n) for n in (H, I, H))
    expected = counts + plan(E * T) + max(rows + h, h + y)
    # What dispatching also returns, an empty scale, takes no memory.
    sizes, batched = (T, H, I, E, K, BF16), {"format": "batched"}
    assert moe_ops.workspace_nbytes(*sizes, **batched, device="cpu") == expected
    # Programs of Hopper's kernels draw their tiles from a counter.
    assert moe_ops.workspace_nbytes(*sizes, **batched, device="sm_90") == expected + nbytes(4)


def test_chunks_by_hand():
    """The experts' memory is that of a chunk; results of chunks are put together at the end."""
    size = 16
    y, h, out = nbytes(2 * size * K * H), nbytes(2 * size * K * I), nbytes(2 * size * H)
    last = plan(size * K) + max(h + y, y + out) + 3 * out
    expected = max(last, 4 * out + nbytes(2 * T * H))
    sizes, cpu = (T, H, I, E, K, BF16), {"device": "cpu"}
    assert moe_ops.workspace_nbytes(*sizes, chunk_size=size, **cpu) == expected
    whole = moe_ops.workspace_nbytes(*sizes, **cpu)
    assert moe_ops.workspace_nbytes(*sizes, chunk_size=T, **cpu) == whole > expected


@pytest.mark.parametrize(("form", "chunk_size"), CALLS)
@pytest.mark.parametrize("scheme", moe_ops.SCHEMES)
def test_a_call_holds_just_that(form, scheme, chunk_size):
    """Counted while the references run: data changes nothing, nor do another caller's tensors."""
    problem = Problem(T, E, K, H, I, BF16, scheme=scheme)
    s = setup(problem, EXPERTS[form], chunk_size=chunk_size)
    if form == "batched":
        part = moe_ops.pipeline.BatchedPrepareAndFinalize(T, E, 1, 0)
        s.kernel.prepare_finalize = part
    arguments = s.arguments()
    with PeakMemory() as memory:
        s.kernel.apply(**arguments)
    wanted = moe_ops.workspace_nbytes(
        T, H, I, E, K, BF16, scheme=scheme, format=form, chunk_size=chunk_size, device="cpu"
    )
    assert memory.peak == wanted


def test_fused_experts_holds_no_more():
    s = setup(Problem(T, E, K, H, I, BF16, scheme="fp8_block128"), moe_ops.pipeline.TritonExperts)
    with PeakMemory() as memory:
        moe_ops.fused_experts(*s.inputs[:5], quant_config=s.config)
    sizes = (T, H, I, E, K, BF16)
    wanted = moe_ops.workspace_nbytes(*sizes, scheme="fp8_block128", device="cpu")
    assert memory.peak == wanted


@pytest.mark.parametrize("experts", SEPARATE[:2])
def test_workspace_shapes_say_what_experts_hold(experts):
    """The first holds either GEMM's product, the second what goes into a GEMM."""
    s = setup(Problem(T, E, K, H, I, BF16), experts)
    part = s.kernel.fused_experts
    rows = (
        T
        if experts is moe_ops.pipeline.GroupedGemmExperts
        else s.kernel.prepare_finalize.max_num_tokens
    )
    kind = moe_ops.MoEActivation.SILU
    first, second, out = part.workspace_shapes(rows, 2 * I, H, K, E, E, None, kind)
    assert part.workspace_dtype(BF16) is BF16
    with PeakMemory() as memory:
        result = part.apply(*_prepared(s))
    total = sum(nbytes(2 * torch.Size(shape).numel()) for shape in (first, second, out))
    assert result.shape == out
    assert memory.peak <= total + nbytes(4 * 10**4)  # and the plan


@pytest.mark.parametrize(
    ("experts", "wide", "narrow"),
    [
        (moe_ops.pipeline.TritonExperts, (20, 20, 8), (64, 20, 64)),
        (moe_ops.pipeline.GroupedGemmExperts, (40, 20, 8), (64, 64, 64)),
        (moe_ops.pipeline.BatchedTritonExperts, (20, 20, 8), (64, 20, 64)),
        (moe_ops.pipeline.BatchedGroupedGemmExperts, (40, 20, 8), (64, 64, 64)),
    ],
)
def test_workspace_shapes_by_hand(experts, wide, narrow):
    """Of 5 rows, 40 rows of w1 and a hidden size of 8, then of 64: the wider of two decides."""
    part = setup(Problem(), experts).kernel.fused_experts
    standard = experts.activation_format() is moe_ops.pipeline.FusedMoEActivationFormat.Standard
    rows = ((10,), (10,), (5,)) if standard else ((3, 5),) * 3
    for hidden, widths in ((8, wide), (64, narrow)):
        shapes = part.workspace_shapes(5, 40, hidden, 2, 9, 3, None, moe_ops.MoEActivation.SILU)
        assert shapes == tuple((*r, w) for r, w in zip(rows, widths, strict=True))


def _prepared(s):
    call = s.arguments()
    prepared = s.kernel.prepare_finalize.prepare(
        call["hidden_states"], call["topk_weights"], call["topk_ids"], E, None, False, s.config
    )
    return (
        prepared.a1q, call["w1"], call["w2"], call["topk_weights"], call["topk_ids"], "silu", E,
        None, prepared.a1q_scale, prepared.expert_tokens_meta, False,
    )  # fmt: skip


def test_the_counter_sees_lifetimes():
    x = torch.zeros(1000)
    with PeakMemory() as memory:
        y = x + 1
        z = y[1:] + 1  # a view is nothing new
        assert memory.peak == 2 * 4096
        del y, z
        y = x.view(10, 100).add_(1)  # writes to memory of somebody else
        z = y + 1
    del z
    assert memory.peak == 2 * 4096


def test_errors():
    sizes = (4, 16, 8, 4, 2, torch.float32)
    with pytest.raises(ValueError, match="format must be one of"):
        moe_ops.workspace_nbytes(*sizes, format="batches")
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        moe_ops.workspace_nbytes(-1, *sizes[1:])
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        moe_ops.workspace_nbytes(*sizes, chunk_size=0)
    with pytest.raises(ValueError, match="chunk_size must be None for BatchedTritonExperts"):
        moe_ops.workspace_nbytes(*sizes, chunk_size=2, format="batched")
    with pytest.raises(ValueError, match="scheme must be one of"):
        moe_ops.workspace_nbytes(*sizes, scheme="fp3")
    with pytest.raises(ValueError, match="device must be one of .*'cpu'.*got 'cuda'"):
        moe_ops.workspace_nbytes(*sizes, device="cuda")
    with pytest.raises(TypeError, match="^dtype must be one of .*, got torch.float64"):
        moe_ops.workspace_nbytes(*sizes[:-1], torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1500])
@pytest.mark.parametrize("form", EXPERTS)
@pytest.mark.parametrize("scheme", moe_ops.SCHEMES)
def test_the_allocator_sees_the_same(form, scheme, tokens):
    """Within 2 %: kernels may use a little scratch memory of their own."""
    problem = Problem(tokens, 16, 4, 1024, 768, BF16, scheme=scheme)
    s = setup(problem, EXPERTS[form], "cuda")
    if form == "batched":
        s.kernel.prepare_finalize = moe_ops.pipeline.BatchedPrepareAndFinalize(tokens, 16, 1, 0)
    arguments = s.arguments()
    asked, held = allocator_peaks(lambda: s.kernel.apply(**arguments))
    wanted = moe_ops.workspace_nbytes(
        tokens, 1024, 768, 16, 4, BF16, scheme=scheme, format=form
    )  # fmt: skip
    assert 0.98 * asked <= wanted <= 1.02 * held
