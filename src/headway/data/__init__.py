"""Sources, global order, loader, tokens, counter-based randomness."""

from headway.data.loader import Collate, Loader
from headway.data.open import open_sources
from headway.data.order import SampleOrder
from headway.data.randomness import normal, normals, uniform
from headway.data.sample import BadRecord, Batch, Conversation, Sample, UnfitSample
from headway.data.source import Source, captions_of
from headway.data.tokens import Tokenizer, open_tokenizer, word_tokenizer

__all__ = [
    "BadRecord",
    "Batch",
    "Collate",
    "Conversation",
    "Loader",
    "Sample",
    "SampleOrder",
    "Source",
    "Tokenizer",
    "UnfitSample",
    "captions_of",
    "normal",
    "normals",
    "open_sources",
    "open_tokenizer",
    "uniform",
    "word_tokenizer",
]
