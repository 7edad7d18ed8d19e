"""The training loops that benchmarks/trainer_overhead.py sets beside Headway's Trainer."""
