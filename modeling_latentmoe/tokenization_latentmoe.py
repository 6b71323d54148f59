"""The Kimi-K3 tokenizer (tiktoken rank BPE), and a small byte-level one for tiny models.

The released repository holds `tiktoken.model` and `tokenizer_config.json`, no tokenizer.json: merge lists
cannot be recovered exactly from ranks, so the ranks themselves are used, through the optional package
tiktoken.
"""

import base64
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BatchEncoding, PreTrainedTokenizer, PreTrainedTokenizerFast

from .chat_latentmoe import (
    CLOSE,
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
    build_chat_segments,
    encode_segments,
    refuse_unsupported,
)

try:
    import tiktoken
except ImportError:
    tiktoken = None

VOCAB_FILE = "tiktoken.model"
RESERVED_TOKENS = 256
# tiktoken overflows its stack or slows down quadratically beyond these lengths, so texts are cut there first.
MAX_CHARS, MAX_RUN = 400_000, 25_000

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PRETOKEN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Each byte as a printable character: 33-126, 161-172 and 174-255 are themselves, the rest follow from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_TO_CHAR = {byte: chr(byte) for byte in _PRINTABLE}
_BYTE_TO_CHAR |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
_CHAR_TO_BYTE = {char: byte for byte, char in _BYTE_TO_CHAR.items()}


class LatentMoETokenizer(PreTrainedTokenizer):
    """Ranks of `tiktoken.model`, then 256 reserved ids: those named in the config, `<|reserved_token_{id}|>` otherwise.

    `tokenizer(text)` reads marker strings as special tokens, as released; `split_special_tokens=True` spells
    them out. `apply_chat_template` encodes XTML by segments, in which a marker that a user typed stays text.
    Vocabulary entries are byte strings written with one printable character a byte, as byte-level
    tokenizer.json files do.

    Raises ImportError without tiktoken, ValueError when the vocabulary and the config do not belong together.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        bos_token: str = "[BOS]",
        eos_token: str = "[EOS]",
        unk_token: str = "[UNK]",
        pad_token: str = "[PAD]",
        added_tokens_decoder: dict[int, AddedToken] | None = None,
        **kwargs: Any,
    ) -> None:
        if tiktoken is None:
            raise ImportError("LatentMoETokenizer needs the package tiktoken: pip install tiktoken")
        self.vocab_file = vocab_file
        ranks = _read_ranks(Path(vocab_file))
        self.model = tiktoken.Encoding(VOCAB_FILE, pat_str=_PRETOKEN, mergeable_ranks=ranks, special_tokens={})
        named = added_tokens_decoder or {}
        reserved = range(len(ranks), len(ranks) + RESERVED_TOKENS)
        special = {i: named.get(i) or _special(f"<|reserved_token_{i}|>") for i in reserved}
        self._tokens = {rank: "".join(map(_BYTE_TO_CHAR.__getitem__, piece)) for piece, rank in ranks.items()}
        self._tokens |= {i: token.content for i, token in special.items()}
        self._ids = {token: i for i, token in self._tokens.items()}
        assert len(self._ids) == len(self._tokens), "a special token is spelled like an ordinary one"
        if named and min(named) < len(ranks):
            raise ValueError(f"added_tokens_decoder: id {min(named)} is an ordinary token of {vocab_file}")
        known = {*self._ids, *(token.content for token in named.values())}
        for role, token in (("bos", bos_token), ("eos", eos_token), ("unk", unk_token), ("pad", pad_token)):
            if str(token) not in known:
                raise ValueError(f"{role}_token: {token} is not named in added_tokens_decoder")
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            added_tokens_decoder={**special, **named},
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        """Ranks and reserved ids, without tokens that a user added."""
        return len(self._tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """Every reserved token: `skip_special_tokens` drops them all, not only the four with a role."""
        named = super().all_special_tokens
        return list(dict.fromkeys([*named, *(t.content for t in self._added_tokens_decoder.values() if t.special)]))

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._tokens[i] for piece in _cut(text) for i in self.model.encode_ordinary(piece)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._ids[self.unk_token])

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of these tokens; bytes that are no UTF-8 become U+FFFD."""
        added = self._added_tokens_encoder
        pieces = (t.encode() if t in added else bytes(map(_CHAR_TO_BYTE.__getitem__, t)) for t in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        target = Path(save_directory) / (f"{filename_prefix}-{VOCAB_FILE}" if filename_prefix else VOCAB_FILE)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        return_tensors: str | None = None,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: list[dict[str, Any]] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        thinking_effort: str | None = "max",
        **chat: Any,
    ) -> str | list[int] | torch.Tensor | BatchEncoding:
        """One text conversation as XTML: the text, its ids, or input_ids, attention_mask (and
        assistant_masks), as lists or, with `return_tensors="pt"`, int64 tensors [1, T].

        One conversation needs no `padding`. truncation, max_length, continue_final_message, chat_template, documents
        and tokenizer_kwargs are there for callers that pass them switched off; set, they raise ValueError. `chat` goes
        to `build_chat_segments`. Images and batches are the processor's business. The released default effort is
        "max"; None writes no effort message.
        """
        refuse_unsupported(
            truncation=truncation,
            max_length=max_length,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            documents=documents,
            tokenizer_kwargs=tokenizer_kwargs,
        )
        if padding not in (False, True, "longest"):
            raise ValueError(f"padding: {padding!r} is not supported, expected True, False or 'longest'")
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors: {return_tensors!r} is not supported, expected 'pt' or None")
        segments = build_chat_segments(
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            thinking_effort=thinking_effort,
            **chat,
        )
        if not tokenize:
            return "".join(segment.text for segment in segments)
        ids, mask = encode_segments(self, segments)
        rows = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if return_assistant_tokens_mask:
            rows["assistant_masks"] = mask
        encoding = BatchEncoding(rows, tensor_type=return_tensors, prepend_batch_axis=return_tensors is not None)
        return encoding if return_dict else encoding["input_ids"]


