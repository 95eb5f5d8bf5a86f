"""``python -m moe_ops``."""

import sys

from moe_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
