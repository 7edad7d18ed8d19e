"""Silence for notices of libraries about which a user of Headway can do nothing."""

import logging
import os
import threading


def quieten_libraries() -> None:
    """Keep torch, torchao, transformers and diffusers from printing anything below an error, in child processes too.

    Call it before they are imported. What the environment says already is left as it is.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    threading.excepthook = _tell_of_our_threads


def quieten_profiler() -> None:
    """Keep PyTorch's profiler from printing that it starts and stops. Call it before torch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # a trace without its kernels is told of by ``headway explain``
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _tell_of_our_threads(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread hands its error to whoever calls it next, and would print a traceback besides."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)
