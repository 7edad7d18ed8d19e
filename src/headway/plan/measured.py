"""What a row of a table of runs measured, in seconds and GiB, by the convention of its source.

Step time and tokens count before FLOP/s and utilisation, whose counting differs: NVIDIA counts half of causal
attention, nanotron all of it, Narayanan et al. 2021 recomputation besides.
"""

from headway.plan.mapping import Case

PEAK_FLOPS = {"nanotron": 989e12}
"""Peak that a source's utilisation is a share of, where it is all that the source gives."""
GIGABYTES = ("litgpt",)
"""Frameworks that report memory in 1e9 bytes; others in GiB, whatever they call it."""


def measured_step_time(case: Case) -> float | None:
    """Seconds of a step; None where the row measured none."""
    run, numbers = case.run, case.run.numbers
    devices = float(case.layouts.devices[0])
    tokens = float(case.layouts.global_batch[0]) * case.settings.sequence
    if "metric_step_time_s" in numbers:
        return numbers["metric_step_time_s"]
    if "metric_tokens_per_s_per_gpu" in numbers:
        return tokens / (numbers["metric_tokens_per_s_per_gpu"] * devices)
    if "metric_tflops_per_gpu" in numbers:
        return tokens * _counted_flops(case) / (numbers["metric_tflops_per_gpu"] * 1e12 * devices)
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in run.framework), None)
    if "metric_mfu" in numbers and peak:
        flops = case.shape.model_flops_per_token(case.settings.sequence, causal_half=False)
        return tokens * flops / (numbers["metric_mfu"] * peak * devices)
    return None


def _counted_flops(case: Case) -> float:
    """FLOPs of a token as the row's source counts them."""
    shape, sequence = case.shape, case.settings.sequence
    if "recompute FLOPs" in case.run.notes:  # Narayanan et al. 2021, equation 3
        attention, head = 1 + sequence / (6 * shape.hidden), 51200 / (16 * shape.layers * shape.hidden)
        return 96 * shape.layers * shape.hidden**2 * (attention + head)
    return shape.model_flops_per_token(sequence, causal_half=case.kind != "diffusion")


def measured_peak_memory(case: Case) -> float | None:
    """GiB; None where the row measured none, or only a bound of it."""
    given = case.run.numbers.get("peak_mem_gb")
    if given is None or "UPPER BOUND" in case.run.notes:
        return None
    in_gigabytes = any(name in case.run.framework for name in GIGABYTES)
    return given / 1.073741824 if in_gigabytes else given
