"""Alignment by a loop over slots."""

import torch


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def looped(ids, block, num_experts, expert_map=None, ignore=False):
    """The plan, one slot after another."""
    groups = {e: [] for e in range(num_experts)}
    for slot, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < (num_experts if expert_map is None else len(expert_map)):
            continue
        if expert_map is not None and ignore:
            expert = expert_map[expert]
        if expert >= 0:
            groups[expert].append(slot)
    numel = ids.numel()
    length = min(numel * block, numel + num_experts * (block - 1))
    rows, experts = [], []
    for expert, slots in groups.items():
        tiles = cdiv(len(slots), block)
        rows += slots + [numel] * (tiles * block - len(slots))
        name = expert if expert_map is None or ignore else expert_map[expert]
        experts += [name] * tiles
    used = len(rows)
    rows += [numel] * (length - used)
    experts += [-1] * (cdiv(length, block) - len(experts))
    return rows, experts, [used]


def assert_plan(plan, expected):
    for actual, wanted in zip(plan, expected, strict=True):
        assert actual.dtype == torch.int32 and actual.is_contiguous()
        assert actual.tolist() == wanted
