"""A layer and its twin whose experts are in host memory: whatever happens, results are equal."""

import copy
import io

import torch
from conftest import HAS_CUDA
from graphs import capture
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from legs import ON_HOPPER
from packed_weights import ALL_PACKABLE
from quantized_layers import WIDE, quantized

import moe_ops
from moe_ops.layer.moving import offload
from moe_ops.scheme import SCHEMES

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
SHARES = st.floats(0, 1)
"""How many experts from ``top_k`` to E - 1 are on the device."""
SEEDS = st.integers(0, 2**16)
SIZES = [(3, 1), (9, 4), (33, 2)] if HAS_CUDA else [(3, 1), (9, 4)]
"""E and ``top_k``: with and without a plan for one token's slots."""
TOKENS = st.sampled_from([0, 1, 2, 3, 17, 65, 300] if HAS_CUDA else [0, 1, 2, 3, 17])


class Twins(RuleBasedStateMachine):
    """Two layers with the same weights, and calls that must give the same bits."""

    @initialize(
        scheme=st.sampled_from([*SCHEMES]),
        sizes=st.sampled_from(SIZES),
        is_packed=st.booleans(),
        has_bias=st.booleans(),
        share=SHARES,
        on_cpu=st.booleans(),
    )
    def make(self, scheme, sizes, is_packed, has_bias, share, on_cpu):
        self.experts, self.top_k = sizes
        reads_packed = ON_HOPPER or not HAS_CUDA
        form = "packed" if is_packed and reads_packed and scheme in ALL_PACKABLE else "plain"
        self.layer = quantized(scheme, *sizes, form=form, has_bias=has_bias)
        self.other = copy.deepcopy(self.layer)
        self.layer.to(DEVICE)
        if on_cpu:
            offload(self.other, self.resident(share), DEVICE)
        else:
            self.other.to(DEVICE)
            self.offloaded(share)

    def resident(self, share):
        return self.top_k + round(share * (self.experts - 1 - self.top_k))

    def tokens(self, count, seed):
        """Tokens, logits, and ids of which some belong to no expert."""
        g = torch.Generator().manual_seed(seed)
        x, logits = (torch.randn(count, n, generator=g) for n in (WIDE, self.experts))
        some = torch.randint(1, self.experts + 1, (1,), generator=g).item()
        ids = torch.randint(-1, some + 1, (count, self.top_k), generator=g)
        return x.to(DEVICE, torch.bfloat16), logits.to(DEVICE), ids.to(DEVICE)

    @rule(count=TOKENS, seed=SEEDS, is_routed=st.booleans())
    @torch.no_grad()
    def called(self, count, seed, is_routed):
        x, logits, ids = self.tokens(count, seed)
        ids = {"topk_ids": ids} if is_routed else {}
        assert torch.equal(self.other(x, logits, **ids), self.layer(x, logits, **ids))

    @precondition(lambda _: HAS_CUDA)
    @rule(count=st.sampled_from([1, 3, 65]), seed=SEEDS)
    @torch.no_grad()
    def replayed(self, count, seed):
        buffers = self.tokens(count, seed)
        self.other(buffers[0], buffers[1], topk_ids=buffers[2])
        torch.cuda.synchronize()
        graph, out = capture(lambda x, logits, ids: self.other(x, logits, topk_ids=ids), *buffers)
        for later in range(seed, seed + 3):
            for buffer, x in zip(buffers, self.tokens(count, later), strict=True):
                buffer.copy_(x)
            graph.replay()
            x, logits, ids = buffers
            assert torch.equal(out, self.layer(x, logits, topk_ids=ids))

    @rule(share=SHARES)
    def offloaded(self, share):
        moe_ops.offload_(self.other, resident=self.resident(share), progress=False)

    @rule()
    def brought_back(self):
        moe_ops.offload_(self.other, resident=1.0, progress=False)

    @rule(name=st.sampled_from(["pack_", "unpack_"]))
    def converted(self, name):
        """Both layers are, or both raise the same error."""
        texts = []
        for layer in (self.layer, self.other):
            try:
                getattr(layer, name)()
                texts.append("")
            except (ValueError, NotImplementedError) as error:
                texts.append(str(error))
        assert texts[0] == texts[1]

    @rule(seed=SEEDS)
    @torch.no_grad()
    def written(self, seed):
        """The scales or weights of an expert change."""
        number = seed % self.experts
        for layer in (self.layer, self.other):
            for p in layer.parameters():
                if p.is_floating_point() and p.itemsize > 1 and len(p) == self.experts:
                    p[number] *= 0.5
            layer.renew_slots()

    @rule()
    def loaded(self):
        self.other.load_state_dict(
            {name: x.to("cpu", copy=True) for name, x in self.layer.state_dict().items()}
        )

    @rule(is_pickled=st.booleans())
    def copied(self, is_pickled):
        if not is_pickled:
            self.other = copy.deepcopy(self.other)
            return
        file = io.BytesIO()
        torch.save(self.other, file)
        file.seek(0)
        self.other = torch.load(file, weights_only=False)

    @rule()
    def moved(self):
        self.other.to("cpu")
        self.other.to(DEVICE)

    @invariant()
    def is_the_same(self):
        """After each step, also in names, shapes and dtypes."""
        if hasattr(self, "layer"):
            self.called(5, 0, is_routed=False)
            own, others = self.layer.state_dict(), self.other.state_dict()
            assert [*own] == [*others]
            for name, x in own.items():
                assert x.dtype == others[name].dtype and x.shape == others[name].shape, name


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=15)
