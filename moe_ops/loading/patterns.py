"""Names of experts in the lists of quantization tools: targets, ignored modules, overrides.

Tools write the names of modules: of an experts module (``model.layers.3.mlp.experts``), of one
projection (``model.layers.3.mlp.experts.0.gate_proj``), or of a part of the model around them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from moe_ops.loading.facts import UnreadError

Match = Callable[[str], bool]
ROOTS = (
    "", "model.", "language_model.model.", "model.language_model.", "thinker.model.", "backbone.",
)  # fmt: skip
"""What stands before ``layers.3`` in the names of a model, with or without other parts."""
BLOCKS = ("mlp.", "block_sparse_moe.", "feed_forward.", "ffn.", "mixer.", "moe.", "")
"""What stands between ``layers.3.`` and ``experts`` in the names of known models."""
SPELLINGS = ((("up_proj", "down_proj"), "gate_proj"), (("w1", "w2"), "w3"))
"""Names of the projections of an expert: those that all experts have, and one that some have."""
FUSED = ("gate_up_proj", "down_proj")


class ExpertNames(NamedTuple):
    """What tools may call the experts of one layer."""

    modules: tuple[str, ...]
    """Names that the experts module may have."""
    num_experts: int

    @classmethod
    def under(cls, prefix: str, num_experts: int) -> ExpertNames:
        """The experts under the prefix of a checkpoint's tensors, with ``experts`` or not."""
        prefix = prefix.removesuffix(".")
        if prefix.rpartition(".")[2] != "experts":
            prefix += ".experts" if prefix else "experts"
        return cls((prefix,), num_experts)

    @classmethod
    def of_layer(cls, index: int, num_experts: int) -> ExpertNames:
        """The experts of a decoder layer, by the names that known models have for it."""
        modules = tuple(f"model.layers.{index}.{block}experts" for block in BLOCKS)
        return cls(modules, num_experts)

    def are_matched(self, match: Match) -> bool:
        """Whether all projections of these experts are matched.

        Raises:
            UnreadError: some of the projections are matched, and others are not.
        """
        shares = [_share(match, module, {0, self.num_experts - 1}) for module in self.modules]
        if True in shares:
            return True
        if None in shares:
            raise UnreadError("the same for all projections of the experts")
        return False


def _share(match: Match, module: str, experts: Iterable[int]) -> bool | None:
    """Whether all projections of a module are matched; None: some of them are."""
    if match(module):
        return True
    matches = [match(f"{module}.{name}") for name in FUSED]
    if all(matches):
        return True
    for needed, gate in SPELLINGS:
        each = [match(f"{module}.{e}.{name}") for e in experts for name in needed]
        if all(each):
            return True
        matches += each + [match(f"{module}.{e}.{gate}") for e in experts]
    return None if any(matches) else False


def strings(listed: Any) -> tuple[str, ...]:
    """Return the names in a list, or in lists of lists; a string is a list with commas."""
    if listed is None:
        return ()
    if isinstance(listed, str):
        return tuple(part.strip() for part in listed.split(","))
    if not isinstance(listed, (list, tuple)):
        raise UnreadError("lists of modules as lists of names")
    return tuple(
        name for part in listed for name in ((part,) if isinstance(part, str) else strings(part))
    )


@lru_cache(maxsize=64)
def exact(listed: tuple[str, ...]) -> Match:
    """Match as compressed-tensors does: whole names, and ``re:`` with a regular expression."""
    names = {_bare(name) for name in listed}
    like = _regexes([name.removeprefix("re:") for name in listed if name.startswith("re:")])
    return lambda name: _bare(name) in names or like(name)


@lru_cache(maxsize=64)
def parts(listed: tuple[str, ...]) -> Match:
    """Match as tools with lists of modules to leave out do: a name stands for all inside it.

    ``mlp.experts`` and ``model.layers.3`` match what has these parts, ``gate`` does not match
    ``gate_proj``. Names may be globs, regular expressions (as transformers takes them), or begin
    with ``re:``.
    """
    names, globs, regexes = set(), [], []
    for name in listed:
        if name.startswith("re:"):
            regexes.append(name.removeprefix("re:"))
        elif re.search(r"[\\^$()|+]", name):
            regexes.append(name)
        elif re.search(r"[*?\[]", name):
            globs += [_bare(name), _bare(name) + ".*"]
        else:
            names.add(_bare(name).strip("."))
    like, whole = _regexes(regexes), re.compile("|".join(map(fnmatch.translate, globs)) or "(?!)")

    def matches(name: str) -> bool:
        bare = _bare(name)
        return not names.isdisjoint(_runs(bare)) or bool(whole.match(bare)) or like(name)

    return matches


def _regexes(patterns: list[str]) -> Match:
    """Match names that begin as one of some regular expressions says, under any of `ROOTS`."""
    if not patterns:
        return lambda name: False
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise UnreadError(f"names as regular expressions ({error})") from None
    if all(not one.groups and one.flags == re.UNICODE for one in compiled):  # one search is faster
        compiled = [re.compile("|".join(f"(?:{pattern})" for pattern in patterns))]

    def matches(name: str) -> bool:
        names = {name, *(root + _bare(name) for root in ROOTS)}
        return any(one.match(each) for one in compiled for each in names)

    return matches


def _bare(name: str) -> str:
    """Return a name without `ROOTS`, of which tools and checkpoints may have different ones."""
    return re.sub(r"^(?:(?:model|language_model|thinker|backbone)\.)+", "", name)


def _runs(name: str) -> Iterable[str]:
    """Return all runs of consecutive parts of a name."""
    of = name.split(".")
    return (".".join(of[start:end]) for start, end in combinations(range(len(of) + 1), 2))
