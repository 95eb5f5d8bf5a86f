"""Named model sizes, and the benchmark of whole layers.

Used by ``python -m moe_ops bench | explain | tune`` and by the scripts in ``benchmarks/`` of the
repository. The rest of the package does not import these modules.
"""
