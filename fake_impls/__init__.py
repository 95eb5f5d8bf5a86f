"""FakeTensor functions of the operators: one file per stage, one function per operator.

Each checks sizes and returns empty outputs. Tracing uses them, and so do the kernels' launchers, to
allocate. They read shapes and dtypes only, and never branch on a token count.
"""
