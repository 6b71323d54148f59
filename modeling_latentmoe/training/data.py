"""Rows of a dataset -> chats -> token samples -> batches, in an order that only the seed and the process decide.

A row holds `messages` (a chat), or `prompt` and `completion` (texts or chats), and optionally `images` (or `image`).
An image stands where a message's content has a part {"type": "image"}; a chat without such parts gets its images in
front of the first user message.

Shapes: B batch, T tokens, P image patches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, List, Value, load_dataset, load_from_disk
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from modeling_latentmoe.image_processing_latentmoe import load_image
from modeling_latentmoe.training.loss import IGNORE, count_loss_tokens

FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
SHUFFLE_BUFFER = 1000  # rows of a streamed dataset that are shuffled together
PACKING_WINDOW = 8  # packed rows that are filled together
DIGIT_QUESTION = "Which digit is this?"
DIGIT_PIXELS = 56


class UnreadableImageError(ValueError):
    """An image of a row cannot be decoded."""


@dataclass(frozen=True)
class Chat:
    """One conversation with its decoded images inside the content parts.

    `name` says where it comes from, in words for messages; the first `context` messages are read, never learned.
    """

    name: str
    messages: list[dict[str, Any]]
    context: int = 0

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """Everything before the last message, which is the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """Text of the last message."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass(frozen=True)
class Sample:
    """Model arguments of one chat: ids and labels int64 [T], pixels [P, 3, 14, 14] and grids int64 [images, 3]."""

    input_ids: Tensor
    labels: Tensor
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


def open_dataset(
    source: str, split: str, config: str | None = None, streaming: bool = False
) -> tuple[Dataset | IterableDataset, Path | None]:
    """Open `source` and return its `split` with the folder that relative image paths start from.

    `source` is a parquet, JSON-lines, JSON, CSV or arrow file, a folder of such files, a folder of images with a
    metadata file, a folder written by `save_to_disk`, a Hub id, or "digits" (also "digits:blank" and
    "digits:shuffled", its controls). Raises ValueError that names the source.
    """
    path = Path(source)
    if source.partition(":")[0] == "digits" and not path.exists():
        return handwritten_digits(split, source.partition(":")[2]), None
    try:
        if path.is_dir() and any((path / file).exists() for file in ("dataset_info.json", "dataset_dict.json")):
            dataset = load_from_disk(source)
            if isinstance(dataset, DatasetDict):
                if split not in dataset:
                    raise ValueError(f"dataset {source} has no split {split!r}, only {', '.join(dataset)}")
                dataset = dataset[split]
        elif path.is_file():
            if path.suffix not in FILE_FORMATS:
                raise ValueError(f"dataset {source}: unknown file type, expected one of {' '.join(FILE_FORMATS)}")
            # one file is one split, whatever that split is called
            dataset = load_dataset(FILE_FORMATS[path.suffix], data_files=source, split="train", streaming=streaming)
        else:
            dataset = load_dataset(source, config, split=split, streaming=streaming)
    except (DatasetsError, OSError) as error:
        raise ValueError(f"dataset {source} cannot be opened: {one_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"dataset {source}: {one_line(error)}") from error
    return dataset, path if path.is_dir() else path.parent if path.is_file() else None


def one_line(error: BaseException) -> str:
    """An error's text, or its cause's where that says more, without line breaks."""
    return " ".join(str(error.__cause__ or error).split())


def handwritten_digits(split: str, variant: str = "") -> Dataset:
    """scikit-learn's 1797 scanned digits as question-answer chats over images of 56 x 56 pixels.

    Every fifth image is held out (split "test"), whatever the seed. Variants are controls: "blank" replaces every
    image by an empty one, "shuffled" gives the images of the training split each other's answers.
    """
    if variant not in ("", "blank", "shuffled"):
        raise ValueError(f"dataset digits:{variant}: expected digits, digits:blank or digits:shuffled")
    if split not in ("train", "test"):
        raise ValueError(f"dataset digits has no split {split!r}, only train, test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("dataset digits needs scikit-learn: pip install scikit-learn") from error
    import numpy as np
    from PIL import Image as PIL

    digits = load_digits()
    held_out = np.arange(len(digits.target)) % 5 == 4
    images, answers = (values[held_out == (split == "test")] for values in (digits.images, digits.target))
    if variant == "blank":
        images = np.zeros_like(images)
    if variant == "shuffled" and split == "train":
        answers = np.random.default_rng(0).permutation(answers)
    pixels = (images * (255 / 16)).round().astype(np.uint8)
    size = (DIGIT_PIXELS, DIGIT_PIXELS)
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict(
        {
            "images": [[PIL.fromarray(image).resize(size, PIL.Resampling.BICUBIC)] for image in pixels],
            "messages": [
                [{"role": "user", "content": DIGIT_QUESTION}, {"role": "assistant", "content": str(answer)}]
                for answer in answers
            ],
        },
        features=Features({"images": List(Image()), "messages": List(message)}),
    )


def without_decoding(feature: Any) -> Any:
    """The same features with images left as bytes, so that decoding them is ours to do and to report."""
    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(without_decoding(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return type(feature)({name: without_decoding(value) for name, value in feature.items()})
    return feature


class Rows:
    """One process' share of a dataset, in an order fixed by `seed` and the epoch; None keeps the dataset's order."""

    def __init__(
        self,
        source: str,
        dataset: Dataset | IterableDataset,
        rank: int = 0,
        world: int = 1,
        seed: int | None = None,
    ) -> None:
        self.source, self.rank, self.world, self.seed = source, rank, world, seed
        self.streamed = isinstance(dataset, IterableDataset)
        if not self.streamed and len(dataset) < world:
            raise ValueError(f"dataset {source} has {len(dataset)} rows, fewer than the {world} processes")
        self.total = None if self.streamed else len(dataset)
        columns = dataset.column_names
        if columns is not None and not ("messages" in columns or {"prompt", "completion"} <= set(columns)):
            raise ValueError(
                f"dataset {source} has neither a column `messages` nor the columns `prompt` and `completion`, "
                f"only {', '.join(columns)}"
            )
        self.dataset = dataset

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and content of this process' rows of one epoch, after the first `skip` of them."""
        if self.streamed:
            stream = split_dataset_by_node(self.dataset, self.rank, self.world)
            if self.seed is not None:
                stream = stream.shuffle(seed=self.seed, buffer_size=SHUFFLE_BUFFER)
            stream.set_epoch(epoch)
            stream = stream.skip(skip)
            names = (f"row {i} of the stream" for i in count(skip))
        else:
            order = Dataset.from_dict({"row": range(self.total)})
            if self.seed is not None:
                order = order.shuffle(seed=self.seed + epoch, keep_in_memory=True)
            rows = list(split_dataset_by_node(order, self.rank, self.world)["row"])[skip:]
            stream = self.dataset.select(rows).to_iterable_dataset()
            names = (f"row {row}" for row in rows)
        if stream.features is not None:
            stream = stream.cast(without_decoding(stream.features))
        for name, row in zip(names, stream, strict=False):
            yield f"{self.source}, {name}", row


