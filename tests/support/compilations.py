"""A counter of compilations."""

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
