"""What a call of the layer may bring: padding, words; balancing and capture of what it chooses."""

import copy

import pytest
import torch
from modular import EXPERTS
from small_layers import (
    KINDS,
    TABLE,
    WORDS,
    E,
    H,
    Int64Only,
    K,
    T,
    arguments,
    batch,
    filled,
    kernel_of,
    make,
    one_expert,
)
from table_items import every_row
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.routing import hash_topk

PADDED = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_there(kind, device):
    """The others' results are those of a batch without it; NaN in it reaches nobody."""
    layer = filled(device, **KINDS[kind])
    (x, logits), words = arguments(layer, device)
    padded = PADDED.to(device)
    x[padded], logits[padded] = torch.nan, torch.nan
    seen = []
    layer.set_capture_fn(seen.append)
    alone = {n: None if t is None else t[~padded] for n, t in words.items()}
    expected = layer(x[~padded], logits[~padded], **alone)
    load = None if layer.eplb_state is None else layer.eplb_state.expert_load_view
    if load is not None:
        assert load.sum() == K * len(expected)
        layer.set_eplb_state(0, *(t[None] for t in layer.eplb_state[:3]))
        load.zero_()
    out = layer(x, logits, is_padding=padded, **words)
    assert torch.equal(out[padded], torch.zeros_like(out[padded]))
    torch.testing.assert_close(out[~padded], expected)
    assert (seen[1][padded] == -1).all() and torch.equal(seen[1][~padded], seen[0])
    if load is not None:
        assert load.sum() == K * len(expected)


@pytest.mark.kernel
def test_the_tokens_behind_a_number_are_padding(device):
    """The device knows the number; it adds to the mask, and both work with more axes."""
    layer, (x, logits) = filled(device), (t.to(device) for t in batch())
    number = torch.tensor([6], dtype=torch.int32, device=device)
    expected = layer(x, logits)
    expected[6:] = 0
    x[6:] = torch.nan
    torch.testing.assert_close(layer(x, logits, num_unpadded_tokens=number), expected)
    wanted = expected.clone()
    wanted[2] = 0
    both = {"num_unpadded_tokens": number, "is_padding": PADDED.to(device)}
    expected = layer(x, logits, **both)
    torch.testing.assert_close(expected, wanted)
    both["is_padding"] = both["is_padding"].view(3, 3)
    folded = layer(x.view(3, 3, H), logits.view(3, 3, E), **both)
    assert torch.equal(folded, expected.view(3, 3, H))


@pytest.mark.parametrize("experts", [e for e in EXPERTS if not e.is_monolithic()])
@pytest.mark.parametrize("scheme", [None, "fp8_tensor", "fp8_channel"])
def test_kernels_do_not_see_padding(experts, scheme):
    layer = filled(quant_config=scheme)
    (x, logits), _ = arguments(layer)
    config = layer.quant_method.get_fused_moe_quant_config(layer) or "unquantized"
    expected = layer(x, logits, is_padding=PADDED)
    format_ = experts.activation_format()
    batched = format_ is moe_ops.pipeline.FusedMoEActivationFormat.BatchedExperts
    values = {**vars(layer.moe_config), "max_num_tokens": T if batched else None}
    layer.kernel = moe_ops.select_kernel(moe_ops.FusedMoEConfig(**values), config, experts=experts)
    clean = layer(x, logits, is_padding=PADDED)
    x[PADDED], logits[PADDED] = torch.nan, torch.nan
    out = layer(x, logits, is_padding=PADDED)
    assert torch.equal(out, clean) and not out[PADDED].any()
    rounding = 0.1 if scheme else 1e-5  # the Batched format has one scale of an expert
    assert (out - expected).norm() <= rounding * expected.norm()