def read_chat(name: str, row: dict[str, Any], folder: Path | None = None) -> Chat:
    """A dataset row as a chat with decoded images.

    Raises ValueError that names the row and the field, UnreadableImageError where an image cannot be decoded.
    """
    if row.get("messages") is not None:
        messages, context = as_messages(name, "messages", row["messages"], "user"), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = as_messages(name, "prompt", row["prompt"], "user")
        messages, context = prompt + as_messages(name, "completion", row["completion"], "assistant"), len(prompt)
    else:
        raise ValueError(f"{name}: neither `messages` nor `prompt` and `completion` are filled, only {', '.join(row)}")
    images = row.get("images", row.get("image"))
    images = [] if images is None else images if isinstance(images, list) else [images]
    return Chat(name, place_images(name, messages, [read_image(name, image, folder) for image in images]), context)


def as_messages(name: str, column: str, value: Any, role: str) -> list[dict[str, Any]]:
    """A text becomes one message of `role`; a list is checked and freed of the empty fields that tables add."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m and "content" in m for m in value):
        raise ValueError(f"{name}: `{column}` must be a list of messages with `role` and `content`")
    messages = [{key: field for key, field in message.items() if field is not None} for message in value]
    for message in messages:
        content = message.setdefault("content", "")
        if not isinstance(content, str):
            message["content"] = [{key: v for key, v in part.items() if v is not None} for part in content]
    return messages


def read_image(name: str, image: Any, folder: Path | None) -> Any:
    """Decode one image; relative paths start from the dataset's folder."""
    if isinstance(image, dict) and image.get("bytes") is None:
        image = image.get("path")
    if isinstance(image, str) and folder is not None and "://" not in image:
        image = str(folder / image)
    try:
        return load_image(image)
    except ValueError as error:
        raise UnreadableImageError(f"{name}: {one_line(error)}") from error


