"""Datasets: open any kind by its name; give each process its rows, in an order that only the seed decides."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    Json,
    List,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError

FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
SHUFFLE_BUFFER = 1000  # rows of a streamed dataset that are shuffled together
DIGIT_QUESTION = "Which digit is this?"
DIGIT_PIXELS = 56

# What was taken of one epoch: for each number of processes that worked on it, one after the other, how many rows each
# of its processes took of its share. A share is every N-th of the rows that the ones before had left.
History = Sequence[Sequence[int]]


def is_digits(source: str) -> bool:
    """Whether `open_dataset` takes `source` for the handwritten digits, and not for a file or folder of that name."""
    return source.partition(":")[0] == "digits" and not Path(source).exists()


def open_dataset(
    source: str, split: str, config: str | None = None, streaming: bool = False
) -> tuple[Dataset | IterableDataset, Path | None]:
    """Open `source` and return its `split` with the folder that relative image paths start from.

    `source` is a parquet, JSON-lines, JSON, CSV or arrow file, a folder of such files, a folder of images
    with a metadata file, a folder written by `save_to_disk`, a Hub id, or "digits" (also "digits:blank" and
    "digits:shuffled", its controls). Raises ValueError that names the source.
    """
    path, digits = Path(source), is_digits(source)
    if config is not None and (digits or path.is_file()):
        raise ValueError(f"--dataset_config {config}: dataset {source} has no configurations, leave it out")
    if digits:
        return handwritten_digits(split, source.partition(":")[2]), None
    try:
        if path.is_dir() and any((path / file).exists() for file in ("dataset_info.json", "dataset_dict.json")):
            dataset = load_from_disk(source)
            if isinstance(dataset, DatasetDict):
                if split not in dataset:
                    raise ValueError(f"there is no split {split!r}, only {', '.join(dataset)}")
                dataset = dataset[split]
        elif path.is_file():
            if path.suffix not in FILE_FORMATS:
                raise ValueError(f"unknown file type, expected one of {' '.join(FILE_FORMATS)}")
            # one file is one split, whatever that split is called
            dataset = load_dataset(FILE_FORMATS[path.suffix], data_files=source, split="train", streaming=streaming)
        elif tables := table_files(path):
            kind, files = tables
            if split not in files:
                raise ValueError(f"there is no split {split!r}, only {', '.join(files)}")
            dataset = load_dataset(kind, data_files=files, split=split, streaming=streaming)
        else:
            dataset = load_dataset(source, config, split=split, streaming=streaming)
    except (DatasetsError, OSError) as error:
        # what datasets raises itself says only that something went wrong
        cause = one_line(error.__cause__ or error)
        raise ValueError(f"dataset {source} cannot be opened: {cause}") from error
    except StopIteration as error:
        # the JSON reader's way of saying that there is not one line
        raise ValueError(f"dataset {source} is empty") from error
    except ValueError as error:
        # how datasets puts that no line holds a row
        cause = "no row is in it" if "corresponds to no data" in str(error) else one_line(error)
        raise ValueError(f"dataset {source}: {cause}") from error
    return dataset, path if path.is_dir() else path.parent if path.is_file() else None


def table_files(folder: Path) -> tuple[str, dict[str, list[str]]] | None:
    """Format and files of each split of a folder that has tables, beside which images may lie; None without.

    The metadata file of an image folder is no table. Raises ValueError where tables have different formats.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    tables = [file for file in found if file.suffix in FILE_FORMATS and file.stem != "metadata"]
    if not tables:
        return None
    # the first file of each format
    formats = {FILE_FORMATS[file.suffix]: file.name for file in reversed(tables)}
    if len(formats) > 1:
        raise ValueError(f"the folder mixes formats, {' and '.join(sorted(formats.values()))}: name one file")
    suffixes = sorted({file.suffix for file in tables})
    patterns = get_data_patterns(str(folder))
    splits = DataFilesDict.from_patterns(patterns, base_path=str(folder), allowed_extensions=suffixes)
    return next(iter(formats)), {str(split): list(map(str, files)) for split, files in splits.items()}


