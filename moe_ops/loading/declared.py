"""What the files in a checkpoint's folder say about its quantized experts.

Some formats have tensors of the same names, shapes and dtypes, such as both 6-bit floats of MX, or
both versions of GPTQ's zero points; the files tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_ops.loading.facts import Facts, UnreadError, with_known
from moe_ops.loading.files import read_object
from moe_ops.loading.names import CheckpointLayout
from moe_ops.loading.patterns import ExpertNames
from moe_ops.loading.tools import read_settings, with_expert_dtype
from moe_ops.scheme import Quant

CONFIG = "config.json"
TOOLS_OWN = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quantization_config.json": "auto-round",
}
"""Files of tools beside ``config.json``, and the tool if the file does not name it."""
NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "ffn_config")
"""Parts of a configuration that may describe the experts; a later part may lie inside an earlier
one."""
KEYS = ("quantization_config", "compression_config")
OWN = "moe_ops"
"""The entry with the scheme of each experts module that `moe_ops.quantize_` quantized, and its
``quant_method`` where the words of compressed-tensors do not express the schemes."""


class Statement(NamedTuple):
    """What one file says."""

    file: Path
    method: Any
    """The tool."""
    config: Any

    def of(self, names: ExpertNames) -> Facts | None:
        """Return what is said about some experts; raises as `read_settings`."""
        try:
            return read_settings(self.method, self.config, names)
        except UnreadError as error:
            rule = f"{self.file} must say {error}, got {self.config!r:.300}"
            raise UnreadError(rule, error.layout) from None
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None


@dataclass(frozen=True)
class Declared:
    """What all files of a model say."""

    statements: tuple[Statement, ...] = ()
    expert_dtype: tuple[Path, Any] | None = None
    """The file and the value, if the dtype of the experts is said on its own."""

    @property
    def files(self) -> str:
        """The names of the files, for messages."""
        files = [statement.file for statement in self.statements]
        files += [self.expert_dtype[0]] if self.expert_dtype else []
        return " and ".join(dict.fromkeys(map(str, files)))

    def of(self, names: ExpertNames) -> Facts | None:
        """Return how some experts are stored; None: no file says anything.

        Raises:
            UnreadError: a file says something that is not understood.
            ValueError: files contradict each other; words of integers in an unknown order.
        """
        facts = None
        for statement in self.statements:
            stated = statement.of(names)
            if stated is None or facts is None:
                facts = facts or stated
                continue
            try:
                facts = facts.merged(stated)
            except ValueError as error:
                raise ValueError(
                    f"{self.files} must say the same about {names.modules[0]}, got {error}"
                ) from None
        if self.expert_dtype is None:
            return facts
        file, dtype = self.expert_dtype
        try:
            return with_expert_dtype(facts, dtype)
        except UnreadError as error:
            raise UnreadError(f"{file} must say {error}") from None


def in_folder(folder: Path) -> Declared:
    """Read the files in a folder, none of which must exist.

    Raises:
        ValueError: a file that is not a JSON object.
    """
    config = folder / CONFIG
    declared = Declared()
    if config.exists():
        declared = in_config(read_object(config, "a model's configuration"), config)
    own = []
    for name, tool in TOOLS_OWN.items():
        file = folder / name
        if file.exists():
            entries = read_object(file, "a quantization tool's configuration")
            own.append(Statement(file, entries.get("quant_method", tool), entries))
    return Declared(declared.statements + tuple(own), declared.expert_dtype)


def in_config(config: Mapping[str, Any], file: Path) -> Declared:
    """Read a model's configuration.

    Args:
        config: the configuration.
        file: where it was, for messages.
    """
    statements, dtype = [], None
    for part in config_parts(config):
        dtype = part.get("expert_dtype", dtype)
        key = next((key for key in KEYS if part.get(key) is not None), None)
        if key is None:
            continue
        entry, method = part[key], None
        if isinstance(entry, Mapping):
            method, dtype = entry.get("quant_method"), entry.get("expert_dtype", dtype)
            if method == OWN or (method == "compressed-tensors" and OWN in config):
                method, entry = OWN, config.get(OWN)  # it is exact; those words need not be
        statements.append(Statement(file, method, entry))
    return Declared(tuple(statements), None if dtype is None else (file, dtype))


def config_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and the parts of it that may describe the experts."""
    yield config
    for name in NESTED:
        if isinstance(config.get(name), Mapping):
            yield from config_parts(config[name])


def layout_of(
    folder: Path | None,
    names: ExpertNames,
    quant: Quant | None,
    layout: CheckpointLayout,
    *,
    quantize: bool,
) -> CheckpointLayout:
    """Compare a layer with the files in a checkpoint's folder; return the layout of its tensors.

    Args:
        folder: the folder, if there is one.
        names: the names of the layer's experts in the checkpoint.
        quant: how the layer's scheme quantizes weights.
        layout: the layout that the caller gave.
        quantize: whether the weights are plain, to be quantized to the scheme.

    Returns:
        The layout, with what the files say about it.

    Raises:
        ValueError: the files say other weights or another layout, contradict each other, or are not
            JSON objects. What is not understood raises nothing: the tensors decide.
    """
    if folder is None:
        return layout
    declared = in_folder(folder)
    try:
        facts = declared.of(names)
    except UnreadError as error:
        return _checked_layout(error.layout, layout, declared) if error.layout else layout
    if facts is None:
        return layout
    if not facts.fits(None if quantize else quant):
        got = "no scheme" if quant is None else f"weights {quant.key}"
        if facts.weight is None:
            got += ": pass quantize=True to quantize them"
        elif quant is None or quantize:
            got += f"{' and quantize=True' * quantize}: correct the file if it is out of date"
        text = f"{declared.files} says, {facts}, got {got}"
        raise ValueError(f"quant_config must be a scheme with weights as {text}")
    return _checked_layout(facts.layout, layout, declared)


def _checked_layout(
    stated: CheckpointLayout | None, layout: CheckpointLayout, declared: Declared
) -> CheckpointLayout:
    try:
        return with_known(stated, layout)
    except ValueError as error:
        raise ValueError(f"layout must have, as {declared.files} says, {error}") from None
