"""Rows -> chats -> token samples -> batches.

A row holds `messages` (a chat), or `prompt` and `completion` (texts or chats), and optionally `images` (or
`image`). An image stands where a message's content has a part {"type": "image"}; a chat without such parts
gets its images in front of the first user message. A part may also carry its image itself, as "image",
"image_url", "url" or "path", and takes none of `images` then.

Legend: B batch, T tokens, P image patches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from modeling_latentmoe.image_processing_latentmoe import load_image
from modeling_latentmoe.training.loss import IGNORE, count_loss_tokens
from modeling_latentmoe.training.rows import History, Rows, one_line

PACKING_WINDOW = 8  # packed rows that are filled together
# what a state of Batches says: where it is, and what is summed over processes
POSITION = ("epoch", "row", "given", "given_rows", "history")
COUNTERS = ("rows_seen", "too_long", "bad_images")
# fields of a content part that hold its image
OWN_IMAGE = ("image", "image_url", "url", "path")


class UnreadableImageError(ValueError):
    """An image of a row cannot be decoded."""


@dataclass(frozen=True)
class Chat:
    """One conversation with its decoded images inside the content parts.

    `name` says where it comes from, in words for messages; the first `context` messages are read, never
    learned.
    """

    name: str
    messages: list[dict[str, Any]]
    context: int = 0

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """Everything before the last message, which is the answer."""
        return self.messages[:-1]

    @property
    def question(self) -> str:
        """Text of the last user message, empty if there is none."""
        return next((text_of(message) for message in reversed(self.messages) if message["role"] == "user"), "")

    @property
    def answer(self) -> str:
        """Text of the last message; ValueError unless the assistant says it."""
        if self.messages[-1]["role"] != "assistant":
            raise ValueError(f"{self.name}: the last message of a held-out chat must be the assistant's")
        return text_of(self.messages[-1])


def text_of(message: dict[str, Any]) -> str:
    """A message's text, without its images."""
    content = message["content"]
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


def read_chat(name: str, row: dict[str, Any], folder: Path | None = None) -> Chat:
    """A dataset row as a chat with decoded images.

    Raises ValueError that names the row and the field, UnreadableImageError where an image cannot be decoded.
    """
    if row.get("messages") is not None:
        messages, context = as_messages(name, "messages", row["messages"], "user"), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = as_messages(name, "prompt", row["prompt"], "user")
        messages, context = (
            prompt + as_messages(name, "completion", row["completion"], "assistant"),
            len(prompt),
        )
    else:
        raise ValueError(f"{name}: neither `messages` nor `prompt` and `completion` are filled, only {', '.join(row)}")
    images = row.get("images", row.get("image"))
    images = [] if images is None else images if isinstance(images, list) else [images]
    images = [read_image(name, image, folder) for image in images]
    return Chat(name, place_images(name, messages, images, folder), context)


def as_messages(name: str, column: str, value: Any, role: str) -> list[dict[str, Any]]:
    """A text becomes one message of `role`; a list is checked and freed of the empty fields that tables add."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    mistake = ValueError(f"{name}: `{column}` must be a list of messages with `role` and `content`")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise mistake
    if not value:
        raise ValueError(f"{name}: `{column}` is an empty list")
    messages = [{key: field for key, field in message.items() if field is not None} for message in value]
    for message in messages:
        # only a message of tool calls alone has no content
        content = message.setdefault("content", "") if "tool_calls" in message else message.get("content")
        if "role" not in message:
            raise mistake
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            message["content"] = [{key: v for key, v in part.items() if v is not None} for part in content]
        elif not isinstance(content, str):
            raise mistake
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(map(is_call, calls)):
            raise ValueError(f"{name}: `tool_calls` must be a list of calls with `name` and `arguments`")
    return messages


def is_call(call: Any) -> bool:
    """Whether it is a mapping with the name of a function, or holds one as its `function`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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


