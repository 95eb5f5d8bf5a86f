"""Run the demo: ``python -m moe_ops demo``."""

import sys

from moe_ops.demo.comparison import main

if __name__ == "__main__":
    sys.exit(main())
