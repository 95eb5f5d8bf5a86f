"""Counters of compilations."""

from torch._dynamo.backends.registry import lookup_backend


class Compilations:
    """A backend that counts completed compilations.

    `CompileCounterWithBackend` counts calls of the backend, but torch 2.11 may restart a frame and
    call the backend twice.
    """

    def __init__(self, backend="aot_eager"):
        self.compile, self.count = lookup_backend(backend), 0

    def __call__(self, graph, inputs):
        compiled = self.compile(graph, inputs)
        self.count += 1
        return compiled


def compiled_kernels():
    """The kernels of Triton and Gluon that were compiled so far."""
    from moe_ops.kernels._hopper.gathered import hopper_gemm_kernel
    from moe_ops.kernels._hopper.stream import hopper_stream_kernel
    from moe_ops.kernels._runtime.launch import COMPILED

    kernels = hopper_stream_kernel, hopper_gemm_kernel
    caches = [made for kernel in kernels for made, *_ in kernel.device_caches.values()]
    return set(COMPILED).union(*caches)
