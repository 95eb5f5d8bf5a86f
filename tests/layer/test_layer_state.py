"""The state of a layer: one value, which is all of a layer that changes beside its tensors."""

import ast
import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from checkpoints import Experts, per_expert
from small_layers import E, H, K, batch, make

import moe_ops
from moe_ops import FusedMoE
from moe_ops.testing import run_ranks

ROOT = Path(moe_ops.__file__).parent
CHANGES = {"state", "w13_input_order"}
"""What is assigned after a layer was made: its state and a buffer. Parameters are registered."""
NAMES = {"layer", "module", "stage", "inner", "copied"}
"""Names of variables and attributes that are layers; a ``module`` of an integration is not one."""


def layer_classes(trees):
    """Names of `ExpertLayer` and of the classes that derive from it, directly or not."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"ExpertLayer"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def targets(node):
    """The attributes that a statement assigns or deletes, also in tuples."""
    of = [getattr(node, "target", None), *getattr(node, "targets", [])]
    for target in (x for x in of if x is not None):
        for x in ast.walk(target):
            if isinstance(x, ast.Attribute) and isinstance(x.ctx, (ast.Store, ast.Del)):
                yield x.value, x.attr


def assigned(function, own):
    """The attributes that a function assigns, by name or through ``setattr``, of layers ``own``."""
    for node in ast.walk(function):
        pairs = [*targets(node)]
        if isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func):
            name = node.args[1]
            pairs += [(node.args[0], getattr(name, "value", ast.unparse(name)))]
        for value, name in pairs:
            holder = getattr(value, "attr", getattr(value, "id", None))
            if holder in own and name not in CHANGES:
                yield f"{node.lineno}: {holder}.{name}"


def assignments(trees):
    """Assignments of a layer's attributes outside of ``__init__``, except those of `CHANGES`."""
    layers, found = layer_classes(trees), []
    for file, tree in trees.items():
        for holder in ast.walk(tree):
            is_layer = isinstance(holder, ast.ClassDef) and holder.name in layers
            for node in ast.iter_child_nodes(holder):
                if not isinstance(node, ast.FunctionDef) or (is_layer and node.name == "__init__"):
                    continue
                own = NAMES - ({"module"} if file.startswith("integrations") else set())
                own |= {"self"} if is_layer else set()
                found += [f"{file}:{x}" for x in assigned(node, own)]
    return found


def test_nothing_but_the_state_is_assigned():
    """In the whole package, after ``__init__``."""
    folders = ("layer", "offload", "quantization", "integrations", "loading", "parallel")
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py")]
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}
    assert {"FusedMoE", "LoadsWeights", "KeepsBits"} <= layer_classes(trees)
    assert not assignments(trees)
    planted = """
class Mine(KeepsBits):
    def __init__(self):
        self.sizes = 1
    def change(self, other):
        self.state, (self.sizes, x) = other
        self.placement: int = 2
        del self.kernel
        object.__setattr__(self, "scheme", 3)
def change(layer, target):
    layer.state = layer.w13_input_order = None
    layer.num_experts += 1
    target.module.quant_method = None
class Other:
    def change(self):
        self.sizes = 1
"""
    found = {line.split(": ")[1] for line in assignments(trees | {"x": ast.parse(planted)})}
    own = {"self.sizes", "self.placement", "self.kernel", "self.scheme"}
    assert found == own | {"layer.num_experts", "module.quant_method"}


def test_what_a_layer_holds_after_it_was_made():
    """The other attributes are the same objects after everything that changes a layer."""
    layer, (x, logits) = FusedMoE(E, K, H, 32, scheme="int4_w4a16_g32"), batch()
    before, state = dict(vars(layer)), layer.state
    source = per_expert(Experts.random(E, H, 32).quantized("int4_w4a16_g32"))
    moe_ops.load_checkpoint(layer, source, progress=False)
    layer.to(torch.float64).to(torch.float32)
    layer.set_capture_fn(print)
    layer.set_capture_fn(None)
    layer.kernel = moe_ops.select_kernel(
        layer.moe_config, layer.quant_method.get_fused_moe_quant_config(layer)
    )
    layer.kernel = None
    layer.load_state_dict(layer.state_dict())
    moe_ops.offload_(layer, resident=3, progress=False)
    layer(x, logits)
    assert layer.state is not state and layer.state != state
    after = vars(layer)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] is not after[name]} == {"state"}


