"""Expert GEMM kernels for Hopper (Gluon), and their launchers."""