def place_images(
    name: str, messages: list[dict[str, Any]], images: list[Any], folder: Path | None
) -> list[dict[str, Any]]:
    """Decode the images that content parts carry, and put `images` into the other image parts, in order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    places = [part for parts in contents for part in parts if part.get("type") in ("image", "image_url")]
    parts = []
    for part in places:
        own = next((part[field] for field in OWN_IMAGE if field in part), None)
        if own is None:
            parts.append(part)
        else:
            part["image"] = read_image(name, own["url"] if isinstance(own, dict) and "url" in own else own, folder)
    if images and not places:
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


class Chats:
    """The first `limit` chats of `rows`, read again at every iteration."""

    def __init__(self, rows: Rows, folder: Path | None, limit: int, skip_bad_images: bool = False) -> None:
        self.rows, self.folder, self.limit, self.skip_bad_images = rows, folder, limit, skip_bad_images

    def __iter__(self) -> Iterator[Chat]:
        for name, row in islice(self.rows.epoch(0), self.limit):
            try:
                yield read_chat(name, row, self.folder)
            except UnreadableImageError:
                if not self.skip_bad_images:
                    raise

    def question(self) -> str:
        """What a user asks in the first of them where one does; empty if none does."""
        return next((chat.question for chat in self if chat.question), "")


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


def with_images(batch: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """`batch`, with no images at all instead of none mentioned, for a model that has a tower.

    The tower then runs, on no patches: processes that share its weights need each other whenever it runs, and every
    process has gradients of the projector's adapters, if only zeros.
    """
    if config.vision_config is None or "pixel_values" in batch:
        return batch
    patch = config.vision_config.patch_size
    return {
        **batch,
        "pixel_values": torch.empty(0, 3, patch, patch),
        "grid_thws": torch.empty(0, 3, dtype=torch.int64),
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


def count_tokens(batch: dict[str, Tensor]) -> int:
    """Number of tokens of a batch; padding is none."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


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
    batch_size * max_length tokens without any padding. Samples longer than `max_length` tokens are dropped
    and counted, never cut. An epoch ends with a smaller batch, so that every row is seen once. Each process
    goes through the epochs on its own: they may be in different ones.
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
        # position: the epoch, the rows of this process' share before the open window, and the batches of that window
        # already given, with their rows
        self.epoch = self.row = self.given = self.given_rows = 0
        # what other numbers of processes took before, by epoch
        self.history: dict[int, History] = {}
        # since the start of the run; rows left out count when their window is finished
        self.rows_seen = self.too_long = self.bad_images = 0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*POSITION, *COUNTERS)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            # what others have left of an epoch may be nothing
            useful = self.row > 0 or self.epoch in self.history
            for samples, n_rows, too_long, bad_images in self._windows():
                useful |= bool(samples)
                # an empty group stands for rows that are all left out
                groups = self._groups(samples) or [[]]
                for group in groups[self.given :]:
                    self.given += 1
                    self.given_rows += len(group)
                    self.rows_seen += len(group)
                    # finished before its last batch is out: a state saved then has nothing of it to read again
                    if self.given == len(groups):
                        self.row += n_rows
                        self.given = self.given_rows = 0
                        self.rows_seen += n_rows - len(samples)
                        self.too_long += too_long
                        self.bad_images += bad_images
                    if group:
                        yield pack(group) if self.packing else pad(group, self.pad_id)
            if not useful and not self._others_have_some():
                raise ValueError(
                    f"dataset {self.rows.source} gives nothing to train on: {self.too_long} samples exceed "
                    f"--max_length {self.max_length}, {self.bad_images} images are unreadable"
                )
            self.epoch += 1
            self.row = 0

    def _others_have_some(self) -> bool:
        """Whether a row of another process can be used: shares change with every epoch, so this one may get it next."""
        if self.rows.streamed or self.rows.seed is None or self.rows.world == 1:
            return False
        every = Rows(self.rows.source, self.rows.dataset, seed=self.rows.seed)
        options = {"pad_id": self.pad_id, "skip_bad_images": self.skip_bad_images}
        whole = Batches(every, self.encode, batch_size=1, max_length=self.max_length, **options)
        return any(samples for samples, *_ in whole._windows())

    def _windows(self) -> Iterator[tuple[list[Sample], int, int, int]]:
        """(usable samples, rows read, rows too long, rows with a bad image) of the rest of the epoch, in portions."""
        samples: list[Sample] = []
        n_rows = too_long = bad_images = 0
        for name, row in self.rows.epoch(self.epoch, self.row, self.history.get(self.epoch, ())):
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


def reshard(states: list[dict[str, Any]], rows: Rows) -> tuple[dict[str, Any], int]:
    """State of Batches for the process of `rows`, from those that all processes of a run saved, by rank; and the
    number of rows that are read a second time.

    As many processes as before continue exactly. Any other number shares what is left of every epoch, each row
    once. Only a packed window that was partly given is read again from its start: its rows in batches already
    given are the second number, over all processes. The first process goes on with the sums of the counters.
    Raises ValueError for a stream on another number of processes.
    """
    world = len(states)
    if world == rows.world:
        return states[rows.rank], 0
    if rows.streamed:
        raise ValueError(
            f"--resume: a run with --streaming continues on the same number of processes, {world}, not {rows.world}"
        )
    first, last = (which(state["epoch"] for state in states) for which in (min, max))
    # an earlier number of processes may have been in later epochs than these
    history = {epoch: taken for epoch, taken in states[0]["history"].items() if epoch >= first}
    for epoch in range(first, last + 1):
        before = history.get(epoch, [])
        left = rows.total - sum(map(sum, before))
        shares = [len(range(rank, left, world)) for rank in range(world)]
        # a process in a later epoch has taken its whole share of this one
        taken = [
            share if state["epoch"] > epoch else state["row"] if state["epoch"] == epoch else 0
            for state, share in zip(states, shares, strict=True)
        ]
        history[epoch] = [*before, taken]
    repeated = sum(state["given_rows"] for state in states)
    counters = dict.fromkeys(COUNTERS, 0)
    if rows.rank == 0:
        counters = {name: sum(state[name] for state in states) for name in COUNTERS}
        counters["rows_seen"] -= repeated
    return {"epoch": first, "row": 0, "given": 0, "given_rows": 0, "history": history, **counters}, repeated
