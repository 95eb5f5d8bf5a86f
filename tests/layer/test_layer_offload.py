"""Experts in host memory: a layer's results, life and errors are those of a layer without it."""

import copy
import gc
import io
import pickle
import weakref
from collections import Counter

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from launches import launched_kernels
from packed_weights import PACKABLE
from quantized_layers import quantized
from small_layers import E, I, K, batch, filled, kernel_of
from table_items import every_row
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops import FusedMoE, ops
from moe_ops.layer.moving import offload
from moe_ops.residency import OffloadStats, host
from moe_ops.scheme import SCHEMES
from moe_ops.training import ExpertLora

INSIDE = (-1, E, 2**32)
"""Ids that skip their slot."""


def ids_of(kind, tokens, experts=E):
    """Ids ``(T, k)`` of one hostile kind of routing, and what makes it hostile."""
    t, j = torch.arange(tokens)[:, None], torch.arange(K)
    return {
        "all": (t * K + j) % experts,
        "one": torch.zeros(tokens, K, dtype=torch.int64) + j * 0 + 5,
        "halves": (t % 2) * (experts // 2) + j,
        "cyclic": (t + j) % (experts // 2 + 1),
        "padding": torch.where(t % 3 == 0, -1, (t * 3 + j) % experts),
        "no expert": torch.tensor(INSIDE)[(t + j) % 3],
    }[kind]


KINDS = ("all", "one", "halves", "cyclic", "padding", "no expert")


def both(layer, resident, device="cpu"):
    """A layer, and its copy with ``resident`` experts on the device."""
    other = copy.deepcopy(layer)
    offload(other, resident, torch.device(device))
    assert (other.host_experts is None) == (resident == E)
    return layer.to(device), other


@torch.no_grad()
def assert_same(layer, other, device="cpu", dtype=torch.float32, tokens=(1, 2, 11)):
    """Results have the same bits for every kind of routing and any number of tokens."""
    for count in tokens:
        x, logits = (t.to(device, dtype) for t in batch(count, hidden=layer.model_hidden_size))
        for kind in KINDS:
            ids = ids_of(kind, count).to(device)
            given = layer(x, logits, topk_ids=ids)
            assert torch.equal(other(x, logits, topk_ids=ids), given), (kind, count)
        assert torch.equal(other(x, logits), layer(x, logits))


def stored(scheme, form="plain"):
    """A layer of a scheme in one of its forms, of random weights."""
    return quantized(scheme, E, K, form=form)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_every_scheme_has_the_bits_of_the_layer_without(form):
    """With k, three, or all but one of the experts on the device."""
    failed = []
    for number, scheme in enumerate(SCHEMES if form == "plain" else PACKABLE):
        layer, resident = stored(scheme, form), (3, K, E - 1)[number % 3]
        try:
            assert_same(*both(layer, resident), dtype=torch.bfloat16, tokens=(5,))
        except Exception as error:  # all rows that fail are named
            failed.append(f"{scheme} with {resident}: {error!r:.200}")
    assert not failed


@every_row("resident", range(K, E + 1))
@every_row(
    "options",
    [
        {"has_bias": True},
        {"activation": "swigluoai", "has_bias": True},
        {"activation": "relu2_no_mul"},
        {"apply_router_weight_on_input": True},
        {"batch_invariant": True},
        {"chunk_size": 4},
        {"n_shared_experts": 1},
        {"zero_expert_num": 2, "zero_expert_type": "identity"},
    ],
)
def test_every_option_has_the_bits_of_the_layer_without(resident, options):
    layer = filled(**options)
    other = copy.deepcopy(layer)
    least = layer.sizes.num_experts - E + resident
    offload(other, least)
    x, logits = batch(11, layer.num_logits)
    with torch.no_grad():
        for tokens in (1, 11):
            expected = layer(x[:tokens], logits[:tokens])
            assert torch.equal(other(x[:tokens], logits[:tokens]), expected)


@pytest.mark.kernel
def test_kernels_have_the_bits_of_the_layer_without(device):
    layer = filled(params_dtype=torch.float32, has_bias=True)
    assert_same(*both(layer, 3, device), device, tokens=(1, 5))


@pytest.mark.kernel
def test_launches_beside_those_of_the_layer_without(device, monkeypatch):
    """One for the first wave of both weights, and for each later wave one, and a GEMM, a weight.

    With many tokens a wave has half of the slots.
    """
    if not (HAS_CUDA or INTERPRETED):
        pytest.skip("needs kernels")
    layer, other = both(filled(params_dtype=torch.float32), 4, device)
    names = launched_kernels(monkeypatch)
    for tokens, waves in ((1, 1), (2, 1), (3, 2), (9, 2), (33, 4)):
        counts, results, inputs = [], [], [x.to(device) for x in batch(tokens)]
        for module in (layer, other):
            names.clear()
            with torch.no_grad():
                results.append(module(*inputs))
            counts.append(Counter(names))
        assert torch.equal(*results)
        more, later = counts[1] - counts[0], waves - 1
        assert more.pop("_make_resident_kernel") == 1 + 2 * later
        assert not counts[0] - counts[1] and more.total() == 2 * later, (tokens, counts)


def test_stats_count_experts_waves_and_bytes():
    layer, other = both(filled(), 4)
    x, logits = batch(4)
    one = sum(p[0].nbytes for p in layer.parameters())
    with torch.no_grad():
        other(x, logits, topk_ids=torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
        assert other.offload_stats() == OffloadStats(0, 4, 4 * one, 1)
        other(x[:1], logits[:1], topk_ids=torch.tensor([[0, 7]]))
        assert other.offload_stats() == OffloadStats(1, 5, 5 * one, 2)
        other(x, logits, topk_ids=torch.tensor([[0, 2], [3, 7], [4, 5], [6, -1]]))  # 1 is gone
    assert other.offload_stats() == OffloadStats(5, 8, 8 * one, 4)
    assert other.offload_stats().hit_rate == 5 / 13
    assert layer.offload_stats() == OffloadStats(0, 0, 0, 0)
    assert moe_ops.offload_stats(torch.nn.ModuleList([other, layer, other])) == (5, 8, 8 * one, 4)


def test_made_so_or_put_there_later_or_with_other_amounts():
    layer = filled()
    one = sum(p[0].nbytes for p in layer.parameters())
    for resident in (3, 0.4, f"{3.5 * one / 1e9:.7f}GB"):
        made = FusedMoE(E, K, 32, I, resident_experts=resident)
        made.load_state_dict(layer.state_dict())
        later = moe_ops.offload_(copy.deepcopy(layer), resident=resident, progress=False)
        for other in (made, later):
            assert other.host_experts.residency.num_slots == 3
            assert_same(layer, other)
            assert not any(p.requires_grad for p in other.parameters())
    assert FusedMoE(E, K, 32, I, resident_experts=1.0).host_experts is None
    again = moe_ops.offload_(later, resident=5, progress=False)
    assert again.host_experts.residency.num_slots == 5
    assert_same(layer, again)
    back = moe_ops.offload_(again, resident=1.0, progress=False)
    assert back.host_experts is None
    assert_same(layer, back)


def test_copies_pickles_and_casts_keep_all_experts():
    layer, other = both(filled(), 3)
    x, logits = batch()
    with torch.no_grad():
        other(x, logits)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    for made in (
        copy.deepcopy(other), pickle.loads(pickle.dumps(other)),
        torch.load(file, weights_only=False),
    ):  # fmt: skip
        assert made.offload_stats().misses == 0
        assert_same(layer, made)
    for name, p in other.state_dict().items():
        assert torch.equal(p, layer.state_dict()[name])
    storages = {p.untyped_storage().data_ptr() for p in other.parameters()}
    assert len(storages) == len([*other.parameters()])  # safetensors refuses shared ones
    assert_same(layer.to(torch.bfloat16), other.to(torch.bfloat16), dtype=torch.bfloat16)
    assert_same(layer, other.to("cpu"), dtype=torch.bfloat16)


def test_on_meta_and_to_empty():
    layer = filled(params_dtype=torch.float32)
    other = FusedMoE(E, K, 32, I, resident_experts=3, device="meta")
    assert other.host_experts is None and other.w13_weight.is_meta
    other.to_empty(device="cpu").reset_parameters()
    other.load_state_dict(layer.state_dict())
    assert_same(layer, other)
    other.to("meta")
    assert other.host_experts is None and other.w13_weight.is_meta


def test_whatever_changes_the_weights_empties_the_slots():
    """Every way by which a parameter gets other numbers, after a call that filled all slots."""
    layer, other = both(filled(), 7)
    x, logits = batch(11)
    state = {name: p * 2 for name, p in layer.state_dict().items() if p.is_floating_point()}

    def by_loader(module):
        param = module.w13_weight
        param.weight_loader(param, torch.full((I, 32), 0.25), "w1.weight", "w1", 2)

    def by_hand(module):
        module.w2_weight.data[3] = 0.125
        module.quant_method.process_weights_after_loading(module)

    def replaced(module):
        module.w2_weight = torch.nn.Parameter(module.w2_weight.detach() * 3, requires_grad=False)
        module.renew_slots()

    steps = {
        "load_state_dict": lambda m: m.load_state_dict(state, strict=False),
        "assign": lambda m: m.load_state_dict(copy.deepcopy(state), strict=False, assign=True),
        "load_checkpoint": lambda m: moe_ops.load_checkpoint(m, layer.state_dict(), progress=False),
        "load_weights": lambda m: [*m.load_weights([("experts.1.w2.weight", torch.ones(32, I))])],
        "weight_loader": by_loader,
        "process_weights_after_loading": by_hand,
        "another parameter": replaced,
        "reset_parameters": lambda m: (torch.manual_seed(0), m.reset_parameters()),
    }
    for name, step in steps.items():
        with torch.no_grad():
            other(x, logits)
            step(layer)
            step(other)
        for key, p in layer.named_parameters():
            assert torch.equal(getattr(other, key), p), (name, key)
        assert_same(layer, other)
        assert other.host_experts is not None, name


def test_forms_and_schemes_change_in_host_memory():
    plain = stored("unquantized")
    layer, other = both(plain, 3)
    for module in (layer, other):
        moe_ops.quantize_(module, "int4_w4a16_g128", progress=False)
    assert_same(layer, other, dtype=torch.bfloat16)
    for change in ("pack_", "unpack_"):
        for module in (layer, other):
            getattr(module, change)()
        assert_same(layer, other, dtype=torch.bfloat16)
    assert other.host_experts.residency.slots[0].data.shape[0] == 3
    static = stored("nvfp4")
    layer, other = both(static, 3)
    state = {name: x for name, x in layer.state_dict().items()}
    state["w13_input_scale"] = state["w13_input_scale"] * 2
    for module in (layer, other):
        module.load_state_dict(state)
    assert_same(layer, other, dtype=torch.bfloat16)


def test_adapters_stay_on_the_device():
    layer, other = both(filled(), 3)
    g = torch.Generator().manual_seed(3)
    shapes = ((4, 32), (2 * I, 4), (4, I), (32, 4))
    a1, b1, a2, b2 = (torch.randn(2, E, *s, generator=g) / 8 for s in shapes)
    x, logits = batch(9)
    lora = ExpertLora((a1, b1), (a2, b2), torch.arange(9) % 3, 0.5)
    with torch.no_grad():
        assert torch.equal(other(x, logits, lora=lora), layer(x, logits, lora=lora))
    out = other(x, logits, lora=ExpertLora((a1.requires_grad_(), b1), None, None, 0.5))
    with pytest.raises(NotImplementedError, match="experts in host memory are for inference"):
        out.sum().backward()


def test_no_gradient_is_silently_missing():
    _, other = both(filled(), 3)
    x, logits = batch()
    for inputs in ((x.clone().requires_grad_(), logits), (x, logits.clone().requires_grad_())):
        with pytest.raises(NotImplementedError, match="train without resident_experts"):
            other(*inputs).sum().backward()
    other.requires_grad_()
    with pytest.raises(NotImplementedError, match="train without resident_experts"):
        other(x, logits).sum().backward()


def test_one_graph_for_any_number_of_tokens_and_waves():
    layer, other = both(filled(), 3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for tokens in (7, 1, 12, 3, 7):
            x, logits = batch(tokens)
            assert torch.equal(compiled(x, logits), layer(x, logits))
    stats = other.offload_stats()
    assert counter.frame_count <= 2 and stats.waves > 5 and stats.misses > 8
    ops_seen = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
    assert any("expert_product" in name for name in ops_seen)
    assert not ops.expert_product._schema.is_mutable  # slots are a cache, which no graph sees


def test_ranks_have_a_store_each():
    layer = filled()
    x, logits = batch(9)
    total = 0
    for rank in range(2):
        part = FusedMoE(E, K, 32, I, ep_size=2, ep_rank=rank, resident_experts=3)
        whole = FusedMoE(E, K, 32, I, ep_size=2, ep_rank=rank)
        for name, p in layer.named_parameters():
            for module in (part, whole):
                getattr(module, name).data.copy_(p[rank * 4 : rank * 4 + 4])
        part.renew_slots()
        with torch.no_grad():
            out = part(x, logits)
            assert torch.equal(out, whole(x, logits))
        total += out
        assert part.host_experts.residency.num_experts == 4
    with torch.no_grad():
        assert torch.allclose(total, layer(x, logits), atol=1e-5)


@every_row(
    ("options", "error", "text"),
    [
        ({"resident_experts": 1}, ValueError, "resident_experts must be an int from top_k = 2"),
        ({"resident_experts": 9}, ValueError, "to 8 experts, got 9"),
        ({"resident_experts": "8"}, ValueError, 'a size such as "20GB"'),
        ({"resident_experts": [3]}, TypeError, "got list"),
        ({"resident_experts": 3, "enable_eplb": True}, NotImplementedError, "enable_eplb must be"),
        (
            {"resident_experts": 3, "ep_size": 2, "dp_size": 2},
            NotImplementedError, "dp_size must be 1 and is_sequence_parallel False",
        ),
        ({"resident_experts": 2, "n_shared_experts": 1}, ValueError, "top_k = 3 to 9 experts"),
    ],
)  # fmt: skip
def test_options_that_a_layer_refuses(options, error, text):
    with pytest.raises(error, match=text):
        FusedMoE(E, K, 32, I, **options)


def test_a_kernel_is_refused_before_and_after():
    layer = filled()
    layer.kernel = kernel_of(layer)
    with pytest.raises(NotImplementedError, match=r"layer\.kernel must be None"):
        offload(layer, 3)
    _, other = both(filled(), 3)
    other.kernel = kernel_of(other)
    with pytest.raises(NotImplementedError, match=r"layer\.kernel must be None"):
        other(*batch())


def test_autocast_to_the_dtype_of_the_experts_alone():
    layer, other = both(filled(params_dtype=torch.bfloat16), 3)
    x, logits = batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(x, logits), layer(x, logits))
    with torch.autocast("cpu", torch.float16), pytest.raises(NotImplementedError, match="autocast"):
        other(x, logits)


def test_too_little_memory_leaves_the_model_as_it_was(monkeypatch):
    model = torch.nn.ModuleList([filled(), filled()])
    before = [p.data_ptr() for p in model.parameters()]
    size = sum(p.nbytes for p in model[0].parameters())
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(RuntimeError, match=rf"{size} bytes, got 1000 bytes available"):
        moe_ops.offload_(model, resident=3, progress=False)
    assert [p.data_ptr() for p in model.parameters()] == before
    calls = iter([10**9] * 3 + [0] * 99)
    monkeypatch.setattr(host, "available_bytes", lambda: next(calls))
    with pytest.raises(RuntimeError, match="got 0 bytes available"):
        moe_ops.offload_(model, resident=3, progress=False)
    assert all(layer.host_experts is None for layer in model)
    assert_same(filled(), model[0])


def test_memory_goes_with_the_layer():
    _, other = both(filled(), 3)
    residency = weakref.ref(other.host_experts.residency)
    other(*batch())
    del other
    gc.collect()
    assert residency() is None


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = filled(), filled()

    def forward(self, x, logits):
        return self.second(self.first(x, logits), logits)


def test_modules_choose_layers():
    plain, model = Wrapped(), Wrapped()
    moe_ops.offload_(model, resident=3, modules="first", progress=False)
    assert model.first.host_experts and model.second.host_experts is None
    with torch.no_grad():
        assert torch.equal(model(*batch()), plain(*batch()))
    balanced = torch.nn.ModuleList([filled(), FusedMoE(E, K, 32, I, enable_eplb=True)])
    weight = balanced[0].w13_weight
    with pytest.raises(NotImplementedError, match="FusedMoE '1': enable_eplb must be False"):
        moe_ops.offload_(balanced, resident=3, progress=False)
    assert balanced[0].w13_weight is weight
    with pytest.raises(ValueError, match="modules must fit names of experts modules"):
        moe_ops.offload_(model, resident=3, modules="third")
    with pytest.raises(ValueError, match="model must have experts"):
        moe_ops.offload_(torch.nn.Linear(2, 2), resident=3)
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        moe_ops.offload_([], resident=3)
    with pytest.raises(ValueError, match="must hold numbers"):
        moe_ops.offload_(FusedMoE(E, K, 32, I, device="meta"), resident=3)


def test_products_need_a_routing(device):
    """Rows that are grouped by expert have none: there is nothing to decide by."""
    _, other = both(filled(), 3)
    weight, x = other.host_experts.quant_config.on_host.w1, torch.randn(2, 32)
    plan = torch.zeros(99, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="topk_ids for experts in host memory"):
        ops.expert_product(x, None, [*weight], None, [plan, None, None], 1, "unquantized", x.dtype)
