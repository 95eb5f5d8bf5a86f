"""Which kernel computes an expert GEMM, and with which tiles: host arithmetic on sizes."""
