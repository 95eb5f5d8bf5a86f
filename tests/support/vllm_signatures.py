"""Signatures of what the plug-in uses of vLLM, read from vLLM's sources without importing it.

    python tests/support/vllm_signatures.py FOLDER 0.33.0

FOLDER holds the package ``vllm``, for example an unpacked wheel. The result is written to
`vllm_signatures.json` under the version, beside those of other versions. Tests compare the plug-in
and the stand-ins with the two newest ones.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
LAYERS = "vllm.model_executor.layers.fused_moe"
CLASSES = {
    f"{LAYERS}.config": ("FusedMoEConfig", "FusedMoEQuantConfig", "FusedMoEParallelConfig"),
    f"{LAYERS}.modular_kernel": ("ExpertTokensMetadata",),
    f"{LAYERS}.experts.lora_context": ("MoELoRAContext",),
    "vllm.config.lora": ("LoRAConfig",),
    "vllm.lora.ops.triton_ops.lora_kernel_metadata": ("LoRAKernelMeta",),
    f"{LAYERS}.oracle.unquantized": ("UnquantizedMoeBackend",),
    f"{LAYERS}.oracle.fp8": ("Fp8MoeBackend",),
    f"{LAYERS}.oracle.int8": ("Int8MoeBackend",),
    f"{LAYERS}.oracle.int_wna16": ("WNA16MoEBackend",),
    f"{LAYERS}.oracle.w4a8": ("W4A8MoeBackend",),
    f"{LAYERS}.oracle.nvfp4": ("NvFp4MoeBackend",),
    f"{LAYERS}.oracle.mxfp4": ("Mxfp4MoeBackend",),
    "vllm.model_executor.layers.quantization.utils.quant_utils": ("QuantKey", "ScaleDesc"),
}
"""Classes whose fields, properties and members are recorded."""
FUNCTIONS = (
    "vllm.model_executor.utils.replace_parameter",
    "vllm.model_executor.warmup.kernel_warmup.kernel_warmup",
)
"""Functions that are recorded beside those of the plug-in's tables."""
ELSEWHERE = {"vllm.platforms.current_platform": "vllm.platforms.interface.Platform"}
"""Names that vLLM makes when they are asked for, and the class of what they are."""


@functools.cache
def record() -> dict[str, dict[str, list[str]]]:
    """Dotted names with their parameters, or the names of their members, by version.

    A parameter with a default ends in ``=``. Names that are neither have an empty list.
    """
    return json.loads(RECORD.read_text())


class Sources:
    """The modules of a folder with vLLM's sources."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @functools.cache  # noqa: B019 - one folder per process
    def body(self, module: str) -> list[ast.stmt]:
        """Return the statements of a module, with those below ``if TYPE_CHECKING``."""
        path = self.folder.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        body = ast.parse(path.read_text()).body if path.exists() else []
        return body + [x for node in body if isinstance(node, ast.If) for x in node.body]

    def find(self, module: str, name: str) -> list[str] | None:
        """Return what `record` holds of a name, or None if there is no such name."""
        first, _, rest = name.partition(".")
        if f"{module}.{first}" in ELSEWHERE:
            module, _, first = ELSEWHERE[f"{module}.{first}"].rpartition(".")
        node = next((x for x in self.body(module) if first in defined(x)), None)
        if rest and isinstance(node, ast.ClassDef):
            return self.member(module, node, rest)
        if node is None or rest:
            return None
        return parameters(node) if isinstance(node, ast.FunctionDef) else []

    def member(self, module: str, owner: ast.ClassDef, name: str) -> list[str] | None:
        """Return what `record` holds of a member of a class or of its bases in the same module."""
        for node in owner.body:
            if name in defined(node):
                return parameters(node) if isinstance(node, ast.FunctionDef) else []
        for base in owner.bases:
            outer = next((x for x in self.body(module) if ast.unparse(base) in defined(x)), None)
            if isinstance(outer, ast.ClassDef):
                return self.member(module, outer, name)
        return None

    def members(self, module: str, name: str) -> list[str]:
        """Return the fields, properties and members of a class."""
        owner = next(x for x in self.body(module) if name in defined(x))
        assert isinstance(owner, ast.ClassDef)
        return sorted({member for node in owner.body for member in defined(node)})


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of parameters; one with a default ends in ``=``."""
    positional = [*node.args.posonlyargs, *node.args.args]
    first = len(positional) - len(node.args.defaults)
    plain = [x.arg + "=" * (i >= first) for i, x in enumerate(positional)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return plain + [x.arg + "=" * (default is not None) for x, default in pairs]


def wanted() -> list[tuple[str, str]]:
    """Return modules and names that the plug-in uses."""
    from moe_ops.integrations.vllm import _interface as interface

    names = [(module, name) for module, some in interface.NAMES.items() for name in some]
    names += [(module, name) for module, some in interface.PARAMETERS.items() for name in some]
    functions = [*interface.MAKERS, *FUNCTIONS]
    functions += [name for some in interface.FORMATS.values() for name in some]
    return names + [interface.split_name(name) for name in functions]


def main() -> None:
    """Read a folder, and write the record."""
    folder, version = sys.argv[1:]
    sources = Sources(folder)
    found = {f"{module}.{name}": sources.find(module, name) for module, name in wanted()}
    for module, names in CLASSES.items():
        found |= {f"{module}.{name}": sources.members(module, name) for name in names}
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known[version] = {name: value for name, value in sorted(found.items()) if value is not None}
    newest = sorted(known, key=lambda name: [int(x) for x in name.split(".")])[-2:]
    kept = {name: known[name] for name in newest}
    rows = [
        f'"{name}": {{\n'
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in of_it.items())
        + "\n}"
        for name, of_it in kept.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
