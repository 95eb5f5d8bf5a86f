"""weight_loader and its steps, tensor by tensor, as models of the field call them."""

import pytest
import torch
from checkpoint_formats import AWQ_ORDER, codes_of, words
from checkpoints import RANKS, Experts, expected, held, numbers, per_expert

import moe_ops
from moe_ops.layer.steps import copy_front
from moe_ops.scheme import SCHEMES

E, K, H, I = 8, 2, 256, 512  # noqa: E741


def make(scheme=None, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_load_weights_by_mapping(scheme):
    experts = Experts.random(E, H, I).quantized(scheme)
    source = per_expert(experts, input_scale=0.5 if scheme.endswith("static") else None)
    mapping = moe_ops.parallel.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", E)
    for rank in RANKS[1:]:
        layer = make(scheme, expert_mapping=mapping, **rank)
        mine = {f".{e}." for e in held(layer)}
        loaded = set(layer.load_weights(source.items()))
        assert loaded == {n for n in source if any(e in n for e in mine)}
        wanted = expected(experts, scheme, layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_one_rank_has_the_bias_of_w2(tp_rank):
    """Ranks are summed. The others have zeros, whatever was there before."""
    layer, bias = make(has_bias=True, tp_size=2, tp_rank=tp_rank), torch.arange(1.0, H + 1)
    layer.w2_bias.data.fill_(7.0)
    layer.weight_loader(layer.w2_bias, bias, "experts.3.w2.bias", "w2", 3)
    assert torch.equal(layer.w2_bias[3].float(), bias if tp_rank == 0 else torch.zeros(H))
    assert (layer.w2_bias[2] == 7).all()


def test_packed_words_are_told_by_their_shape():
    """One tensor at a time: AWQ packs columns, in an order of its own, GPTQ rows."""
    experts = Experts.random(E, H, I).quantized("int4_w4a16_g128")
    codes = codes_of(experts.gate, 5, 4)
    awq = words(codes.t().unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2))
    for stored in (awq, words(codes).t()):
        layer = make("int4_w4a16_g128")
        layer.weight_loader(layer.w13_weight, stored, "experts.5.w1.qweight", "w1", 5)
        assert torch.equal(layer.w13_weight[5, :I], experts.gate.data[5])


def test_return_values():
    layer = make(ep_size=2, ep_rank=1)
    w, param = torch.ones(I, H), layer.w13_weight
    before = param.detach().clone()
    assert layer.weight_loader(param, w, "w1.weight", "w1", 0, return_success=True) is False
    assert layer.weight_loader(param, w, "w1.weight", "w1", 0) is None
    assert layer.weight_loader(param, w, "w1.weight", "w1", 4, return_success=True) is True
    assert layer.weight_loader(param, w, "w1.weight", "w1", 4) is None
    other = torch.zeros(4, I, H)
    assert layer.weight_loader(other, w, "w1.other", "w1", 4, return_success=True) is False
    before[0, :I] = 1
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("shard", "expert", "shape", "message"),
    [
        ("w4", 0, (I, H), r"shard_id must be \['w1','w2','w3'\] but got w4"),
        (
            "w1",
            0,
            (I, H + 1),
            r"w \(w13_weight\[0\]\): shape must be \(512, 256\), got \(512, 257\)",
        ),
        ("w1", E, (I, H), "expert_id must be in 0..7, got 8"),
        ("w1", -1, (I, H), "expert_id must be in 0..7, got -1"),
    ],
)
def test_errors(shard, expert, shape, message):
    layer = make()
    with pytest.raises(ValueError, match=message):
        layer.weight_loader(layer.w13_weight, torch.ones(shape), "w", shard, expert)


def test_input_scales_must_agree():
    layer = make("fp8_tensor_static")
    param, name = layer.w13_input_scale, "w1.input_scale"
    layer.weight_loader(param, torch.tensor(0.5), name, "w1", 3)
    layer.weight_loader(param, torch.tensor([0.500001]), name, "w3", 3)
    with pytest.raises(ValueError, match="input_scales of w1 and w3 of a layer must be equal"):
        layer.weight_loader(param, torch.tensor(0.6), name, "w3", 3)
    with pytest.raises(ValueError, match="positive and finite"):
        layer.weight_loader(param, torch.tensor(0.0), name, "w1", 2)
    for first, then in ((0.500001, 0.5), (0.5, 0.500001)):  # the larger one is kept
        param.data[4] = torch.nan
        layer.weight_loader(param, torch.tensor(first), name, "w1", 4)
        layer.weight_loader(param, torch.tensor(then), name, "w3", 4)
        assert param[4].item() == torch.tensor(0.500001).item()


