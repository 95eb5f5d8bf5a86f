"""What a load reports, and that one that fails changes nothing."""

import copy
from pathlib import Path

import pytest
import torch
from checkpoints import Experts, fused, per_expert
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrize, prune

import moe_ops

E, K, H, I = 4, 2, 32, 24  # noqa: E741


def make(scheme=None, width=I, **options):
    return moe_ops.FusedMoE(E, K, H, width, scheme=scheme, **options)


def load(layer, source, **how):
    return moe_ops.load_checkpoint(layer, source, progress=False, **how)


@pytest.fixture
def source():
    return per_expert(Experts.random(E, H, I))


def without(source, *names):
    return {n: x for n, x in source.items() if n not in names}


def unchanged(layer, before):
    return all(torch.equal(a, b) for a, b in zip(layer.parameters(), before, strict=True))


CASES = {
    "missing": lambda s: without(s, "experts.2.up_proj.weight"),
    "duplicated": lambda s: [*s.items(), ("experts.1.w1.weight", s["experts.1.gate_proj.weight"])],
    "unexpected": lambda s: s | {"experts.1.gate_proj.lora": torch.ones(1)},
    "mismatched": lambda s: s | {"experts.1.gate_proj.weight": torch.ones(I, H + 1)},
}


@pytest.mark.parametrize("kind", CASES)
def test_strict_and_lenient(kind, source):
    names = {
        "missing": "w13_weight[2].w3", "duplicated": "experts.1.w1.weight",
        "unexpected": "experts.1.gate_proj.lora", "mismatched": "experts.1.gate_proj.weight",
    }  # fmt: skip
    broken = CASES[kind](source)
    layer = make()
    load(layer, per_expert(Experts.random(E, H, I, seed=9)))
    before = [p.clone() for p in layer.parameters()]
    with pytest.raises(
        ValueError, match=f"1 {kind} \\({names[kind].replace('[', '.').replace(']', '.')}"
    ):
        load(layer, broken)
    assert unchanged(layer, before)
    report = load(layer, broken, strict=False)
    assert [n.split(":")[0] for n in getattr(report, kind)] == [names[kind]]
    whole = make()
    load(whole, source)
    assert torch.equal(layer.w2_weight, whole.w2_weight)
    kept = {"missing": (2, slice(I, None)), "mismatched": (1, slice(I))}
    if kind in kept:  # this part is what it was
        assert report.missing == (
            f"w13_weight[{kept[kind][0]}].{'w3' if kind == 'missing' else 'w1'}",
        )
        whole.w13_weight.data[kept[kind]] = before[0][kept[kind]]
    assert torch.equal(layer.w13_weight, whole.w13_weight)


def test_a_scale_that_is_missing_stays():
    first, second = (Experts.random(E, H, I, seed=s).quantized("fp8_tensor") for s in (0, 1))
    layer = make("fp8_tensor")
    load(layer, per_expert(first))
    report = load(
        layer, without(per_expert(second), "experts.2.up_proj.weight_scale"), strict=False
    )
    assert report.missing == ("w13_weight_scale[2].w3",)
    wanted = torch.stack((second.gate.scale, second.up.scale), 1)
    wanted[2, 1] = first.up.scale[2]
    assert torch.equal(layer.w13_weight_scale, wanted)


def test_one_scale_for_rows_that_alternate():
    experts = Experts.random(E, H, I).quantized("fp8_tensor")
    equal = experts._replace(up=experts.up._replace(scale=experts.gate.scale))
    layer = make("fp8_tensor", activation="swigluoai")
    load(layer, per_expert(equal))
    assert torch.equal(layer.w13_weight_scale, experts.gate.scale)
    with pytest.raises(ValueError, match="scales of w1 and w3 must be equal where their rows"):
        load(layer, per_expert(experts))


