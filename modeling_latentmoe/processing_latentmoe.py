"""Messages and images to model inputs: the tokenizer, the image processor and the chat format together.

Every image becomes `<|media_begin|>image {W}x{H}<|media_content|>` + N x `<|media_pad|>` + `<|media_end|>`,
with its original size in pixels and N the rows that vision tower and projector make of it (Kimi-K3 report).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin

from .chat_latentmoe import (
    CLOSE,
    END_OF_MSG,
    IMAGE_PLACEHOLDER,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
    Segment,
    build_chat_segments,
    encode_segments,
    image_text,
    parse_message,
    refuse_unsupported,
)
from .image_processing_latentmoe import ImageSource, LatentMoEImageProcessor, load_image

_MARKERS = (OPEN, CLOSE, SEP, END_OF_MSG, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)


class LatentMoEProcessor(ProcessorMixin):
    """
    ```python
    processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True
    )
    ```

    Batches hold input_ids and attention_mask int64 [B, T], padded on the left with [PAD] and 0, and, when
    there are images, pixel_values fp32 [P, 3, p, p] and grid_thws int64 [n, 3] over all samples in order.
    """

    def __init__(
        self,
        image_processor: LatentMoEImageProcessor,
        tokenizer: Any,
        image_placeholder: str = IMAGE_PLACEHOLDER,
    ) -> None:
        """Raises ValueError naming the chat markers that the tokenizer lacks."""
        super().__init__(image_processor, tokenizer)
        absent = (None, tokenizer.unk_token_id)
        missing = [name for name in _MARKERS if tokenizer.convert_tokens_to_ids(name) in absent]
        if missing:
            raise ValueError(f"tokenizer: missing the special tokens {', '.join(missing)}")
        self.image_placeholder = image_placeholder
        self.image_token = MEDIA_PAD
        self.image_token_id = tokenizer.convert_tokens_to_ids(MEDIA_PAD)

    def __call__(
        self,
        images: ImageSource | Sequence[Any] | None = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        *,
        padding: bool | str = True,
        padding_side: str = "left",
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """Written-out prompts: markers are special tokens, and each `image_placeholder` takes an image.

        `images` are the images of the one text, or one list of images for each text. Use
        `apply_chat_template` for messages: it keeps markers that a user typed as text, and tokenises as the
        released model was trained. None for `return_tensors` is "pt". Raises ValueError when placeholders and
        images do not match, a file cannot be read, or `truncation` or `max_length` is set.
        """
        refuse_unsupported(truncation=truncation, max_length=max_length)
        if videos is not None:
            raise ValueError("videos: this model takes images only")
        if text is None:
            raise ValueError("text: missing; an image needs a prompt that says where it goes")
        texts = [text] if isinstance(text, str) else list(text)
        samples = []
        for prompt, given in zip(texts, _per_sample(images, len(texts)), strict=True):
            take = _Images(given)
            first, *rest = prompt.split(self.image_placeholder) if given is not None else [prompt]
            segments = [Segment(first, allow_special=True)]
            for piece in rest:
                segments += [Segment(take(None), allow_special=True), Segment(piece, allow_special=True)]
            samples.append(self._encode(segments, take))
        return self._batch(samples, False, padding, padding_side, return_tensors)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        images: ImageSource | Sequence[Any] | None = None,
        tokenize: bool = False,
        return_dict: bool = False,
        return_assistant_tokens_mask: bool = False,
        padding: bool | str = True,
        padding_side: str = "left",
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = "pt",
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        thinking_effort: str | None = "max",
        **chat: Any,
    ) -> str | list[str] | torch.Tensor | BatchFeature:
        """A conversation, or a list of them -> text, input_ids (`tokenize`) or the batch (`return_dict` too).

        An image part carries its image ("image", "path", "url" or "image_url") or is bare and takes the next
        of `images`: those of the one conversation, or one list for each. When `images` is given, the
        placeholder string inside a text takes one too. `return_assistant_tokens_mask` adds assistant_masks
        int64 [B, T]: 1 where the assistant wrote the token, never on image rows. `thinking_effort` is "max"
        as released; None writes no effort message. `chat` goes to `build_chat_segments`: thinking,
        add_generation_prompt, tool_choice, response_format. `processor_kwargs` may hold images, padding,
        padding_side, truncation, max_length and return_tensors. truncation, max_length, continue_final_message,
        chat_template and documents are there for callers that pass them switched off; set, they raise ValueError.
        The text is for reading: it tokenises differently from the segments. Errors as `__call__`.
        """
        options = {"padding": padding, "padding_side": padding_side, "return_tensors": return_tensors}
        options |= processor_kwargs or {}
        images = options.pop("images", images)
        refuse_unsupported(
            truncation=options.pop("truncation", truncation),
            max_length=options.pop("max_length", max_length),
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            documents=documents,
        )
        chat["thinking_effort"] = thinking_effort
        batched = bool(conversation) and not isinstance(conversation[0], Mapping)
        conversations = list(conversation) if batched else [conversation]
        if not tokenize:
            texts = [self._text(messages, tools, chat) for messages in conversations]
            return texts if batched else texts[0]
        samples = []
        per_sample = _per_sample(images, len(conversations))
        for messages, given in zip(conversations, per_sample, strict=True):
            take = _Images(given)
            placeholder = self.image_placeholder if given is not None else None
            segments = build_chat_segments(messages, tools, image_prompt=take, image_placeholder=placeholder, **chat)
            samples.append(self._encode(segments, take))
        batch = self._batch(samples, return_assistant_tokens_mask, **options)
        return batch if return_dict else batch["input_ids"]

    def parse_response(self, response: Sequence[int] | torch.Tensor, *, thinking: bool = True) -> dict[str, str]:
        """Ids [T] generated after a prompt (without the prompt) -> {"think": text, "response": text}.

        `thinking` is what the prompt was made with. Generation may have stopped anywhere.
        """
        return parse_message(self.tokenizer, response, thinking)

    def to_dict(self) -> dict[str, Any]:
        """Without the image processor, which has its own released file."""
        return {name: value for name, value in super().to_dict().items() if name != "image_processor"}

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Writes the tokenizer, preprocessor_config.json as released, processor_config.json and this code."""
        files = super().save_pretrained(save_directory)
        files += self.image_processor.save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return files

    def _text(self, messages: Sequence[Any], tools: Any, chat: dict[str, Any]) -> str:
        segments = build_chat_segments(
            messages, tools, image_prompt=lambda part: self.image_placeholder, image_placeholder=None, **chat
        )
        return "".join(segment.text for segment in segments)

    def _encode(self, segments: Iterable[Segment], images: "_Images") -> "_Sample":
        """Token ids with one pad per image row, the assistant mask, and the images."""
        images.check()
        ids, mask = encode_segments(self.tokenizer, segments)
        pads = ids.count(self.image_token_id)
        if pads != len(images.taken):
            raise ValueError(f"the text holds {pads} {self.image_token} but there are {len(images.taken)} images")
        rows = iter(self.image_processor.num_tokens(*image.size) for image in images.taken)
        expanded: list[int] = []
        expanded_mask: list[int] = []
        for token, written in zip(ids, mask, strict=True):
            is_image = token == self.image_token_id
            count = next(rows) if is_image else 1
            expanded += [token] * count
            expanded_mask += [0 if is_image else written] * count
        return expanded, expanded_mask, images.taken

    def _batch(
        self,
        samples: Sequence["_Sample"],
        assistant_masks: bool,
        padding: bool | str,
        padding_side: str,
        return_tensors: str | None,
    ) -> BatchFeature:
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors: {return_tensors!r} is not supported, expected 'pt'")
        if padding not in (False, True, "longest"):
            raise ValueError(f"padding: {padding!r} is not supported, expected True, False or 'longest'")
        lengths = [len(ids) for ids, _, _ in samples]
        if padding not in (True, "longest") and len(set(lengths)) > 1:
            raise ValueError(
                f"padding={padding!r}: samples of {min(lengths)} to {max(lengths)} tokens need padding=True"
            )

        def pad(rows: Iterable[list[int]], value: int) -> torch.Tensor:
            tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
            return torch.nn.utils.rnn.pad_sequence(
                tensors, batch_first=True, padding_value=value, padding_side=padding_side
            )

        data = {
            "input_ids": pad((ids for ids, _, _ in samples), self.tokenizer.pad_token_id),
            "attention_mask": pad(([1] * length for length in lengths), 0),
        }
        if assistant_masks:
            data["assistant_masks"] = pad((mask for _, mask, _ in samples), 0)
        images = [image for _, _, taken in samples for image in taken]
        if images:
            data.update(self.image_processor(images))
        return BatchFeature(data)


