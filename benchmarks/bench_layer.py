"""Time the whole layer: ``python -m moe_ops bench``, for a checkout that is not installed."""

import sys

from moe_ops.bench.layer import main

if __name__ == "__main__":
    sys.exit(main())