EVERYTHING = {
    **KINDS["grouped"], **KINDS["identity"], **KINDS["balanced"], "shared_experts": nn.Tanh(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "backend"), [(EVERYTHING, "aot_eager"), (KINDS["words"], "eager")]
)
def test_one_compilation(options, backend):
    """Mask, number and words are inputs; buffers are written, calls are counted."""
    torch._dynamo.reset()
    layer = filled(**options)
    layer.requires_grad_(not layer.enable_eplb)  # calls that record gradients are not counted
    if layer.shared_experts is not None:
        layer.kernel = kernel_of(layer, Int64Only())
    buffer = torch.full((64, 3, K), -7, dtype=torch.int32)
    layer.set_capture_fn(lambda ids: pytest.fail("not in eager mode"), buffer=buffer[:, 1])
    twin = copy.deepcopy(layer)
    seen = []
    twin.set_capture_fn(seen.append)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, T, 6):  # 7: no other size, or Dynamo takes them for one
        (x, logits), words = arguments(layer, tokens=tokens)
        number = torch.tensor(5)
        given = {"is_padding": PADDED[:tokens].clone(), "num_unpadded_tokens": number, **words}
        torch.testing.assert_close(compiled(x, logits, **given), twin(x, logits, **given))
        assert torch.equal(buffer[:tokens, 1], seen[-1])
    assert (seen[-1] == -1).any() and (buffer[:, ::2] == -7).all() and (buffer[T:] == -7).all()
    if layer.enable_eplb:
        mine, other = (x.eplb_state.expert_load_view for x in (layer, twin))
        assert torch.equal(mine, other) and layer.eplb_step == 3
    assert counter.frame_count == 1


def test_words_choose():
    layer, (x, logits) = make(hash_indices_table=TABLE, scoring_func="sigmoid"), batch()
    weights, ids = hash_topk(x, logits, WORDS, TABLE, True, "sigmoid")
    expected = moe_ops.fused_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)
    assert torch.equal(layer(x, logits, input_ids=WORDS), expected)
    folded = layer(x.view(3, 3, H), logits.view(3, 3, E), input_ids=WORDS.view(3, 3))
    assert torch.equal(folded, expected.view(3, 3, H)) and not expected[6].any()
    assert torch.equal(layer.state_dict()["hash_indices_table"], TABLE)
    assert layer.moe_config.routing_method is moe_ops.RoutingMethodType.Custom
    assert layer.warmup([3])


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({"hash_indices_table": TABLE}, {}, ValueError, "input_ids must be a Tensor with hash_ind"),
        ({}, {"input_ids": WORDS}, ValueError, "input_ids must be None without hash_indices_table"),
        ({"n_shared_experts": 1}, {"input_ids": WORDS}, ValueError, "input_ids must be None"),
        ({}, {"is_padding": PADDED.int()}, TypeError, "is_padding must have a dtype of .*bool"),
        ({}, {"is_padding": PADDED[1:]}, ValueError, "is_padding must have the 9 tokens of hidden"),
        ({}, {"is_padding": PADDED.view(3, 3)}, ValueError, "is_padding must be .T,. or have the"),
        ({}, {"num_unpadded_tokens": 3}, TypeError, "num_unpadded_tokens must be a Tensor, got"),
        ({}, {"num_unpadded_tokens": WORDS}, ValueError, "num_unpadded_tokens.* one number"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(options, given, error, message):
    with pytest.raises(error, match=message):
        make(**options)(*batch(), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hash_indices_table": TABLE[:, :1]}, "hash_indices_table.shape.1. must be top_k = 2"),
        (
            {"hash_indices_table": TABLE, "use_grouped_topk": True},
            "use_grouped_topk must be left out with hash_indices_table",
        ),
        (
            {"hash_indices_table": TABLE, "custom_routing_function": one_expert},
            "custom_routing_function must be left out with hash_indices_table",
        ),
        (
            {"hash_indices_table": TABLE, "e_score_correction_bias": torch.zeros(E)},
            "e_score_correction_bias must be left out with hash_indices_table",
        ),
        *(
            (
                {"custom_routing_function": one_expert, name: value},
                f"{name} must be left out with custom_routing_function, which chooses",
            )
            for name, value in (
                ("use_grouped_topk", True),
                ("scoring_func", "sigmoid"),
                ("e_score_correction_bias", torch.zeros(E)),
            )
        ),
    ],
)
def test_routers_that_do_not_fit(options, message):
    """Each alone; the defaults of the others may be passed."""
    with pytest.raises(ValueError, match=message):
        make(**options)
    make(custom_routing_function=one_expert, scoring_func="softmax", use_grouped_topk=False)


REPLICAS = [0, 8, 9, 10]


