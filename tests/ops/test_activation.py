"""Every activation against formulas written out once more, in float64."""

from dataclasses import replace

import pytest
import torch
from activation_formulas import FORMULAS, halves, situ
from strategies import ACTIVATIONS, DTYPES

import moe_ops
from moe_ops.activation import Activation, MoEActivation, formula
from moe_ops.reference.activation import activation as reference
from moe_ops.reference.activation import apply, split
from moe_ops.testing import Bounded, assert_matches_reference


def test_every_activation_has_a_formula_here():
    assert {key.split("(")[0] for key in FORMULAS} == {a.value for a in MoEActivation}


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", FORMULAS)
def test_formula(key, dtype, device):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(9, 140, generator=g) * 4).to(dtype)
    x[0, :4] = torch.tensor([0.0, 1e-3, -30.0, 30.0])
    actual = moe_ops.apply_moe_activation(key, x.to(device))
    within = Bounded.exactly(x).activated(formula(key)).rounded(dtype)
    exact = replace(within, value=FORMULAS[key](*halves(x.double(), key)))
    assert_matches_reference(actual.cpu(), exact, reference(x, key))


@pytest.mark.parametrize("key", FORMULAS)
def test_the_reference_is_the_formula(key):
    """In float64 it is what the oracle takes; clamped on one side or both, as the formula says."""
    x, rule = torch.linspace(-12, 12, 600, dtype=torch.float64).view(10, 60), formula(key)
    exact = FORMULAS[key](*halves(x, key))
    torch.testing.assert_close(apply(*split(x, rule), rule), exact)


@pytest.mark.kernel
@pytest.mark.parametrize("key", FORMULAS)
def test_bits_do_not_depend_on_the_row(key, device):
    """In float32, in which no rounding hides that a tensor's last elements are computed apart."""
    generator = torch.Generator().manual_seed(0)
    for width in (26, 38, 40):
        x = (torch.randn(9, width, generator=generator) * 2).to(device)
        whole = moe_ops.apply_moe_activation(key, x)
        alone = torch.cat([moe_ops.apply_moe_activation(key, row[None]) for row in x])
        assert torch.equal(whole, alone)


@pytest.mark.kernel
@pytest.mark.parametrize("key", [key for key in FORMULAS if "situ" not in key])
def test_a_nan_stays_one(key, device):
    """In the gate and in up: no bound takes it for a number."""
    x = torch.ones(2, 8, device=device)
    x[0, :4], x[1, 4:] = torch.nan, torch.nan
    actual = moe_ops.apply_moe_activation(key, x)
    exact = FORMULAS[key](*halves(x.double(), key))
    assert exact.isnan().any() and torch.equal(actual.isnan(), exact.isnan())


@pytest.mark.kernel
def test_a_product_is_rounded_once(device):
    """17 * 17 * 3 is 867, of which bf16 makes 868; of 17 * 17 it would make 288."""
    x = torch.tensor([[17.0, 3.0]], dtype=torch.bfloat16, device=device)
    assert moe_ops.apply_moe_activation("relu2", x).tolist() == [[868.0]]


@pytest.mark.kernel
def test_small_arguments_keep_their_relative_precision(device):
    """tanh near zero is a series in the kernel: no cancellation."""
    x = torch.cat([torch.logspace(-6, 0, 64), torch.ones(64)])[None].to(device)
    actual = moe_ops.apply_moe_activation("situ(beta=1.0)", x).double().cpu()
    exact = situ(*halves(x.cpu().double(), "situ"), 1.0)
    assert ((actual - exact).abs() <= 1e-6 * exact.abs()).all()


@pytest.mark.kernel
def test_the_tail_of_the_derivative_of_gelu_tanh_is_precise(device):
    """Nothing cancels there, as it does in ``1 + tanh``."""
    x = torch.linspace(-4, -1, 64)[:, None].to(device)
    ids = torch.zeros(64, 1, dtype=torch.int32, device=device)
    arguments = (torch.ones_like(x), x, None, ids, None, 1, "gelu_tanh_no_mul", False)
    slope = moe_ops.ops.moe_activation_backward(*arguments)[0].double().cpu()
    g = x.double().cpu().requires_grad_()
    exact = g * torch.sigmoid((8 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))
    (exact,) = torch.autograd.grad(exact.sum(), g)
    assert ((slope - exact).abs() <= 5e-6 * exact.abs()).all()


@pytest.mark.kernel
def test_strided_rows_and_no_rows(device):
    wide = torch.randn(6, 64, device=device)
    strided = moe_ops.apply_moe_activation("silu", wide[:, :32])
    assert torch.equal(strided, moe_ops.apply_moe_activation("silu", wide[:, :32].contiguous()))
    assert moe_ops.apply_moe_activation("silu", wide[:0]).shape == (0, 32)


@pytest.mark.parametrize("key", ACTIVATIONS)
def test_key_round_trips(key):
    assert Activation.parse(key).key == key
    assert formula(key) == Activation.parse(key).formula()
    assert hash(Activation.parse(key)) == hash(Activation.parse(key))


def test_names_and_aliases():
    assert MoEActivation.from_str("gelu_pytorch_tanh") is MoEActivation.GELU_TANH
    assert MoEActivation.SILU.without_mul() is MoEActivation.SILU_NO_MUL
    assert not MoEActivation.RELU2_NO_MUL.is_gated
    assert Activation("silu", clamp_limit=7).key == "silu(clamp_limit=7.0)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoEActivation.from_str("swooosh"), "activation must be one of .* got 'swooosh'"),
        (lambda: Activation("gelu", alpha=1.0), "gelu takes no alpha"),
        (lambda: Activation("swigluoai_uninterleave"), "needs clamp_limit"),
        (lambda: Activation("situ"), "needs beta"),
        (lambda: Activation("silu", clamp_limit=-1.0), "clamp_limit must be positive"),
        (lambda: Activation.parse("silu(gamma=1)"), "activation settings are"),
        (lambda: MoEActivation.SITU.without_mul(), "activation must be one of"),
        (lambda: moe_ops.apply_moe_activation("silu", torch.zeros(2, 3)), "even width"),
        (lambda: moe_ops.apply_moe_activation("situ", torch.zeros(2, 4)), "needs beta"),
        (lambda: moe_ops.apply_moe_activation("silu", torch.zeros(4)), "x must have 2 axes"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_type():
    with pytest.raises(TypeError, match="activation must be a MoEActivation"):
        moe_ops.apply_moe_activation(3, torch.zeros(2, 4))
    with pytest.raises(TypeError, match="x must have a dtype"):
        moe_ops.apply_moe_activation("silu", torch.zeros(2, 4).int())
    out = moe_ops.apply_moe_activation("silu", torch.zeros(2, 4).requires_grad_())
    with pytest.raises(NotImplementedError, match="gradients of apply_moe_activation"):
        out.sum().backward()