def _special(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """`base64 rank` lines. Read here: tiktoken's own reader caches by path and would miss a changed file."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        piece, rank = line.split()
        ranks[base64.b64decode(piece)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: ranks are not 0..{len(ranks) - 1}; the file is damaged")
    return ranks


def _cut(text: str) -> Iterator[str]:
    """Blocks of MAX_CHARS, each cut again after every MAX_RUN characters of one run of spaces or of non-spaces."""
    for start in range(0, len(text), MAX_CHARS):
        block = text[start : start + MAX_CHARS]
        runs = (run.span() for run in re.finditer(r"\s+|\S+", block))
        cuts = [0, *(cut for begin, end in runs for cut in range(begin + MAX_RUN, end, MAX_RUN)), len(block)]
        yield from (block[begin:end] for begin, end in pairwise(cuts))


TINY_SPECIAL_TOKENS = (
    *("[BOS]", "[EOS]", END_OF_MSG, OPEN, CLOSE, SEP),
    *(MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, "[UNK]", "[PAD]"),
)


def tiny_tokenizer(sentences: Iterable[str] = (), vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges learnt from `sentences`: 256 bytes, merges, then TINY_SPECIAL_TOKENS at the end.

    `vocab_size` is the most it may have, special tokens included; few sentences give fewer. It is saved as a
    plain tokenizer.json that AutoTokenizer loads without remote code.
    """
    if vocab_size < 256 + len(TINY_SPECIAL_TOKENS):
        raise ValueError(f"vocab_size: {vocab_size}, must be at least {256 + len(TINY_SPECIAL_TOKENS)}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TINY_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences, trainer)
    backend.add_special_tokens([_special(token) for token in TINY_SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        padding_side="left",
    )


LatentMoETokenizer.register_for_auto_class("AutoTokenizer")
