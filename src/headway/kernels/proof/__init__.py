"""What shows that a kernel is right where there is no GPU: its numbers, its memory accesses, its machine code."""
