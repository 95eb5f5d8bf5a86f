"""Time the whole layer as ``moe-ops bench`` does, beside other implementations (`peers`)."""

import sys

import peers  # noqa: F401  (adds them)

from moe_ops.bench.layer import main

if __name__ == "__main__":
    sys.exit(main())
