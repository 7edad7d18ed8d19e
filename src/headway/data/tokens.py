"""Text to token ids: bytes, a transformers tokenizer folder, or one token a word of the captions at hand."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Regex
from tokenizers import Tokenizer as TokenizerModel
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headway.data.paths import existing_folder
from headway.data.source import fingerprint_of
from headway.errors import UserError

_WORD = r"\w+|[^\w\s]"


class Tokenizer(Protocol):
    """What language data needs of a tokenizer."""

    vocab_size: int
    end_of_document: int
    """Id that ends each document."""
    padding: int
    """Id that fills up short samples; what is padded must be masked, as it may equal ``end_of_document``."""
    fingerprint: str
    """Changes when the ids of a text change."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 and 256, which ends a document and pads."""

    vocab_size = 257
    end_of_document = 256
    padding = 256
    fingerprint = fingerprint_of(["bytes", "257"])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        # Half of a surrogate pair, which JSON can spell and UTF-8 cannot, becomes a question mark.
        return [list(text.encode(errors="replace")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes U+FFFD."""
        return bytes(id for id in ids if id < 256).decode(errors="replace")


class FolderTokenizer:
    """A transformers tokenizer from a local folder; ``tokenizer`` is the library's object."""

    def __init__(self, folder: Path) -> None:
        existing_folder(folder, "model.tokenizer")  # else transformers would take it for a name on its hub
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"model.tokenizer: {folder} holds no tokenizer transformers can load ({reason})") from error
        if loaded.eos_token_id is None:
            raise UserError(f"model.tokenizer: {folder} names no eos_token, which ends each document")
        self.tokenizer: PreTrainedTokenizerBase = loaded
        self.vocab_size = len(loaded)
        self.end_of_document: int = loaded.eos_token_id
        self.padding: int = loaded.eos_token_id if loaded.pad_token_id is None else loaded.pad_token_id
        vocabulary = sorted(loaded.get_vocab().items())
        kind = (
            loaded.backend_tokenizer.to_str() if isinstance(loaded, PreTrainedTokenizerFast) else type(loaded).__name__
        )
        self.fingerprint = fingerprint_of([kind, str(vocabulary), str(self.end_of_document)])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def open_tokenizer(name: Literal["bytes"] | Path) -> Tokenizer:
    """The recipe's ``model.tokenizer``. Raises UserError when the folder holds none."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(Path(name))


def word_tokenizer(captions: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """One token for each word (lower case) and punctuation mark of ``captions``: specials, then alphabetical order.

    A text becomes ``<bos> … <eos>``, cut and padded as the caller asks up to ``max_length``; other words are ``<unk>``.
    It saves and loads as any transformers tokenizer, and takes the place of CLIP's or T5's in a diffusers pipeline.
    """
    words = sorted({word for caption in captions for word in re.findall(_WORD, caption.lower())})
    vocabulary = {token: id for id, token in enumerate(["<pad>", "<unk>", "<bos>", "<eos>", *words])}
    model = TokenizerModel(WordLevel(vocabulary, unk_token="<unk>"))
    model.normalizer = Lowercase()
    model.pre_tokenizer = Split(Regex(_WORD), behavior="removed", invert=True)
    model.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", vocabulary["<bos>"]), ("<eos>", vocabulary["<eos>"])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model,
        model_max_length=max_length,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="right",
    )
