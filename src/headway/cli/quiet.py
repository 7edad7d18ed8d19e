"""Silence for notices of libraries about which a user of Headway can do nothing."""

import logging
import os


def quieten_libraries() -> None:
    """Keep torch, torchao, transformers and diffusers from printing anything below an error, in child processes too.

    Call it before they are imported. What the environment says already is left as it is.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
