"""Parts of the benchmark of one GPU; ``benchmarks/gpu.py`` runs each in a process of its own."""
