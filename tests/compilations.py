"""How often a function is compiled."""

from torch._dynamo.backends.registry import lookup_backend


class Compilations:
    """A backend that counts what it has compiled.

    Not how often it was called: torch 2.11 may begin a frame again, and `CompileCounterWithBackend`
    counts both.
    """

    def __init__(self, backend="aot_eager"):
        self.compile, self.count = lookup_backend(backend), 0

    def __call__(self, graph, inputs):
        compiled = self.compile(graph, inputs)
        self.count += 1
        return compiled
