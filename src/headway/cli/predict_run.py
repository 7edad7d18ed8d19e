"""``python -m headway.cli.predict_run CLUSTER DEVICES TIMELINE < RECIPE``: the prediction that a run stores, as JSON.

The predicted step itself goes to the file TIMELINE. A process of its own, beside the ranks while they start: a
rehearsal patches what it rehearses with.
"""

import contextlib
import json
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.cli.prediction import WRONG_INPUT
from headway.cli.quiet import quieten_libraries
from headway.cluster import Cluster, cluster_of
from headway.errors import UserError
from headway.recipe import Recipe, parse_recipe
from headway.timeline import Timeline, write_chrome_trace


def prediction_of(recipe: Recipe, cluster: Cluster, devices: int) -> tuple[dict[str, Any], Timeline]:
    """What ``prediction.json`` holds, ``prediction`` as ``headway plan`` has it and what it was made of; and the step.

    Raises UserError for what can't be rehearsed.
    """
    import torch

    from headway.rehearse import predict, rehearse, roles

    torch.set_num_threads(1)
    began = time.monotonic()
    found = predict((rehearse(recipe, devices, role.rank) for role in roles(recipe, devices)), cluster)
    told = {
        "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "seconds": time.monotonic() - began,
        "cluster": cluster.name,
        "cluster_source": cluster.source,
        "devices": devices,
        "prediction": found.as_json(),
        "first_rank_peak_memory_gib": found.memories[0].peak.scaled(1 / 2**30).as_json(),
        "peak_tflops": cluster.accelerator.peak_tflops(recipe.precision.products),
        "errors_s": found.result_json()["errors_s"],
    }
    return told, found.timeline


def main() -> int:
    """Print the prediction; where there can be none, one line a fault."""
    quieten_libraries()
    cluster, devices, timeline_file = sys.argv[1:]
    try:
        recipe = parse_recipe(tomllib.loads(sys.stdin.read()), source="the run's recipe")
        with contextlib.redirect_stdout(sys.stderr):  # of libraries: standard output is the result alone
            found, timeline = prediction_of(recipe, cluster_of(cluster), int(devices))
            write_chrome_trace(timeline, Path(timeline_file))
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