def replicated(device="cpu"):
    """A layer of one popular expert with four replicas, and its load."""
    options = {"enable_eplb": True, "num_redundant_experts": 4}
    layer = make(custom_routing_function=one_expert, **options).to(device).requires_grad_(False)
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data[REPLICAS] = weight.data[REPLICAS[0]].clone()
    load = torch.zeros(1, E + 4, dtype=torch.int32, device=device)
    maps = torch.full((1, E, 4), -1, device=device)
    maps[0, :, 0] = torch.arange(E)
    maps[0, 0] = torch.tensor(REPLICAS)
    counts = torch.ones(1, E, dtype=torch.int64, device=device)
    counts[0, 0] = 4
    return layer, (load, maps, counts)


def test_decoding_reaches_every_replica():
    layer, state = replicated()
    layer.set_eplb_state(0, *state)
    x, logits = batch(1)
    for _ in range(16):
        layer(x, logits)
    assert state[0][0, REPLICAS].tolist() == [4] * 4 and layer.eplb_step == 16
    first = layer.route(x, logits).topk_ids
    layer.set_eplb_state(0, *state)  # from 0 again
    for _ in range(16):
        layer(x, logits)
    assert torch.equal(layer.route(x, logits).topk_ids, first)
    assert copy.deepcopy(layer).eplb_step == 17
    logits.requires_grad_()  # a checkpoint chooses the same replicas when it computes this again
    layer(x, logits)
    assert layer.eplb_step == 17


def test_a_step_of_the_callers():
    """It stays what the caller says, and a seed parts the ranks."""
    layer, state = replicated()
    step = torch.tensor(0, dtype=torch.int32)
    layer.set_eplb_state(0, *state, step=step, seed=1)
    x, logits = batch(1)
    same = [int(layer.route(x, logits).topk_ids[0, 0]) for _ in range(4)]
    assert len(set(same)) == 1 and step == 0
    chosen = []
    for _ in range(8):
        step += 1
        chosen.append(int(layer.route(x, logits).topk_ids[0, 0]))
    assert sorted(chosen) == sorted(2 * REPLICAS)
    for change, message in (
        ({"seed": -1}, "seed must be in 0"),
        ({"step": torch.zeros(2, dtype=torch.int64)}, "step.* one number"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.set_eplb_state(0, *state, **change)


def test_recording_is_switched_on_the_device():
    layer, state = replicated()
    enabled = torch.zeros(1, dtype=torch.bool)
    layer.set_eplb_state(0, *state, record_enabled=enabled)
    layer(*batch())
    assert not state[0].any()
    enabled.fill_(1)
    layer(*batch())
    assert state[0].sum() == T


def test_a_warmup_is_neither_counted_nor_captured():
    layer, state = replicated()
    layer.set_eplb_state(0, *state)
    buffer = torch.zeros(2, K, dtype=torch.int64)
    layer.set_capture_fn(lambda ids: pytest.fail("a token of the warmup"), buffer=buffer)
    layer.warmup([5])
    assert not state[0].any() and layer.eplb_step == 0 and not buffer.any()
    assert layer.capture_buffer is buffer


@pytest.mark.gpu
def test_captured_decoding():
    """Replays choose other replicas, write into the buffer, and read the mask."""
    layer, state = replicated("cuda")
    layer.set_eplb_state(0, *state)
    buffer = torch.zeros(4, K, dtype=torch.int32, device="cuda")
    seen = []
    layer.set_capture_fn(seen.append, buffer=buffer)
    x, logits = (t.cuda() for t in batch(1))
    number = torch.ones(1, dtype=torch.int32, device="cuda")
    expected = layer(x, logits, num_unpadded_tokens=number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, logits, num_unpadded_tokens=number)
    assert len(seen) == 1
    state[0].zero_(), layer.eplb_step.zero_()
    for _ in range(16):
        graph.replay()
        assert torch.equal(out, expected) and buffer[0].tolist() == [0, -1]
    assert state[0][0, REPLICAS].tolist() == [4] * 4
    number.zero_()
    graph.replay()
    assert not out.any() and buffer[0].tolist() == [-1, -1] and state[0].sum() == 16


@pytest.mark.parametrize(
    "kind", ["plain", "identity", "fused shared", "gated shared", "balanced", "chunks"]
)
def test_captures_are_the_routers_choice(kind):
    """Once for a call: logical experts, identity experts among them, no shared ones."""
    layer, seen = filled(**KINDS[kind]), []
    (x, logits), _ = arguments(layer)
    ids = moe_ops.fused_topk(x, logits, K, True)[1]
    layer.set_capture_fn(seen.append)
    layer(x, logits)
    assert len(seen) == 1 and torch.equal(seen[0], ids)
    layer.set_capture_fn(None)
    layer(x, logits)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (3, {}, TypeError, "fn must be callable or None, got int"),
        (None, {"buffer": torch.zeros(T, K)}, TypeError, "buffer must have a dtype"),
        (None, {"buffer": torch.zeros(T, 3, dtype=torch.int32)}, ValueError, "must be top_k = 2"),
    ],
)
def test_captures_that_do_not_fit(fn, options, error, message):
    with pytest.raises(error, match=message):
        make().set_capture_fn(fn, **options)