def place_images(name: str, messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Put the images into the content parts that wait for one, in order."""
    parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"] if p.get("type") == "image"]
    if images and not parts:
        first = next((m for m in messages if m["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{name}: `images` holds {len(images)} but `messages` has no user message to show them in")
        text = first["content"]
        parts = [{"type": "image"} for _ in images]
        first["content"] = parts + ([{"type": "text", "text": text}] if isinstance(text, str) else text)
    if len(parts) != len(images):
        raise ValueError(f"{name}: `messages` has {len(parts)} image placeholders but `images` holds {len(images)}")
    for part, image in zip(parts, images, strict=True):
        part["image"] = image
    return messages


def encode_chat(processor: Any, chat: Chat, thinking: bool = False) -> Sample:
    """Token ids of a chat, with labels where the assistant speaks after the context and -100 elsewhere."""
    try:
        encoded = processor.apply_chat_template(
            chat.messages,
            thinking=thinking,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
    except ValueError as error:
        raise ValueError(f"{chat.name}: {one_line(error)}") from error
    ids = encoded["input_ids"].flatten()
    spoken = torch.as_tensor(encoded["assistant_masks"]).flatten().bool()
    # an assistant message is one run of the mask: the runs of the context are read, not learned
    starts = spoken & ~spoken.roll(1)
    starts[0] = spoken[0]
    in_context = sum(message["role"] == "assistant" for message in chat.messages[: chat.context])
    spoken &= starts.cumsum(0) > in_context
    labels = torch.where(spoken, ids, IGNORE)
    # nothing precedes the first token, in a packed row either
    labels[0] = IGNORE
    if not count_loss_tokens(labels[None]):
        raise ValueError(f"{chat.name}: no assistant message to learn from")
    return Sample(ids, labels, encoded.get("pixel_values"), encoded.get("grid_thws"))


def encode_prompt(processor: Any, chat: Chat, thinking: bool = False) -> Sample:
    """Token ids of everything before the answer, ready to be continued; nothing to learn."""
    encoded = processor.apply_chat_template(
        chat.prompt,
        thinking=thinking,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids = encoded["input_ids"].flatten()
    return Sample(ids, torch.full_like(ids, IGNORE), encoded.get("pixel_values"), encoded.get("grid_thws"))


def image_inputs(samples: list[Sample]) -> dict[str, Tensor]:
    """Patches [P, 3, 14, 14] and grids [images, 3] of all samples in reading order; empty without images."""
    with_images = [sample for sample in samples if sample.pixel_values is not None]
    if not with_images:
        return {}
    return {
        "pixel_values": torch.cat([sample.pixel_values for sample in with_images]),
        "grid_thws": torch.cat([sample.grid_thws for sample in with_images]),
    }


def pad(samples: list[Sample], pad_id: int, left: bool = False) -> dict[str, Tensor]:
    """Samples as the rows of one batch [B, T] with `attention_mask`, padded at the end, or in front to generate."""
    side = "left" if left else "right"

    def stack(rows: list[Tensor], fill: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

    return {
        "input_ids": stack([sample.input_ids for sample in samples], pad_id),
        "attention_mask": stack([torch.ones_like(sample.input_ids) for sample in samples], 0),
        "labels": stack([sample.labels for sample in samples], IGNORE),
        **image_inputs(samples),
    }


def pack(samples: list[Sample]) -> dict[str, Tensor]:
    """Samples one after the other in one row [1, T], with their boundaries `cu_seqlens` int32 [samples + 1]."""
    lengths = torch.tensor([0, *map(len, samples)])
    return {
        "input_ids": torch.cat([sample.input_ids for sample in samples])[None],
        "labels": torch.cat([sample.labels for sample in samples])[None],
        "cu_seqlens": lengths.cumsum(0).int(),
        **image_inputs(samples),
    }


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`, longest first, each in the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


class Batches:
    """Endless stream of one process' training batches that can be left and continued at any batch.

    A batch holds `batch_size` samples padded to the longest, or, with `packing`, one row of at most
    batch_size * max_length tokens without any padding. Samples longer than `max_length` tokens are dropped and
    counted, never cut. An epoch ends with a smaller batch, so that every row is seen once.
    """

    def __init__(
        self,
        rows: Rows,
        encode: Callable[[str, dict[str, Any]], Sample],
        *,
        batch_size: int,
        max_length: int,
        pad_id: int,
        packing: bool = False,
        skip_bad_images: bool = False,
    ) -> None:
        self.rows, self.encode = rows, encode
        self.batch_size, self.max_length, self.pad_id = batch_size, max_length, pad_id
        self.packing, self.skip_bad_images = packing, skip_bad_images
        # position: the epoch, the rows of it before the open window, and the batches of that window already given
        self.epoch = self.row = self.given = 0
        # since the start of the run
        self.rows_seen = self.too_long = self.bad_images = 0

    def state_dict(self) -> dict[str, int]:
        names = ("epoch", "row", "given", "rows_seen", "too_long", "bad_images")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            useful = self.row > 0
            for samples, n_rows, too_long, bad_images in self._windows():
                groups = self._groups(samples)
                if self.given == 0:
                    self.too_long += too_long
                    self.bad_images += bad_images
                    self.rows_seen += n_rows - len(samples)
                for group in groups[self.given :]:
                    self.given += 1
                    self.rows_seen += len(group)
                    yield pack(group) if self.packing else pad(group, self.pad_id)
                useful |= bool(samples)
                self.row += n_rows
                self.given = 0
            if not useful:
                raise ValueError(
                    f"dataset {self.rows.source} gives nothing to train on: {self.too_long} samples are longer than "
                    f"--max_length {self.max_length}, {self.bad_images} images are unreadable"
                )
            self.epoch += 1
            self.row = 0

    def _windows(self) -> Iterator[tuple[list[Sample], int, int, int]]:
        """(usable samples, rows read, rows too long, rows with a bad image) of the rest of the epoch, in portions."""
        samples: list[Sample] = []
        n_rows = too_long = bad_images = 0
        for name, row in self.rows.epoch(self.epoch, self.row):
            n_rows += 1
            try:
                sample = self.encode(name, row)
            except UnreadableImageError:
                if not self.skip_bad_images:
                    raise
                bad_images += 1
                continue
            if len(sample) > self.max_length:
                too_long += 1
                continue
            samples.append(sample)
            if self._full(samples):
                yield samples, n_rows, too_long, bad_images
                samples = []
                n_rows = too_long = bad_images = 0
        if n_rows:
            yield samples, n_rows, too_long, bad_images

    def _full(self, samples: list[Sample]) -> bool:
        if self.packing:
            return sum(map(len, samples)) >= PACKING_WINDOW * self.batch_size * self.max_length
        return len(samples) == self.batch_size

    def _groups(self, samples: list[Sample]) -> list[list[Sample]]:
        if not self.packing:
            return [samples] if samples else []
        bins = first_fit([len(sample) for sample in samples], self.batch_size * self.max_length)
        return [[samples[i] for i in members] for members in bins]
