"""What a layer runs, costs, sends and allocates, and its kernels compiled ahead of a first call."""
