"""Which kernels communicate, and how: names of collectives and families of kernel names."""

import re

KERNEL_FAMILIES: dict[str, re.Pattern[str]] = {
    "NCCL or RCCL": re.compile(r"(^|[^a-z])(nccl|rccl)", re.I),
    "MSCCL": re.compile(r"(^|[^a-z])msccl", re.I),
    "DeepEP": re.compile(r"\bdeep_?ep\w*::(?!layout)|\bep::int(er|ra)node|\bint(er|ra)node(_ll)?::", re.I),
    "NVSHMEM": re.compile(r"nvshmem|rocshmem", re.I),
    "symmetric memory": re.compile(r"multimem_\w*(all_|reduce|gather|broadcast)|\b(one|two)_shot_all_reduce", re.I),
    "user buffers": re.compile(r"userbuffers", re.I),
    "custom all-reduce": re.compile(r"cross_device_reduce|all_?reduce_fusion|quick_?all_?reduce", re.I),
}
"""Kernels that communicate by the names their libraries give them, for traces that don't link them to a collective.

A name must say that it moves data between devices: a kernel of another name stays compute.
"""

_SPELLINGS = {
    "all_reduce": r"all_?reduce|cross_device_reduce",
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send_recv": r"send_?recv",
    "reduce": r"(^|[^a-z])reduce",
    "gather": r"(^|[^a-z])gather",
    "scatter": r"(^|[^a-z])scatter",
    "send": r"(^|[^a-z])i?send",
    "recv": r"(^|[^a-z])i?recv",
    "barrier": r"barrier",
    "dispatch": r"dispatch",
    "combine": r"combine",
}
_COLLECTIVES = {name: re.compile(pattern, re.I) for name, pattern in _SPELLINGS.items()}

BYTES_OF_DTYPE = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8,
    "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1,
    "Float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of an element by the dtype's name in ``record_param_comms`` (c10's ScalarType)."""


def is_communication(kernel_name: str) -> bool:
    """Whether the name of a kernel says that it communicates."""
    return any(family.search(kernel_name) for family in KERNEL_FAMILIES.values())


def collective_named(name: str) -> str:
    """One spelling of a collective (``all_reduce``, …), from its name in a trace or a kernel's; ``""``: none found."""
    return next((collective for collective, pattern in _COLLECTIVES.items() if pattern.search(name)), "")
