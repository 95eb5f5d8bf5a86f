"""``python -m moe_ops tune``: the search for tiles, and the files that it writes.

Not imported by the package: nothing tunes on the hot path.
"""
