"""Memory: what holds the peak of a CUDA memory snapshot, what is lost between blocks, and what would lower it."""

from headway.explain.memory_snapshot.explain import explain_memory_snapshot

__all__ = ["explain_memory_snapshot"]
