"""Every file of tuned tiles in the package, checked and compiled for its GPU, without a GPU."""

import json
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import HALF, packed  # noqa: E402
from pairwise import half_exhaustive  # noqa: E402
from tuned_entries import entry, gemm_of, record  # noqa: E402

from moe_ops import ops
from moe_ops.dispatch import (
    tuned,
    tuned_file,  # noqa: E402
)
from moe_ops.dispatch.hopper import (  # noqa: E402
    PACKED,
    STREAM,
    HopperTiles,
    most_stages,
    operand_bytes,
    tile_widths,
)
from moe_ops.dispatch.row_tiles import tile_rule  # noqa: E402
from moe_ops.dispatch.tiles import plan_sizes  # noqa: E402
from moe_ops.inspect.devices import TARGETS  # noqa: E402
from moe_ops.pipeline import gemms  # noqa: E402
from moe_ops.pipeline.row_spaces import SlotRows  # noqa: E402
from moe_ops.scheme import get_scheme, quantize_weight  # noqa: E402
from moe_ops.tensors import ExpertWeight, QTensor, Rows, Tiles  # noqa: E402
from moe_ops.tuning.search import Subject, Trial  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
LAUNCHERS = SimpleNamespace(
    **{
        name: getattr(import_module(f"moe_ops.kernels.{stage}"), name.replace(".", "_"))
        for name, stage in ops.STAGES.items()
        if stage == "expert_product"
    }
)
SHIPPED = [layer for layers in tuned.read_all().values() for layer in layers.values()]
MADE_UP = [
    tuned_file.parse_tuned_layer(
        tuned_file.file_name((4, 256, 512), "NVIDIA H200", scheme),
        json.dumps(record(_4=entry(), _80=entry(64, gemm_of(32, num_stages=2)))),
    )
    for scheme in ("unquantized", "fp8_block128", "int4_w4a16_g32", "mxfp4")
]


def all_of_hoppers(scheme, order):
    """A file whose entries have every size of tile that Hopper's kernels have, in most stages."""
    itemsize, content, gpu = operand_bytes(get_scheme(scheme)), {}, TARGETS["sm_90"].facts
    for tokens, kernel, block_m in HOPPER_ROWS:
        wide = tile_widths(kernel, block_m, itemsize)[::order]
        if wide:
            both = [HopperTiles(kernel, block_m, n, 4, 2) for n in (wide[0], wide[-1])]
            both = [replace(t, num_stages=most_stages(t, gpu)) for t in both]
            content[f"_{tokens}"] = entry(block_m, *map(tuned_file.written, both))
    name = tuned_file.file_name((4, 256, 512), "NVIDIA H200", scheme)
    return tuned_file.parse_tuned_layer(name, json.dumps(record(**content)))


HOPPER_ROWS = [
    (4, STREAM, 16), (30, STREAM, 32), (60, STREAM, 64), (80, PACKED, 64), (160, PACKED, 128),
    (300, PACKED, 192),
]  # fmt: skip
"""Tokens, whose plans have these row tiles."""


def subject_of(known):
    name = tuned_file.plain_name
    gpu = next(t.facts for t in TARGETS.values() if name(t.gpu or "") == known.device)
    return Subject(known.sizes, known.top_k, get_scheme(known.scheme), gpu)


def trials(known):
    for num_tokens, *both in known.entries:
        for which, tiles in enumerate(both, start=1):
            yield Trial(num_tokens, which, tiles)


@pytest.mark.parametrize("known", SHIPPED, ids=lambda known: known.file)
def test_tiles_are_ones_that_may_win(known):
    """In the row tile of the plan, too: no plan would use others."""
    subject = subject_of(known)
    for trial in trials(known):
        defaults = subject.kernels(trial.num_tokens, trial.gemm)
        assert trial.tiles in defaults or subject.allows(trial), trial
        assert trial.tiles.block_m == defaults[0].block_m, trial


def weight_of(known, trial, empty, n, k):
    """An empty weight, in the packed form if the tiles are those of a kernel that decodes it."""
    scheme, experts = get_scheme(known.scheme), known.sizes[0]
    if tuned.reads_fragments(trial.tiles):
        return packed(empty, known.scheme, n, k, torch.bfloat16, experts)
    meta = quantize_weight(torch.empty(experts, n, k, dtype=torch.bfloat16, device="meta"), scheme)
    return QTensor(*(None if t is None else empty(*t.shape, dtype=t.dtype) for t in meta))