def handwritten_digits(split: str, variant: str = "") -> Dataset:
    """scikit-learn's 1797 scanned digits as question-answer chats over images of 56 x 56 pixels.

    Every fifth image of each digit is held out (split "test"), whatever the seed. Variants are controls:
    "blank" replaces every image by an empty one, "shuffled" gives the images of the training split each
    other's answers.
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
    occurrence = np.zeros(len(digits.target), dtype=int)
    for digit in range(10):
        occurrence[digits.target == digit] = np.arange((digits.target == digit).sum())
    held_out = occurrence % 5 == 4
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


def recovered(feature: Any, value: Any, name: str = "") -> Any:
    """An undecoded value with its Json fields decoded; `name` is the field's.

    datasets makes a column of texts and lists (a chat's `content`) a Json column, and stores a text that
    happens to be JSON as it is: what is meant as the text "1.50" would come back as a number. Such a text
    stays a text here.
    """
    if value is None:
        return None
    if isinstance(feature, Json):
        decoded = json.loads(value)
        is_content = isinstance(decoded, str) or (
            isinstance(decoded, list) and all(isinstance(part, dict) for part in decoded)
        )
        return decoded if is_content or name != "content" else value
    if isinstance(feature, List):
        return [recovered(feature.feature, item, name) for item in value]
    if isinstance(feature, dict):
        return {key: recovered(part, value[key], key) for key, part in feature.items()}
    return value


def remaining(order: list[int], history: History) -> list[int]:
    """What is left of an epoch's `order` after every world of `history` took its part of it, in order."""
    for taken in history:
        world = len(taken)
        order = [row for place, row in enumerate(order) if place // world >= taken[place % world]]
    return order


class Rows:
    """One process' share of a dataset, in an order fixed by `seed` and the epoch; None keeps the dataset's
    order.

    Process r of N takes every N-th row of that order, beginning with the r-th. So the same rows are read
    together whatever the number of processes, and another number can go on where one stopped. A streamed
    dataset is dealt out as its files allow.
    """

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
        if not self.streamed and len(dataset) == 0:
            raise ValueError(f"dataset {source} is empty")
        # held-out rows, in their own order, may be fewer
        if not self.streamed and seed is not None and len(dataset) < world:
            raise ValueError(f"dataset {source} has {len(dataset)} rows, fewer than the {world} processes")
        self.total = None if self.streamed else len(dataset)
        columns = dataset.column_names
        if columns is not None and not columns:
            raise ValueError(f"dataset {source} is empty")
        if columns is not None and not ("messages" in columns or {"prompt", "completion"} <= set(columns)):
            raise ValueError(
                f"dataset {source} has neither a column `messages` nor the columns `prompt` and "
                f"`completion`, only {', '.join(columns)}"
            )
        self.dataset = dataset

    def epoch(self, epoch: int, skip: int = 0, history: History = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and content of this process' rows of one epoch, after the first `skip` of them.

        `history` is what other numbers of processes have taken of the epoch before; streams have none.
        """
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
            rows = remaining(list(order["row"]), history)[self.rank :: self.world][skip:]
            # datasets cannot iterate over no rows
            if not rows:
                return
            stream = self.dataset.select(rows).to_iterable_dataset()
            names = (f"row {row}" for row in rows)
        features = stream.features
        # images stay bytes, so that decoding them is ours to do and to report; without known features none is an image
        stream = iter(stream if features is None else stream.decode(False))
        for name in names:
            try:
                row = next(stream, None)
                if row is None:
                    return
                row = row if features is None else recovered(dict(features), row)
            except (DatasetsError, ValueError) as error:
                # a stream finds damage only here, and texts are decoded here
                raise ValueError(f"dataset {self.source}, {name} cannot be read: {one_line(error)}") from error
            yield f"{self.source}, {name}", row


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