def test_an_unknown_quant_method():
    layer, param = make(), torch.zeros(E, 2 * I)
    with pytest.raises(
        ValueError, match="quant method must be one of .'tensor', 'channel', 'group"
    ):
        layer.weight_loader(param, torch.ones(I), "w1.weight_scale", "w1", 0)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_tensors_of_the_callers_own(tp_rank):
    """By name and quant_method: g_idx, shapes, scales of every method."""
    layer = make(tp_size=2, tp_rank=tp_rank)
    g = torch.Generator().manual_seed(0)

    def load(shape, name, shard, x, method=None, **attributes):
        param = torch.zeros(shape)
        for key, value in ({"quant_method": method} | attributes).items():
            setattr(param, key, value)
        layer.weight_loader(param, x, name, shard, 3)
        return param[3]

    half = slice(tp_rank * 4, tp_rank * 4 + 4)
    columns = torch.randn(8, generator=g)
    assert torch.equal(load((E, 4), "w2.g_idx", "w2", columns), columns[half])
    assert torch.equal(load((E, 8), "w1.g_idx", "w1", columns), columns)
    assert torch.equal(load((E, 2), "w.weight_shape", "w1", columns[:2]), columns[:2])
    assert load((E, 2), "w.weight_scale", "w3", columns[:1], "tensor")[1] == columns[0]
    channel = load((E, 8, 1), "w.weight_scale", "w3", columns[:, None], "channel")
    assert torch.equal(channel[4:, 0], columns[half]) and not channel[:4].any()
    assert torch.equal(load((E, 8), "w.weight_scale", "w2", columns, "channel"), columns)
    groups = torch.randn(6, 8, generator=g)
    assert torch.equal(load((E, 6, 4), "w.zero", "w2", groups, "group"), groups[:, half])
    wide = torch.randn(3, 8, generator=g)
    flipped = load((E, 3, 8), "w.qweight", "w3", wide, is_transposed=True)
    assert torch.equal(flipped[:, 4:], wide[:, half]) and not flipped[:, :4].any()
    full = load((E, 6, 8), "w.zero", "w2", groups, "group", load_full_w2=True)
    assert torch.equal(full, groups)


def test_all_experts_at_once_and_transposed_parameters():
    experts = Experts.random(E, H, I)
    for rank in RANKS:
        layer = make(**rank)
        layer.weight_loader(layer.w13_weight, experts.gate, "gate.weight", "w1", 0)
        layer.weight_loader(layer.w13_weight, experts.up, "up.weight", "w3", 0)
        layer.weight_loader(layer.w2_weight, experts.down, "down.weight", "w2", 0)
        wanted = expected(experts, "unquantized", layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))
    layer = make()
    stored = torch.zeros(E, H, 2 * I)
    param = torch.nn.Parameter(stored, requires_grad=False)
    param.is_transposed = True
    layer.register_parameter("w13_weight", param)
    layer.weight_loader(param, experts.up[5].t(), "up.weight", "w3", 5)
    assert torch.equal(stored[5, :, I:], experts.up[5].t()) and not stored[5, :, :I].any()


def test_scales_of_gate_and_up_that_would_share_a_block():
    """The layer has refined blocks from the start, so that each tensor has its own."""
    layer = moe_ops.FusedMoE(E, K, 128, 192, scheme="fp8_block128")
    layer.weight_loader(layer.w13_weight_scale, torch.tensor([[2.0], [3]]), "w3.scale", "w3", 0)
    assert layer.w13_weight_scale[0, :, 0].tolist() == [0, 0, 0, 2, 2, 3]
    finer = moe_ops.FusedMoE(E, K, 128, 192, scheme="fp8_block64x128")
    finer.weight_loader(finer.w13_weight_scale, torch.ones(3, 1), "w1.scale", "w1", 0)
    assert finer.w13_weight_scale[0, :3].all()