def test_no_memory_is_undefined_after_a_lenient_load(source):
    layer = make("fp8_channel")
    load(layer, {}, strict=False)
    assert not any(p.float().any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (None, {"experts.0.up_proj.weight": torch.ones(I, H, dtype=torch.int8)}, "dtype must be"),
        (None, {"experts.0.up_proj.weight_scale": torch.ones(1)}, "1 unexpected"),
        (None, {"experts.4.up_proj.weight": torch.ones(I, H)}, "1 unexpected"),
        ("fp8_channel", {"experts.0.up_proj.weight": torch.ones(I, H)}, "dtype must be"),
        ("fp8_channel", {"experts.0.up_proj.weight_scale": torch.ones(I + 1, 1)}, "shape must be"),
        ("fp8_channel", {"experts.0.up_proj.weight_scale": torch.full((I, 1), torch.nan)},
         "scales must be finite and positive, got 24"),
        ("fp8_tensor", {"experts.0.up_proj.weight_scale": torch.ones(2)}, "one number"),
        ("fp8_tensor_static", {"experts.3.up_proj.input_scale": torch.tensor(0.75)},
         "input_scales of w1 and w3 of a layer must be equal. But got .* vs. 0.75"),
        ("int4_w4a16_g32", {"experts.0.up_proj.qzeros": torch.zeros(1, 3, dtype=torch.int32)},
         "zero points must all be 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit(scheme, changes, message):
    experts = Experts.random(E, H, I)
    experts = experts if scheme is None else experts.quantized(scheme)
    static = scheme == "fp8_tensor_static"
    source = per_expert(experts, input_scale=0.5 if static else None)
    layer = make(scheme)
    load(layer, source)
    before = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=message):
        load(layer, source | changes)
    assert unchanged(layer, before.parameters())


def test_fused_tensors_of_the_wrong_number_of_experts():
    with pytest.raises(ValueError, match="shape must begin with 4 experts, got"):
        load(make(), fused(Experts.random(E + 1, H, I)))


def test_a_missing_input_scale_is_not_zero():
    experts = Experts.random(E, H, I).quantized("fp8_tensor_static")
    layer = make("fp8_tensor_static")
    source = per_expert(experts, input_scale=0.5)
    del source["experts.2.down_proj.input_scale"]
    with pytest.raises(ValueError, match=r"1 missing \(w2_input_scale\[2\].w2\)"):
        load(layer, source)
    report = load(layer, source, strict=False)
    assert report.missing and layer.w2_input_scale.isnan().any()
    with pytest.raises(ValueError, match="w2_input_scale must be positive and finite, got nan"):
        layer.quant_method.process_weights_after_loading(layer)


def test_prefixes(source):
    model = {f"model.layers.{i}.mlp.{n}": x + i for i in range(2) for n, x in source.items()}
    model |= {"model.layers.1.mlp.gate.weight": torch.ones(E, H), "lm_head.weight": torch.ones(1)}
    model["model.layers.1.mlp.shared_experts.up_proj.weight"] = torch.ones(I, H)
    layer = make()
    known = r"names begin with \['model.layers.0.mlp.', 'model.layers.1.mlp.'\]"
    for prefix in ("", "mlp", "model.layers.10.mlp"):
        with pytest.raises(ValueError, match=known):
            load(layer, model, prefix=prefix)
    others = {n.replace("_proj", "_other"): x for n, x in model.items() if ".0.mlp" in n}
    with pytest.raises(ValueError, match=r"names begin with \['model.layers.0.mlp.'\]$"):
        load(layer, others, prefix="model.layers.0.mlp")
    for end in (".", ".experts.", "", ".experts"):
        prefix = f"model.layers.1.mlp{end}"
        load(layer, model, prefix=prefix)
        assert torch.equal(layer.w13_weight[3, :I], source["experts.3.gate_proj.weight"] + 1)
    named = make(prefix="model.layers.0.mlp.experts")
    load(named, model)
    assert torch.equal(named.w13_weight[3, :I], source["experts.3.gate_proj.weight"])


def test_the_correction_bias_is_loaded_where_the_layer_has_one(source):
    bias = torch.linspace(0, 1, E)
    source["gate.e_score_correction_bias"] = bias
    layer = make(e_score_correction_bias=torch.zeros(E))
    load(layer, source)
    assert torch.equal(layer.e_score_correction_bias, bias)
    assert "gate.e_score_correction_bias" not in load(make(), source).loaded
    source["gate.e_score_correction_bias"] = torch.ones(E + 1)
    with pytest.raises(ValueError, match="1 mismatched"):
        load(layer, source)


def test_parameters_keep_their_addresses(source):
    layer = make()
    before = {n: p.data_ptr() for n, p in layer.named_parameters()}
    load(layer, source)
    assert before == {n: p.data_ptr() for n, p in layer.named_parameters()}


def test_experts_of_other_ranks_are_not_read(source):
    class Poison(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), kwargs=None):
            raise AssertionError(f"{function} on an expert of another rank")

    for name in source:
        if "experts.0." in name or "experts.1." in name:
            source[name] = source[name].as_subclass(Poison)
    load(make(ep_size=2, ep_rank=1), source)


