"""The few vectors (rows of activations) that the M = 1 decode kernels multiply with weights.

The vectors are the second operand of WGMMA, one per column, and lie in shared memory as a whole,
quantized if the scheme quantizes activations. WGMMA needs at least 8 columns. With fewer vectors
each is cut into chunks along K, one chunk per column. The product of a column with the weights of
another chunk is meaningless and is dropped.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.core import _aggregate as aggregate

from moe_ops.dispatch import hopper as hopper_tiles
from moe_ops.kernels._hopper.memory import wait_for_group
from moe_ops.kernels._quantize.rounding import divide, encode, magnitude, scale_of

PIECES = gl.constexpr(hopper_tiles.PIECES)


@aggregate
class Vectors:
    """The second operand, and the scales of its columns: one per piece, or one for all pieces."""

    data: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, data, scales):
        self.data, self.scales = data, scales


@gluon.jit
def make_vectors(dtype: gl.constexpr, G: gl.constexpr):
    """Allocate `Vectors` in shared memory."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8 * G.ITEMSIZE, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = G.STEPS * PIECES
    data = gl.allocate_shared_memory(dtype, [COUNT, G.COLUMNS, G.BLOCK_K], SWIZZLED)
    scales = gl.allocate_shared_memory(
        gl.float32, [COUNT if G.SCALE_COLS is not None else 1, G.COLUMNS], FLAT
    )
    return Vectors(data, scales)


@gluon.jit
def load_pieces(source, first, COUNT: gl.constexpr, L: gl.constexpr, G: gl.constexpr):
    """COUNT consecutive pieces of the vectors from ``first`` on; zeros past the ends of vectors."""
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(1, L))
    inside = gl.arange(0, G.BLOCK_K, layout=gl.SliceLayout(0, L))[None, :]
    vector, chunk = column % G.VECTORS, column // G.VECTORS * (G.STEPS * PIECES)
    pieces = ()
    for i in gl.static_range(COUNT):
        k = ((chunk + first + i) * G.BLOCK_K)[:, None] + inside
        mask = (k < G.K) & (vector < G.COUNT)[:, None]
        pieces += (gl.load(source + vector[:, None] * G.K + k, mask=mask, other=0.0),)
    return pieces


@gluon.jit
def most_of_pieces(source, first, most, COUNT: gl.constexpr, L: gl.constexpr, G: gl.constexpr):
    """The elementwise maximum of ``most`` and the largest magnitudes of COUNT pieces, by column."""
    pieces = load_pieces(source, first, COUNT, L, G)
    for j in gl.static_range(COUNT):
        most = gl.maximum(most, gl.max(magnitude(pieces[j].to(gl.float32)), 1))
    return most


@gluon.jit
def scales_of_vectors(source, L: gl.constexpr, G: gl.constexpr):
    """The scale of each column where a vector has one scale: the scale of the column's vector."""
    QUANT: gl.constexpr = G.QUANT
    COLUMN: gl.constexpr = gl.SliceLayout(1, L)
    most = gl.full([G.COLUMNS], 0, gl.int32, COLUMN)
    for i in range(G.PAIRED // G.BATCH):
        most = most_of_pieces(source, i * G.BATCH, most, G.BATCH, L, G)
    if G.PAIRED < G.STEPS * PIECES:
        most = most_of_pieces(source, G.PAIRED, most, 1, L, G)
    chunks = most.reshape((G.COLUMNS // G.VECTORS, G.VECTORS))
    whole = gl.expand_dims(gl.max(chunks, 0), 0)
    most = gl.convert_layout((chunks * 0 + whole).reshape((G.COLUMNS,)), COLUMN)
    return scale_of(most.to(gl.float32, bitcast=True), QUANT)


@gluon.jit
def put_stored_scales(source, vectors, L: gl.constexpr, G: gl.constexpr):
    """Copy the scales of vectors that are quantized already: one per vector or one per group."""
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(1, L))
    vector, real = column % G.VECTORS, column % G.VECTORS < G.COUNT
    if G.SCALE_COLS is None:
        vectors.scales.index(0).store(gl.load(source + vector, mask=real, other=0.0))
    else:
        GROUPS: gl.constexpr = G.groups
        for q in range(G.STEPS * PIECES):
            group = column // G.VECTORS * (G.STEPS * PIECES) + q
            inside = real & (group < GROUPS)
            scale = gl.load(source + vector * GROUPS + group, mask=inside, other=0.0)
            vectors.scales.index(q).store(scale)


@gluon.jit
def put_pieces(
    source, scale, first, vectors, COUNT: gl.constexpr, L: gl.constexpr, G: gl.constexpr
):
    """Store COUNT pieces of the vectors, quantized (with ``scale`` or per piece) if G.QUANT."""
    QUANT: gl.constexpr = G.QUANT
    pieces = load_pieces(source, first, COUNT, L, G)
    for j in gl.static_range(COUNT):
        value, q = pieces[j], first + j
        if QUANT is not None:
            value = value.to(gl.float32)
            if G.SCALE_COLS is not None:
                most = gl.max(magnitude(value), 1)
                scale = scale_of(most.to(gl.float32, bitcast=True), QUANT)
                vectors.scales.index(q).store(scale)
            value = encode(divide(value, scale[:, None], QUANT), QUANT).to(vectors.data.dtype)
        vectors.data.index(q).store(value)


@gluon.jit
def put_nothing(q, vectors, L: gl.constexpr, G: gl.constexpr):
    """Store a piece of zeros, with scales of 1."""
    zeros = gl.full([G.COLUMNS, G.BLOCK_K], 0, vectors.data.dtype, L)
    vectors.data.index(q).store(zeros)
    if G.QUANT is not None and G.SCALE_COLS is not None:
        vectors.scales.index(q).store(gl.full([G.COLUMNS], 1, gl.float32, gl.SliceLayout(1, L)))


@gluon.jit
def put_vectors(source, static_scale, vectors, G: gl.constexpr):
    """Store the vectors as the second operand of a GEMM, quantized if G.QUANT."""
    L: gl.constexpr = gl.BlockedLayout([1, G.BLOCK_K // 16], [2, 16], [4, 1], [1, 0])
    QUANT: gl.constexpr = G.QUANT
    scale = static_scale
    if QUANT is None and G.ITEMSIZE == 1:
        put_stored_scales(static_scale, vectors, L, G)
    elif QUANT is not None and G.SCALE_COLS is None:
        scale = scales_of_vectors(source, L, G)
        vectors.scales.index(0).store(scale)
    for i in range(G.PAIRED // G.BATCH):
        put_pieces(source, scale, i * G.BATCH, vectors, G.BATCH, L, G)
    if G.PAIRED < G.STEPS * PIECES:
        put_pieces(source, scale, G.PAIRED, vectors, 1, L, G)
        put_nothing(G.PAIRED + 1, vectors, L, G)
    fence_async_shared()
    wait_for_group()


@gluon.jit
def of_chunk(c, L: gl.constexpr, G: gl.constexpr):
    """Mask of the columns that hold chunk c."""
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, L))
    return (column // G.VECTORS == c)[None, :]
