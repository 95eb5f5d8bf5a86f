"""What kernels that write to other ranks' windows share: flags, and the rows that travel."""
