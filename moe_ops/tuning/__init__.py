"""``python -m moe_ops tune``: the search for tiles, and the files that it writes.

Only commands and benchmarks import these modules: nothing is tuned during calls.
"""