def launch_trial(known, trial):
    """One GEMM of the layer."""
    scheme, (experts, width, hidden) = get_scheme(known.scheme), known.sizes
    slots, quant = trial.num_tokens * known.top_k, scheme.activation
    n, k = (2 * width, hidden) if trial.gemm == 1 else (hidden, width)
    rows = trial.num_tokens if trial.gemm == 1 else slots

    def launch(empty):
        ids = empty(trial.num_tokens, known.top_k, dtype=torch.int32)
        rule = tile_rule(known.scheme, torch.bfloat16, ids.device)
        plan = empty(plan_sizes(slots, experts, rule).entries, dtype=torch.int32)
        space = SlotRows(Tiles(plan, ids), experts)
        q = weight_of(known, trial, empty, n, k)
        a = Rows(empty(rows, k))
        if quant is not None:
            given = empty(1, dtype=torch.float32) if quant.static or quant.global_scale else None
            slots_of = (None, None, None, experts, quant.key)
            a = Rows(*ops.moe_quantize(a.data, given, *slots_of))
        weight = ExpertWeight(q.data, None, q.scale, q.zero_point, q.global_scale)
        if trial.gemm == 2:
            gemms.gemm(a, weight, space, 1, scheme, torch.bfloat16)
        else:
            last = (scheme, torch.bfloat16, "silu")
            gemms.gemm(a, weight, space, known.top_k, *last)

    return launch


def check(kernel, tiles, gpu):
    """As the file says, in the shared memory that there is, and into a product that is right."""
    used, made = aot.resources(kernel, gpu.arch), kernel.metadata
    if tuned.reads_fragments(tiles):
        assert made.name == f"{tiles.kernel}_kernel"
        assert used["shared"] + 1024 <= (gpu.shared_memory + 1024) // tiles.ctas, tiles
        assert used["spilled"] == 0 and used["serialized"] == 0, tiles
    elif isinstance(tiles, HopperTiles):
        assert made.name == f"hopper_{'gemm' if tiles.alone else 'stream'}_kernel"
        assert used["shared"] <= (gpu.shared_memory if tiles.alone else HALF), tiles
        assert used["spilled"] == 0 and used["serialized"] == 0, tiles
    else:
        assert (made.num_warps, made.num_stages) == (tiles.num_warps, tiles.num_stages)
        assert used["shared"] <= gpu.shared_memory, tiles
        assert not aot.rewrites_operands(kernel), tiles


def every_other():
    """Every other file of a scheme, unless all are asked for; and those made up."""
    for scheme in dict.fromkeys(known.scheme for known in SHIPPED):
        of_scheme = [known for known in SHIPPED if known.scheme == scheme]
        for i, known in enumerate(of_scheme):
            yield pytest.param(known, marks=[pytest.mark.exhaustive] * (i % 2))
    yield from MADE_UP


def check_trials(known, turn, monkeypatch, request):
    """In turns of entries the first GEMM or the second, unless all are asked for."""
    monkeypatch.setattr(gemms, "ops", LAUNCHERS)
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([known]))
    gpu, everything = subject_of(known).device, request.config.getoption("exhaustive")
    for i, trial in enumerate(trials(known)):
        if everything or (i // 2 + i + turn) % 2 == 0:
            kernel = aot.compile_launch(gpu.arch, launch_trial(known, trial), gpu.name)[-1]
            check(kernel, trial.tiles, gpu)


@pytest.mark.parametrize("known", [*every_other()], ids=lambda known: known.file)
def test_tiles_compile(known, monkeypatch, request):
    check_trials(known, (SHIPPED + MADE_UP).index(known) // 2, monkeypatch, request)


SCHEMES = ["unquantized", "fp8_channel", "fp8_block128"]


@pytest.mark.parametrize(("scheme", "order"), half_exhaustive(SCHEMES, [1, -1]))
def test_tiles_of_hoppers_kernels_compile(scheme, order, monkeypatch, request):
    known = all_of_hoppers(scheme, order)
    check_trials(known, SCHEMES.index(scheme), monkeypatch, request)