def test_the_state_is_a_value():
    one, other = make(scheme="fp8_channel"), make(scheme="fp8_channel")
    assert one.state == other.state and hash(one.state) == hash(other.state)
    assert one.state != make(scheme="fp8_tensor").state
    with pytest.raises(FrozenInstanceError):
        one.state.sizes = None
    for same in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert same.state == one.state and same.quant_method is not one.quant_method
    moe_ops.offload_(one, resident=3, progress=False)
    assert one.state != other.state
    assert one.state == replace(other.state, resident_experts=3, device=torch.device("cpu"))


def test_a_state_prints():
    layer = FusedMoE(
        6, K, 64, 48, scheme="mxfp4_w4a8_token", ep_size=2, ep_rank=1, params_dtype=torch.bfloat16
    )
    said = str(layer.state)
    for fact in (
        "num_experts=6", "top_k=2", "model_hidden_size=64", "intermediate_size=48",
        "scheme=mxfp4_w4a8_token", "forms={'w13': 'plain', 'w2': 'plain'}",
        "local_experts=[3, 4, 5]", "ep_size=2", "ep_rank=1",
        "dtype=torch.bfloat16",
    ):  # fmt: skip
        assert fact in said, said
    assert "resident" not in said and "quant_method" not in said
    layer.as_fp8_()
    said = str(layer.state)
    assert "scheme=mxfp4_w4a8_token" in said and "held_as=fp8_channel" in said
    assert "forms={'w13': 'fp8', 'w2': 'fp8'}" in said
    said = str(FusedMoE(300, K, 64, 48, resident_experts=3).state)
    assert "resident_experts=3, device=cpu" in said and "[0, 1, 2, 3, .., 299]" in said


def test_a_failed_load_leaves_the_state():
    source = per_expert(Experts.random(E, H, 32).quantized("fp8_tensor_static"), input_scale=0.5)
    layer = FusedMoE(E, K, H, 32, scheme="fp8_tensor_static")
    moe_ops.load_checkpoint(layer, source, progress=False)
    state, tensors = layer.state, {name: x.clone() for name, x in layer.state_dict().items()}
    for broken in (
        [*source.items()][:4],
        {**source, "experts.1.up_proj.input_scale": torch.tensor(torch.inf),
         "experts.1.gate_proj.input_scale": torch.tensor(torch.inf)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must hold this layer|positive and finite"):
            moe_ops.load_checkpoint(layer, broken, progress=False)
        assert layer.state is state
        for name, x in layer.state_dict().items():
            assert torch.equal(x.view(torch.uint8), tensors[name].view(torch.uint8)), name


def test_a_kernel_is_made_once_for_a_state(monkeypatch):
    """And once for its parameters, whoever replaces them."""
    made = []
    init = moe_ops.FusedMoEKernel.__init__

    def count(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(moe_ops.FusedMoEKernel, "__init__", count)

    def rank(r, group):
        layer = FusedMoE(E, K, H, 32, dp_size=2, dp_rank=r, ep_size=2, ep_rank=r, tp_group=group)
        x, logits = batch()
        layer(x, logits)
        kernel = layer.kernel
        expected = layer(x, logits)
        assert layer.kernel is kernel and [*made].count(kernel) == 1
        layer.to(torch.float32)
        assert layer.kernel is not kernel
        kernel = layer.kernel
        layer.w13_weight = torch.nn.Parameter(layer.w13_weight.detach().clone())
        assert layer.kernel is not kernel
        assert torch.equal(layer(x, logits), expected)
        tensors = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
        assert not torch.func.functional_call(layer, tensors, (x, logits)).any()
        assert torch.equal(layer(x, logits), expected)

    run_ranks(2, rank)