_Sample = tuple[list[int], list[int], list[Image.Image]]


class _Images:
    """Loads the images of one sample in reading order and writes the prompt text of each."""

    def __init__(self, given: Sequence[ImageSource] | None) -> None:
        self.given = list(given or ())
        self.placeholders = 0
        self.taken: list[Image.Image] = []

    def __call__(self, part: Mapping[str, Any] | None) -> str:
        source = _part_source(part or {})
        if source is None:
            self.placeholders += 1
            if self.placeholders > len(self.given):
                return ""
            source = self.given[self.placeholders - 1]
        self.taken.append(load_image(source))
        return image_text(*self.taken[-1].size)

    def check(self) -> None:
        if self.placeholders != len(self.given):
            raise ValueError(f"{self.placeholders} image placeholders but {len(self.given)} images")


def _part_source(part: Mapping[str, Any]) -> ImageSource | None:
    source = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    return source["url"] if isinstance(source, Mapping) and "url" in source else source


def _per_sample(images: Any, count: int) -> list[list[ImageSource] | None]:
    """The images of each of `count` samples; None where nothing was given."""
    if images is None:
        return [None] * count
    images = list(images) if isinstance(images, list | tuple) else [images]
    nested = [isinstance(item, list | tuple) or item is None for item in images]
    if images and all(nested):
        if len(images) != count:
            raise ValueError(f"images: {len(images)} lists of images for {count} texts")
        return images
    if any(nested) or count != 1:
        raise ValueError(f"images: {count} texts need one list of images each")
    return [images]


LatentMoEProcessor.register_for_auto_class("AutoProcessor")