def test_a_buffer_that_is_too_short():
    layer = make()
    layer.set_capture_fn(None, buffer=torch.zeros(T - 1, K, dtype=torch.int32))
    with pytest.raises(ValueError, match="buffer of set_capture_fn must have a row for each of 9"):
        layer(*batch())


def test_slots_of_identity_experts_go_nowhere():
    """Nor are they counted: expert 0 has the rows of its own tokens."""
    options = KINDS["identity"] | KINDS["balanced"]
    layer = filled(**options)
    (x, logits), _ = arguments(layer)
    routed = layer.route(x, logits)
    _, chosen = moe_ops.fused_topk(x, logits, K, True)
    assert (chosen >= E).any()
    assert torch.equal(routed.topk_ids == -1, chosen >= E)
    assert not routed.topk_weights[chosen >= E].any()
    assert layer.eplb_state.expert_load_view.sum() == (chosen < E).sum()


@every_row(
    ("options", "message"),
    [
        ({"use_grouped_topk": True}, "num_expert_group and topk_group must be numbers, got None"),
        ({"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1}, "must divide the 8"),
        ({"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 1}, "top_k must be betw"),
        ({"zero_expert_type": "copy"}, "zero_expert_type must be one of .*, got 'copy'"),
        ({"expert_mapping": torch.zeros(3)}, r"expert_mapping must be a list .*, got tensor"),
        ({"expert_mapping": [("a", "b", "c")]}, r"expert_mapping .* got \('a', 'b', 'c'\)"),
        ({"tp_group": 3}, "tp_group must be a ProcessGroup, its name, .* got int"),
    ],
)
def test_errors_when_the_layer_is_made(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


@every_row("options", [{}, {"n_shared_experts": 1}])
def test_an_input_that_no_shared_expert_reads(options):
    with pytest.raises(ValueError, match="shared_experts_input must be None without shared_expe"):
        make(**options)(*batch(), batch()[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_size": 2}, {"zero_expert_num": 2, "zero_expert_type": "identity"}],
    ids=str,
)
def test_results_have_the_dtype_of_autocast(options):
    """With any number of tokens."""
    layer, (x, logits) = make(**options), batch(logits=E + options.get("zero_expert_num", 0))
    with torch.autocast("cpu", torch.bfloat16):
        for tokens in (0, T):
            assert layer(x[:tokens], logits[:tokens]).dtype is torch.bfloat16


def test_a_token_has_no_more_slots_than_there_are_experts():
    """Beside zero experts, which are no experts to any operator."""
    with pytest.raises(ValueError, match="top_k must be between 1 and the 2 experts, got 3"):
        moe_ops.FusedMoE(2, 3, H, H, zero_expert_num=2, zero_expert_type="identity")


class Gate(nn.Module):
    """A router with a parameter."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(E))

    def forward(self, hidden_states, gating_output, topk, renormalize):
        scores = (gating_output + self.bias).softmax(-1)
        return scores.topk(topk)


def test_a_router_that_is_a_module_is_a_part_of_the_layer():
    layer, (x, logits) = make(custom_routing_function=Gate()), batch()
    other, bias = copy.deepcopy(layer), 3 * torch.arange(E).float()
    for each, value in ((layer, torch.zeros(E)), (other, bias)):
        each.load_state_dict({**each.state_dict(), "custom_routing_function.bias": value})
    assert torch.equal(other(x, logits), layer(x, logits + bias))
    other(x, logits).sum().backward()
    assert other.get_parameter("custom_routing_function.bias").grad.abs().sum() > 0
