"""What each operator returns, without computing it: one file a stage, one function an operator.

These functions are the FakeTensor functions that tracing uses and the allocators of the kernels.
They read shapes and dtypes only and never branch on a token count.
"""