class TestSteps:
    """One expert's part of a parameter: 2I = 8 rows of a rank, I = 8 in all."""

    layer = moe_ops.FusedMoE(2, 1, 6, 8, tp_size=2, tp_rank=1)
    rows = torch.arange(48.0).view(8, 6)

    def test_w13(self):
        data = torch.zeros(8, 6)
        self.layer._load_w13(data, 0, "w1", self.rows, 1)
        self.layer._load_w13(data, 0, "w3", -self.rows, 0)
        assert torch.equal(data, torch.cat((self.rows[4:], -self.rows[:4])))
        self.layer._load_w13(data, 0, "w1", self.rows[:4], 1, load_full=True)
        assert torch.equal(data[:4], self.rows[:4])
        with pytest.raises(ValueError, match="w1 or w3, got w2"):
            self.layer._load_w13(data, 0, "w2", self.rows, 0)

    def test_a_rank_with_nothing_left(self):
        data = torch.zeros(8, 6)
        self.layer._load_w13(data, 0, "w1", self.rows[:5], 1)
        assert torch.equal(data[0], self.rows[4]) and not data[1:].any()
        self.layer._load_w13(data, 0, "w3", self.rows[:4], 1)
        assert not data[4:].any()

    def test_rows_that_alternate(self):
        layer, data = moe_ops.FusedMoE(2, 1, 6, 8, activation="swigluoai"), torch.zeros(16, 6)
        layer._load_w13(data, 0, "w1", self.rows, 0)
        layer._load_w13(data, 0, "w3", -self.rows, 0)
        assert torch.equal(data[0::2], self.rows) and torch.equal(data[1::2], -self.rows)
        one = torch.zeros(2)
        layer._load_per_tensor_weight_scale("w1", one, torch.tensor(3.0), 1)
        layer._load_per_tensor_weight_scale("w3", one, torch.tensor(3.0), 1)
        with pytest.raises(ValueError, match="scales of w1 and w3 must be equal where their rows"):
            layer._load_per_tensor_weight_scale("w3", one, torch.tensor(4.0), 1)
        for shard in ("w1", "w3"):  # another expert has a scale of its own
            layer._load_per_tensor_weight_scale(shard, one, torch.tensor(5.0), 0)
        assert one.tolist() == [5, 3]

    def test_zero_points_that_alternate(self):
        """Gate in low nibbles, up in high ones, whatever was there before."""
        codes = (torch.arange(24).view(8, 3) * 7 % 16).to(torch.uint8)
        data = torch.zeros(4, 3, dtype=torch.uint8)
        for gate, up in ((codes, codes.flip(0)), (codes.flip(1), codes)):
            self.layer._load_alternating_zero_points(data, "w1", gate, 1)
            self.layer._load_alternating_zero_points(data, "w3", up, 1)
            assert torch.equal(data & 15, gate[4:]) and torch.equal(data >> 4, up[4:])

    def test_parts_that_do_not_fit(self):
        with pytest.raises(ValueError, match="loaded_weight must have as many axes as the par"):
            self.layer._load_w2(torch.zeros(6, 4), 1, self.rows[0], 0)
        with pytest.raises(ValueError, match=r"must fit into shape \(2,\), got \(8,\)"):
            copy_front(torch.zeros(2), self.rows[:, 0])
        with pytest.raises(ValueError, match=r"must fit into shape \(6,\), got \(1, 6\)"):
            copy_front(torch.zeros(6), self.rows[:1])
        ungated = moe_ops.FusedMoE(2, 1, 6, 8, activation="relu2_no_mul")
        with pytest.raises(ValueError, match="without a gate, got w3"):
            ungated._load_w13(torch.zeros(8, 6), 0, "w3", self.rows, 0)

    def test_w2(self):
        data = torch.zeros(6, 4)
        self.layer._load_w2(data, 1, self.rows.t(), 1)
        assert torch.equal(data, self.rows.t()[:, 4:])
        self.layer._load_w2(data, 1, self.rows.t()[:, :4], 1, load_full=True)
        assert torch.equal(data, self.rows.t()[:, :4])

    def test_scales(self):
        param = torch.zeros(2, 2)
        self.layer._load_per_tensor_weight_scale("w3", param, torch.tensor([3.0]), 1)
        assert param.tolist() == [[0, 0], [0, 3]]
        combined = torch.zeros(4)
        self.layer._load_combined_w13_weight_scale(0, self.rows[:, 0], combined, 1)
        assert torch.equal(combined, self.rows[4:, 0])
