"""Lines as trainers print them, of runs that a test describes by the seconds of each step."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

BEGAN = datetime(2026, 1, 5, 10, 0, 0)


def _stamps(seconds: Sequence[float]) -> list[str]:
    moments, now = [], BEGAN
    for taken in seconds:
        now += timedelta(seconds=taken)
        moments.append(now.strftime("%Y-%m-%d %H:%M:%S,") + f"{now.microsecond // 1000:03d}")
    return moments


def torchtitan(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """pytorch/torchtitan, torchtitan/components/metrics.py (MetricsProcessor.log)."""
    return [
        f"[titan] {stamp} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:7.4f}  \x1b[38;2;180;60;0m"
        f"grad_norm: {1.5:7.4f}  \x1b[36mmemory: {gib:5.2f}GiB({gib / 0.95:.2f}%)  "
        f"\x1b[34mtps: {round(8192 / taken):,}  "
        f"\x1b[36mtflops: {300 / taken:,.2f}  \x1b[35mmfu: {30 / taken:.2f}%\x1b[39m"
        for step, (stamp, taken, loss, gib) in enumerate(zip(_stamps(seconds), seconds, losses, memory, strict=True), 1)
    ]


def megatron(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """NVIDIA/Megatron-LM, megatron/training/training.py (training_log)."""
    return [
        f" [{stamp[:19]}] iteration {step:8d}/{len(seconds):8d} | consumed samples: {16 * step:12d} | elapsed time per "
        f"iteration (ms): {1000 * taken:.1f} | throughput per GPU (TFLOP/s/GPU): {300 / taken:.1f} | learning rate: "
        f"1.500000E-06 | global batch size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.500 | number "
        "of skipped iterations:   0 | number of nan iterations:   0 |"
        for step, (stamp, taken, loss) in enumerate(zip(_stamps(seconds), seconds, losses, strict=True), 1)
    ]


def deepspeed(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """deepspeedai/DeepSpeed, deepspeed/utils/timer.py (ThroughputTimer.stop), runtime/pipe/engine.py (train_batch)."""
    lines = []
    for step, (stamp, taken, loss, gib) in enumerate(zip(_stamps(seconds), seconds, losses, memory, strict=True), 1):
        lines.append(f"steps: {step} loss: {loss:0.4f} iter time (s): {taken:0.3f} samples/sec: {16 / taken:0.3f}")
        lines.append(
            f"[{stamp}] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, "
            f"RunningAvgSamplesPerSec={16.0}, CurrSamplesPerSec={16 / taken}, MemAllocated=10.1GB, "
            f"MaxMemAllocated={gib}GB"
        )
    return lines


def hugging_face(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """transformers, trainer_callback.py (ProgressCallback.on_log), beside a logger's time stamps and tqdm's bar."""
    return [
        f"{stamp}  10%|█  | {step}/1000 [00:12<01:50,  1.22s/it]{{'loss': '{loss:.4g}', 'grad_norm': '1.5', "
        f"'learning_rate': '5e-05', 'epoch': '{step / 1000:.4g}'}}"
        for step, (stamp, loss) in enumerate(zip(_stamps(seconds), losses, strict=True), 1)
    ]


def lightning(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """Lightning, pytorch/callbacks/progress/tqdm_progress.py."""
    return [
        f"Epoch 0:   1%|▏         | {step}/1000 [00:05<00:40, {1 / taken:.6f}it/s, v_num=0, train_loss={loss:.3f}]"
        for step, (taken, loss) in enumerate(zip(seconds, losses, strict=True), 1)
    ]


def json_lines(seconds: Sequence[float], losses: Sequence[float], memory: Sequence[float]) -> list[str]:
    """One object a step, as Headway's metrics.jsonl."""
    return [
        f'{{"step": {step}, "loss": {loss}, "grad_norm": 1.5, "step_time_s": {taken}, "peak_memory_gib": {gib}}}'
        for step, (taken, loss, gib) in enumerate(zip(seconds, losses, memory, strict=True), 1)
    ]


Writer = Callable[[Sequence[float], Sequence[float], Sequence[float]], list[str]]
WRITERS: dict[str, Writer] = {
    "torchtitan": torchtitan,
    "Megatron-LM": megatron,
    "DeepSpeed": deepspeed,
    "Hugging Face Trainer": hugging_face,
    "Lightning": lightning,
    "JSON lines": json_lines,
}
