"""What to do about each class of hang, how to tell that it helped, and what would show the class to be wrong."""

from dataclasses import dataclass
from enum import StrEnum

from headway.explain.finding import Confidence


class HangClass(StrEnum):
    """The likely class of a hang's cause."""

    NEVER_JOINED = "never-joined"
    FEWER_COLLECTIVES = "fewer-collectives"
    MISMATCH = "mismatch"
    DEVICE_STOPPED = "device-stopped"
    DEAD_PEER = "dead-peer"
    TRANSPORT = "transport"


@dataclass(frozen=True)
class Advice:
    """Text of a finding that depends on the class alone."""

    confidence: Confidence
    fix: str
    verify: str
    falsified_by: str


ADVICE = {
    HangClass.NEVER_JOINED: Advice(
        Confidence.HIGH,
        "Look at that rank's host: `py-spy dump --pid PID` (a lock that is held, a loader that waits, a save, a file "
        "system that blocks), its log's last lines, dmesg of its node. If its loop has ended, it had fewer batches "
        "than the others. Leave its node out and restart from the newest checkpoint if the host shows no cause",
        "The run passes this collective without that node, or with the call that held the host taken out",
        "The rank's stack stands inside a collective, or its dump was written long before the others'",
    ),
    HangClass.FEWER_COLLECTIVES: Advice(
        Confidence.MEDIUM,
        "Make every rank go through the same collectives: the same number of batches on each (drop the last uneven "
        "one or pad it with weight 0), and no collective inside a branch that depends on a rank's own data, on a "
        "validation, logging or save that only some ranks do, or on an exception that only some catch",
        "Log the step number before the collective on every rank: all must name the same step",
        "All ranks are at the same step and in the same branch of the program",
    ),
    HangClass.MISMATCH: Advice(
        Confidence.HIGH,
        "Make the call the same on all members: the same order of operations, shape and element type. Ragged batches, "
        "branches on a rank's own data and parameters that only some ranks use are the usual causes. "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call before it is made",
        "A run with TORCH_DISTRIBUTED_DEBUG=DETAIL passes this step without an error",
        "The program may legally call it so (an uneven all-gather of lists): then look at the next finding",
    ),
    HangClass.DEVICE_STOPPED: Advice(
        Confidence.HIGH,
        "Look for device errors on that rank's node: dmesg for Xid lines, `nvidia-smi -q` for ECC and NVLink errors, "
        "the rank's log for CUDA errors. Drain the node and restart from the newest checkpoint",
        "The run passes this step on another node; a stress test of the old one shows the error again",
        "The node's kernel log and the device's counters are clean, and the rank's own log goes on after this instant",
    ),
    HangClass.DEAD_PEER: Advice(
        Confidence.MEDIUM,
        "Look at what became of that rank's process: its log's last lines, the launcher's exit codes, dmesg of its "
        "node (out of memory, Xid). If it lives, its dump is missing: give all dumps",
        "With the dumps of all ranks the same rank is named; or its process is found dead",
        "The rank's dump exists and shows that it joined the collective",
    ),
    HangClass.TRANSPORT: Advice(
        Confidence.LOW,
        "If the dump was taken after a timeout, look at the links between these ranks: NCCL_DEBUG=INFO, nccl-tests "
        "over the same nodes, switch and NIC counters. If it was taken while training ran, take another a minute later",
        "Two dumps a minute apart show the same collective unfinished; nccl-tests over the same nodes hang or crawl",
        "A later dump shows the collective finished",
    ),
}
