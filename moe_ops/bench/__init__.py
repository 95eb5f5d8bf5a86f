"""The sizes of models by name, and the benchmark of whole layers.

``python -m moe_ops bench | explain | tune`` need them wherever the package is installed, and so do
the scripts in ``benchmarks/`` of the repository. The package itself imports none of them.
"""
