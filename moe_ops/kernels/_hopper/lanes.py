"""Arithmetic on the two 16-bit lanes of 32-bit words, as PTX has it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def power_of_two(EXPONENT):
    """The bits of a power of two in bf16."""
    return (EXPONENT + 127) << 7


@gluon.constexpr_function
def of_lanes(NAME, HALF):
    """The instruction NAME on the 16-bit lanes of words; fp16 if HALF, else bf16."""
    return f"{NAME}.rn.{'f16x2' if HALF else 'bf16x2'} $0, $1, $2;"


@gluon.jit
def multiply_lanes(x, y, HALF: gl.constexpr):
    """The products of the lanes of two words."""
    ASM: gl.constexpr = of_lanes("mul", HALF)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], gl.int32, True, 1)


@gluon.jit
def subtract_lanes(x, y, HALF: gl.constexpr):
    """The differences of the lanes of two words."""
    ASM: gl.constexpr = of_lanes("sub", HALF)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], gl.int32, True, 1)


@gluon.jit
def multiply_add_lanes(x, y, z):
    """``x * y + z`` of the lanes of words in bf16, rounded once."""
    ASM: gl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [x, y, z], gl.int32, True, 1)


@gluon.jit
def masked_lanes(word, MASK: gl.constexpr, BITS: gl.constexpr):
    """``word & mask | bits`` in each lane.

    One instruction, which only one of the constants fits into: without its name ptxas makes two.
    """
    mask, bits = constant_lanes(MASK, word), constant_lanes(BITS, word)
    ASM: gl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xEA;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [word, mask, bits], gl.int32, True, 1)


@gluon.jit
def flipped_lanes(word, MASK: gl.constexpr, BITS: gl.constexpr):
    """``word & mask ^ bits`` in each lane, in one instruction: see `masked_lanes`."""
    mask, bits = constant_lanes(MASK, word), constant_lanes(BITS, word)
    ASM: gl.constexpr = "lop3.b32 $0, $1, $2, $3, 0x6A;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [word, mask, bits], gl.int32, True, 1)


@gluon.jit
def selected_bits(word, MASK: gl.constexpr, other):
    """Bits of ``word`` where the mask of 32 bits has ones, and of ``other`` elsewhere.

    In one instruction: see `masked_lanes`.
    """
    mask = gl.full(word.shape, MASK, gl.int32, word.type.layout)
    ASM: gl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xE2;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [word, mask, other], gl.int32, True, 1)


@gluon.jit
def spread_bytes(x):
    """Two bytes as the lanes of a word."""
    ASM: gl.constexpr = "prmt.b32 $0, $1, 0, 0x4140;"
    return gl.inline_asm_elementwise(ASM, "=r,r", [x.to(gl.int32)], gl.int32, True, 1)


@gluon.constexpr_function
def twice(LANE):
    """The instructions that put one lane of a word, ``even`` or ``odd``, in both."""
    return f"{{.reg .b16 even, odd; mov.b32 {{even, odd}}, $1; mov.b32 $0, {{{LANE}, {LANE}}};}}"


@gluon.jit
def lane_twice(pair, ODD: gl.constexpr):
    """The low lane of each word in both lanes, or if ODD the high one.

    That takes no instruction: arithmetic on lanes can read one of them twice.
    """
    ASM: gl.constexpr = twice("odd" if ODD else "even")
    return gl.inline_asm_elementwise(ASM, "=r,r", [pair], gl.int32, True, 1)


@gluon.jit
def constant_lanes(BITS: gl.constexpr, like, HIGH: gl.constexpr = None):
    """A 16-bit constant in both lanes of each word, or two of them."""
    LANES: gl.constexpr = BITS | ((BITS if HIGH is None else HIGH) << 16)
    return gl.full(like.shape, LANES, gl.int32, like.type.layout)
