"""``python -m moe_ops tune``: the search for tiles, and the files that it writes.

The rest of the package does not import these modules: nothing is tuned during calls.
"""