def test_other_errors(source):
    with pytest.raises(ValueError, match="to_empty first"):
        load(make(device="meta"), source)
    with pytest.raises(ValueError, match="layout must be one of"):
        load(make(), source, layout="qwen")
    with pytest.raises(TypeError, match="source must be a path"):
        load(make(), 3)
    with pytest.raises(TypeError, match="source must hold"):
        load(make(), [("a", 1)])
    with pytest.raises(TypeError, match="pairs"):
        load(make(), [1])
    with pytest.raises(
        NotImplementedError, match="blocks of one row if gate and up rows alternate"
    ):
        load(make("fp8_block32", activation="swigluoai"), source)


@pytest.fixture
def mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def flat(layer, *, use_orig_params):
    cpu = torch.device("cpu")
    FullyShardedDataParallel(layer, use_orig_params=use_orig_params, device_id=cpu)


def test_weights_that_a_wrapper_holds(mesh, source):
    """Nothing is written to what the wrapper replaces later; the error says what to do."""
    wrappers = {
        "fully_shard": lambda layer: fully_shard(layer, mesh=mesh),
        "fully_shard, gathered": lambda layer: fully_shard(layer, mesh=mesh),
        "a parametrization": lambda layer: parametrize.register_parametrization(
            layer, "w13_weight", nn.Tanh()
        ),
        "pruning": lambda layer: prune.l1_unstructured(layer, "w2_weight", 0.5),
        "flat": lambda layer: flat(layer, use_orig_params=False),
    }
    one, name = torch.ones(I, H), "experts.0.gate_proj.weight"
    calls = {
        "load_checkpoint": lambda layer: load(layer, source, strict=False),
        "load_weights": lambda layer: list(layer.load_weights([(name, one)])),
        "weight_loader": lambda layer: layer.weight_loader(layer.w13_weight, one, name, "w1", 0),
        "quantize_": lambda layer: moe_ops.quantize_(layer, "fp8_channel", progress=False),
        "unpack_": lambda layer: layer.unpack_(),
        "expert_tensors": lambda layer: layer.expert_tensors(),
    }
    wrong = {}
    for wrapper, wrap in wrappers.items():
        for function, call in calls.items():
            if (wrapper, function) == ("fully_shard", "load_checkpoint"):
                continue  # each rank loads its part: see `test_sharded_checkpoint.py`
            layer = make(params_dtype=torch.float32)
            wrap(layer)
            before = {n: x.clone() for n, x in layer.state_dict().items() if n != "_extra_state"}
            if wrapper.endswith("gathered"):  # after `state_dict`, which gives the parts back
                layer.unshard()
            try:
                call(layer)
            except NotImplementedError as error:
                if not any(text in str(error) for text in ("call this before", "wrapper off")):
                    wrong[wrapper, function] = str(error)
            except Exception as error:  # noqa: BLE001
                wrong[wrapper, function] = f"{type(error).__name__}: {error}"
            else:
                wrong[wrapper, function] = "nothing was raised"
            after = layer.state_dict()
            if not all(torch.equal(x, after[n]) for n, x in before.items()):
                wrong[wrapper, function] = "the weights have changed"
    assert not wrong


def test_modules_that_hold_layers(source):
    """A model and a compiled layer are no layers; the error names the layers in them."""
    layer = make()
    for module, path in ((nn.ModuleList([layer]), ".0"), (torch.compile(layer), "._orig_mod")):
        with pytest.raises(TypeError, match=f"layers in it: {path}\\)"):
            load(module, source)
    with pytest.raises(TypeError, match="got Linear$"):
        load(nn.Linear(2, 2), source)


def test_errors_of_distributed_tensors(mesh):
    """torch refuses a DTensor where the dispatcher sees it: the limits quote what it says."""
    limits = (Path(__file__).parents[2] / "docs/limits.md").read_text()
    x, logits = torch.randn(3, H), torch.randn(3, E)
    layer, sharded = make(params_dtype=torch.float32), make(params_dtype=torch.float32)
    fully_shard(nn.Sequential(sharded), mesh=mesh)
    whole = [torch.distributed.tensor.distribute_tensor(t, mesh) for t in (x, logits)]
    for text, call in (
        ("got mixed torch.Tensor and DTensor", lambda: sharded(x, logits)),
        ("does not have a sharding strategy registered", lambda: layer(*whole)),
    ):
        assert text in limits
        of_2_11 = "Cannot find device mesh from args for op"
        assert of_2_11 in limits
        refused = (RuntimeError, NotImplementedError, ValueError)
        with pytest.raises(refused, match=f"{text}|{of_2_11}"):
            call()
