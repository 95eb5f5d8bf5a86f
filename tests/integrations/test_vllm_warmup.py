"""The plug-in compiles the experts' kernels when vLLM compiles its own, on stand-ins of vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import vllm_stand_ins as vllm
from compilations import compiled_kernels
from torch import nn
from vllm_layers import AG, BATCH, layer, of_engine, problem, served

import moe_ops
from moe_ops.integrations import _engines
from moe_ops.integrations.vllm import register

MODULE = "vllm.model_executor.warmup.kernel_warmup"


@pytest.fixture
def engine(monkeypatch):
    _engines.say_once.cache_clear()
    monkeypatch.delenv("MOE_OPS_VLLM", raising=False)
    made = vllm.install(monkeypatch)
    made.platform.kind = "cuda"
    return made


def module_around(experts, w1, w2, packed=""):
    """A layer of vLLM's model with these experts."""
    module = nn.Module()
    module.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    module.register_buffer(f"w13_weight{packed}", w1)
    module.register_buffer(f"w2_weight{packed}", w2)
    return module


def module_of(engine, name, packed="", experts=None, **config):
    """A layer of vLLM's model with the experts of a scheme."""
    _, _, _, q1, q2, biases = problem(name)
    kind = experts or engine.experts.MoeOpsExperts
    sizes = {"max_num_tokens": 3, "num_dispatchers": 2} if experts else {}
    made = kind(layer(**config), of_engine(name, q1, q2, biases), **sizes)
    return module_around(made, q1.data, q2.data, packed)


@pytest.fixture
def runs(engine, monkeypatch):
    """Largest token counts that ran, each with one token too, and their options."""
    ran = []

    def warmup(w1, w2, top_k, num_tokens, **options):
        moe_ops.warmup(w1, w2, top_k, [1, num_tokens], **options)
        ran.append((num_tokens, options))

    monkeypatch.setattr(engine.warmup, "warmup", warmup)
    return ran


def worker_of(*layers, tokens=7):
    """A worker of vLLM whose model has some layers."""
    model = nn.ModuleList(layers)
    sizes = SimpleNamespace(max_num_batched_tokens=tokens)
    return SimpleNamespace(get_model=lambda: model, scheduler_config=sizes)


def test_each_kind_of_layer_runs_once(runs, engine):
    """After vLLM's own warm-up, whose arguments stay."""
    register()
    layers = [module_of(engine, name) for name in ("unquantized", "fp8_channel", "unquantized")]
    layers[0].expert_map = torch.arange(4, dtype=torch.int32)
    runner = nn.Module()  # of the first layer
    runner.quant_method, runner.routed_experts = layers[0].quant_method, layers[0]
    worker = worker_of(nn.Linear(2, 2), runner, *layers)
    assert sys.modules[MODULE].kernel_warmup(worker, process_local_only=True) == {
        "worker": worker,
        "process_local_only": True,
    }
    of_layers = [module.quant_method.moe_kernel.fused_experts.experts for module in layers[:2]]
    assert runs == [
        (
            7,
            {
                "hidden_dtype": torch.float32,
                "activation": "silu",
                "expert_map": expert_map,
                "quant_config": experts.quant_config,
                "batch_invariant": False,
            },
        )
        for experts, expert_map in zip(of_layers, (layers[0].expert_map, None), strict=True)
    ]


def test_weights_that_are_called_packed(runs, engine):
    engine.warmup.warm_up(worker_of(module_of(engine, "unquantized", "_packed")).get_model(), 5)
    assert [tokens for tokens, _ in runs] == [5]


def test_tokens_of_all_ranks_arrive(runs, engine):
    parallel = vllm.FusedMoEParallelConfig(True, True, dp_size=3)
    module = module_of(engine, "unquantized", moe_parallel_config=parallel)
    engine.warmup.warm_up(module, 5)
    assert [tokens for tokens, _ in runs] == [15]


def test_what_vllm_hands_over_otherwise_is_left_out(runs, engine):
    """Rows that come quantized, and the Batched format: kernels of other operands run there."""
    quantized = module_of(engine, "fp8_channel", moe_parallel_config=AG)
    batched = module_of(
        engine,
        "unquantized",
        experts=engine.experts.BatchedMoeOpsExperts,
        moe_parallel_config=BATCH,
    )
    engine.warmup.warm_up(nn.ModuleList([quantized, batched]), 5)
    assert not runs


@pytest.mark.gpu
def test_no_request_compiles(engine):
    """Every number of tokens finds its kernels after the warm-up."""
    made = engine.experts.MoeOpsExperts(layer(in_dtype=torch.bfloat16), vllm.FusedMoEQuantConfig())
    _, _, _, *weights, _ = problem("unquantized")
    w1, w2 = (w.data.to("cuda", torch.bfloat16) for w in weights)
    engine.warmup.warm_up(module_around(made, w1, w2), 300)
    known = compiled_kernels()
    for tokens in (*range(1, 300, 7), 300):
        x, topk_weights, ids, *_ = problem("unquantized", tokens=tokens)
        x = x.to(w1)
        output = torch.empty_like(x)
        served(made, x, w1, w2, topk_weights.cuda(), ids.cuda(), output=output)
    assert compiled_kernels() == known


def test_a_failure_is_one_line(engine, caplog, monkeypatch):
    """The server starts, and its log says what follows."""
    register()

    def fails(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.warmup, "warmup", fails)
    with caplog.at_level("INFO", "vllm"):
        sys.modules[MODULE].kernel_warmup(worker_of(module_of(engine, "unquantized")))
    assert caplog.messages[-1] == (f"moe_ops: {engine.warmup.LATE}: OutOfMemoryError: no memory")


def test_what_the_warm_up_imports_is_changed_too(engine, monkeypatch):
    """Its modules import methods of layers, which import functions of oracles by their names."""
    late, name = ModuleType("vllm.late"), "make_mxfp4_moe_kernel"
    setattr(late, name, getattr(engine.oracles["mxfp4"], name))

    def attribute_of(module, name):
        monkeypatch.setitem(sys.modules, late.__name__, late)
        return getattr(sys.modules[module], name)

    monkeypatch.setattr(engine.warmup, "attribute_of", attribute_of)
    register()
    assert getattr(late, name) is getattr(engine.oracles["mxfp4"], name)
    assert getattr(late, name).__wrapped__


def test_without_a_gpu_there_is_nothing_to_warm_up(engine):
    """vLLM's module, which its worker for CPUs does not import, stays as it is."""
    engine.platform.kind = "cpu"
    register()
    assert not hasattr(sys.modules[MODULE].kernel_warmup, "__wrapped__")


def test_a_vllm_without_a_warm_up(engine, caplog, monkeypatch):
    """One line, and the experts run."""
    monkeypatch.delattr(sys.modules[MODULE], "kernel_warmup")
    with caplog.at_level("INFO", "vllm"):
        register()
    assert caplog.messages == [f"moe_ops: {engine.warmup.LATE}: vLLM has no {MODULE}.kernel_warmup"]
    classes = engine.oracles["fp8"].backend_to_kernel_cls
    assert engine.experts.MoeOpsExperts in classes(engine.oracles["fp8"].backends.TRITON)
