"""The demo: a small Qwen3-MoE language model, and the command that runs it.

``python -m moe_ops demo`` runs `moe_ops.demo.__main__`, which needs the package `transformers`.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""Folder of the model: checkpoint, tokenizer, and ``heldout.txt``, a text it was not trained on."""
