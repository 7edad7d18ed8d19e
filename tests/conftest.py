"""Imports that every multi-process test needs are paid for once, before any rank is forked."""

import diffusers  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

torch.set_num_threads(1)
