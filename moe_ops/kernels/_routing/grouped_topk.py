"""Grouped top-k: a program chooses the best groups, then the best experts in them.

The fast path uses approximate float32 scores, as `choice` does. The layout of the keys is
``(lanes, tokens, parts, n)``. The positions of a group, padded to WIDTH, lie in neighbouring lanes,
and no lane holds two groups. Once the groups are chosen, their experts are redistributed over all
lanes (PARTS lanes share what one lane held), so that top-k looks at the chosen groups only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels._routing.choice import chosen_of, in_falling_order, one_a_thread, sort_key
from moe_ops.kernels._routing.lanes import lanes_of, largest, load_lanes, of_tokens
from moe_ops.kernels._routing.near import exceeds, near_choice
from moe_ops.kernels._routing.scores import (
    LOWEST,
    best_positions,
    biased,
    chosen_weights,
    is_finite,
    key_number,
    ordered,
    scores,
    scores_and_choice,
    signed_key,
    store_routing,
)
from moe_ops.kernels._runtime.dependent import take_turn

NOBODY = tl.constexpr(-0x7F800001)
"""The sort key of -inf."""


@triton.constexpr_function
def _lanes(groups, width):
    return max(lanes_of(groups * width), groups)


@triton.constexpr_function
def _parts(groups, topk_group, each):
    """Number of lanes that share the ``each`` experts of one lane of a chosen group."""
    return min(groups >> (topk_group - 1).bit_length(), each)


@triton.constexpr_function
def _levels(count):
    return count.bit_length() - 1


@triton.jit
def _two_largest(a, a_second, b, b_second):
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(a_second, b_second))


@triton.jit
def _best_of_groups(key, GROUPS: tl.constexpr):
    """The two largest keys of the group that each lane belongs to, both ``(lanes, tokens)``."""
    LANES: tl.constexpr = key.shape[0]
    none = tl.full(key.shape, -0x80000000, dtype=tl.int32)
    first, second = tl.reduce((key, none), 3, _two_largest)
    first, second = tl.reduce((first, second), 2, _two_largest)
    for level in tl.static_range(_levels(LANES // GROUPS)):
        other = tl.broadcast_to((tl.arange(0, LANES) ^ (1 << level))[:, None], first.shape)
        first, second = _two_largest(
            first, second, tl.gather(first, other, 0), tl.gather(second, other, 0)
        )
    return first, second


@triton.jit
def _choose_groups(
    key, place, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr, GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
):  # fmt: skip
    """The chosen group at the place of each lane, and whether approximate scores decide it surely.

    A group's score is its largest choice, or with BEST = 2 the sum of its two largest. The error of
    a sum is the sum of both errors plus a rounding, which is small relative to the sum unless the
    two terms nearly cancel; such a sum is doubtful. So is a score from 2**126 on, which stands for
    a score without an approximation: see `_choose_nearly`.
    """
    LANES: tl.constexpr = key.shape[0]
    first, second = _best_of_groups(key, GROUPS)
    score = key_number(first)
    doubtful = score >= 2.0**126
    if BEST == 2:
        spread = score - key_number(second)
        score = score + key_number(second)
        doubtful = doubtful | (spread > 2 * tl.abs(score) + 2.0)
    group = (tl.arange(0, LANES) // (LANES // GROUPS))[:, None]
    score = tl.maximum(score, LOWEST)  # padding groups as well: they lose ties by position
    keys = sort_key(signed_key(score), group, GROUPS)
    chosen, last, left = largest(keys[:, :, None, None], place, TOPK_GROUP)
    least, bound = key_number(last & -GROUPS), key_number(left | (GROUPS - 1))
    sure = exceeds(least, bound, SCORING, BEST)[None, :] & (doubtful == 0)
    return GROUPS - 1 - (chosen & (GROUPS - 1)), sure


@triton.jit
def _deal(keys, group, place, TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Redistribute the keys of the chosen groups over all lanes, ``(lanes, tokens, 1, n)``."""
    LANES: tl.constexpr = keys.shape[0]
    PARTS: tl.constexpr = keys.shape[2]
    OWN: tl.constexpr = LANES // GROUPS
    lane = tl.arange(0, LANES)[:, None]
    source = (group * OWN + lane % (OWN * PARTS) // PARTS)[:, :, None, None]
    dealt = tl.gather(keys, tl.broadcast_to(source, keys.shape), 0)
    own_part = tl.arange(0, PARTS)[None, None, :, None] == (lane % PARTS)[:, :, None, None]
    dealt = tl.max(tl.where(own_part, dealt, NOBODY), 2)
    return tl.where((place < TOPK_GROUP)[:, :, None], dealt, NOBODY)[:, :, None, :]


@triton.jit
def _choose_nearly(
    rows, bias, slot, TOPK: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BEST: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Top-k by approximate scores in the best groups by approximate scores.

    Returns:
        The experts; a bound for the approximate sums left in these groups; whether these groups are
        surely the best, ``(lanes, tokens)``.
    """
    LANES: tl.constexpr = _lanes(GROUPS, WIDTH)
    OWN: tl.constexpr = LANES // GROUPS
    PARTS: tl.constexpr = _parts(GROUPS, TOPK_GROUP, GROUPS * WIDTH // LANES)
    N: tl.constexpr = WIDTH // (OWN * PARTS)
    lane = tl.arange(0, LANES)[:, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None]
    group = lane // OWN
    member = (part * OWN + lane % OWN) * N + tl.arange(0, N)[None, None, None, :]
    expert, valid = group * GROUP_SIZE + member, (group < NUM_GROUPS) & (member < GROUP_SIZE)
    if NUM_GROUPS == GROUPS and GROUP_SIZE == WIDTH:
        logits = load_lanes(of_tokens(rows) + expert).to(tl.float32)
    else:
        logits = load_lanes(of_tokens(rows) + expert, valid, 0.0).to(tl.float32)
    choice = near_choice(logits, bias, expert, valid, SCORING)
    if SCORING == "sqrtsoftplus":  # no approximation above 64: marked by a value above any score
        choice = tl.where(logits > 64.0, -LOWEST, choice)
    key = signed_key(choice)
    place = tl.zeros((1, rows.shape[0]), dtype=tl.int32) + tl.arange(0, LANES)[:, None]
    place = place // (OWN * PARTS)
    own_group, sure = _choose_groups(key, place, TOPK_GROUP, BEST, GROUPS, SCORING)
    keys = sort_key(key, group * WIDTH + member, GROUPS * WIDTH)
    dealt = _deal(keys, own_group, place, TOPK_GROUP, GROUPS)
    chosen, _, left = chosen_of(dealt, slot, TOPK, GROUPS * WIDTH, False)
    ids = chosen // WIDTH * GROUP_SIZE + chosen % WIDTH
    return ids, key_number(left | (GROUPS * WIDTH - 1))[:, None, None], sure


@triton.jit
def _route_nearly(
    gating_output, bias, topk_weights, topk_ids, first_token, num_tokens, stride_row,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BEST: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Route TOKENS tokens by approximate scores; return 0 and write nothing if these are unsure."""
    token, slot = first_token + tl.arange(0, TOKENS)[:, None], tl.arange(0, SLOTS)[None, :]
    rows = gating_output + tl.minimum(token, num_tokens - 1) * stride_row
    real = one_a_thread(slot < tl.where(token < num_tokens, TOPK, 0))
    place = one_a_thread(tl.zeros((TOKENS, 1), dtype=tl.int32) + slot)
    ids, bound, groups_sure = _choose_nearly(
        rows, bias, place, TOPK, SCORING, NUM_GROUPS, GROUP_SIZE, TOPK_GROUP, BEST, GROUPS, WIDTH
    )
    picked = tl.load(rows[:, None] + ids, mask=real, other=0.0).to(tl.float32)
    weights = scores(picked, real & is_finite(picked), 0.0, 0.0, SCORING)
    rank = tl.where(real, biased(weights, bias, ids, real), float("-inf"))
    sure = exceeds(rank, bound, SCORING, 1) & in_falling_order(rank, ids)
    sure = tl.min(tl.where(real, sure.to(tl.int32), 1)) & tl.min(groups_sure.to(tl.int32))
    at = one_a_thread(token * TOPK + slot)
    store_routing(topk_weights, topk_ids, at, real & (sure > 0), weights, ids, RENORMALIZE, SCALE)
    return sure


@triton.jit
def _in_best_groups(
    choice, NUM_GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, BEST: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``choice`` with -inf outside of the TOPK_GROUP best groups.

    The score of a group is the sum of its BEST (one or two) largest choices.
    """
    members = tl.reshape(choice, (GROUPS, WIDTH))
    group_score = tl.max(members, 1)
    if BEST == 2:
        first = tl.argmax(members, 1, tie_break_left=True)
        others = tl.where(tl.arange(0, WIDTH)[None, :] == first[:, None], float("-inf"), members)
        group_score = group_score + tl.max(others, 1)
    group = tl.arange(0, GROUPS)
    group_score = tl.where(group < NUM_GROUPS, tl.maximum(group_score, LOWEST), float("-inf"))
    # No reshape back: Triton 3.6 reorders a reshaped tensor that only an argmax reads.
    own_group = tl.arange(0, GROUPS * WIDTH) // WIDTH
    kept = tl.zeros((GROUPS * WIDTH,), dtype=tl.int32)
    for _ in range(TOPK_GROUP):
        best = tl.argmax(group_score, 0, tie_break_left=True)
        kept = tl.where(own_group == best, 1, kept)
        group_score = tl.where(group == best, float("-inf"), group_score)
    return tl.where(kept > 0, choice, float("-inf"))


@triton.jit
def _route_exactly(
    gating_output, bias, topk_weights, topk_ids, token, stride_row,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BEST: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Route one token by the exact scores of all experts."""
    position = tl.arange(0, GROUPS * WIDTH)
    group, member = position // WIDTH, position % WIDTH
    valid = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    row = gating_output + token * stride_row
    expert = group * GROUP_SIZE + member
    logits = tl.load(row + expert, mask=valid, other=0.0).to(tl.float32)
    choice, peak, inverse = scores_and_choice(logits, bias, expert, valid, SCORING)
    choice = _in_best_groups(choice, NUM_GROUPS, TOPK_GROUP, BEST, GROUPS, WIDTH)
    key = ordered(choice[None, :], bias is not None)
    chosen = best_positions(key, TOPK, GROUPS * WIDTH, SLOTS)
    ids = chosen // WIDTH * GROUP_SIZE + chosen % WIDTH
    slot = tl.arange(0, SLOTS)[None, :]
    weights = chosen_weights(row, ids, slot < TOPK, peak, inverse, SCORING)
    at = token * TOPK + slot
    store_routing(topk_weights, topk_ids, at, slot < TOPK, weights, ids, RENORMALIZE, SCALE)


@triton.jit(do_not_specialize=["num_tokens"])
def grouped_topk_kernel(
    gating_output, bias, topk_weights, topk_ids, num_tokens, stride_row,
    SCALE: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BEST: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program routes TOKENS tokens, all of them exactly if approximate scores are unsure."""
    take_turn()
    first = tl.program_id(0).to(tl.int64) * TOKENS
    sure = 0
    if SCORING != "softmax":
        sure = _route_nearly(
            gating_output, bias, topk_weights, topk_ids, first, num_tokens, stride_row,
            SCALE, TOPK, RENORMALIZE, SCORING,
            NUM_GROUPS, GROUP_SIZE, TOPK_GROUP, BEST, GROUPS, WIDTH, SLOTS, TOKENS,
        )  # fmt: skip
    if sure == 0:
        for t in range(TOKENS):
            token = tl.minimum(first + t, num_tokens - 1)
            _route_exactly(
                gating_output, bias, topk_weights, topk_ids, token, stride_row,
                SCALE, TOPK, RENORMALIZE, SCORING,
                NUM_GROUPS, GROUP_SIZE, TOPK_GROUP, BEST, GROUPS, WIDTH, SLOTS,
            )  # fmt: skip
