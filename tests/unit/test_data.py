"""From dataset rows to batches: every format, every mistake in a row, packing, order and resume."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PIL

from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.tokenization_latentmoe import tiny_tokenizer
from modeling_latentmoe.training import data
from modeling_latentmoe.training.rows import Rows, handwritten_digits, open_dataset

CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "a square"}]


@pytest.fixture(scope="module")
def processor() -> LatentMoEProcessor:
    return LatentMoEProcessor(
        LatentMoEImageProcessor(),
        tiny_tokenizer(["What is it? a red square message role user assistant response"] * 9),
    )


def picture(size: int = 28, colour: tuple[int, int, int] = (200, 0, 0)) -> PIL.Image:
    return PIL.new("RGB", (size, size), colour)


def table(n: int = 10) -> Dataset:
    """Rows whose answers are their numbers; images of even and of odd rows differ in size."""
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict(
        {
            "images": [[picture(28 + 28 * (i % 2))] for i in range(n)],
            "messages": [[CHAT[0], {"role": "assistant", "content": str(i)}] for i in range(n)],
        },
        features=Features({"images": List(Image()), "messages": List(message)}),
    )


def batches(rows: Rows, processor: LatentMoEProcessor, **options: Any) -> data.Batches:
    defaults = {"batch_size": 4, "max_length": 512, "pad_id": processor.tokenizer.pad_token_id}

    def encode(name: str, row: dict[str, Any]) -> data.Sample:
        return data.encode_chat(processor, data.read_chat(name, row))

    return data.Batches(rows, encode, **(defaults | options))


def answers(batch: dict[str, torch.Tensor], processor: LatentMoEProcessor) -> list[str]:
    """The texts that a batch trains, in order."""
    rows = []
    for labels in batch["labels"]:
        learned = labels[labels != data.IGNORE].tolist()
        text = processor.tokenizer.decode(learned)
        rows += [piece.split("<|close|>")[0] for piece in text.split("<|end_of_msg|>")[:-1]]
    return [row.split("<|sep|>")[-1] for row in rows]


# --- sources


def write_source(kind: str, folder: Path) -> str:
    """The same two rows in one of the formats; the name to open them by."""
    rows = [
        {"images": ["a.png"], "messages": CHAT},
        {"images": ["sub/b.png"], "messages": [CHAT[0], {"role": "assistant", "content": "another"}]},
    ]
    (folder / "sub").mkdir(parents=True)
    picture(28).save(folder / "a.png")
    picture(56).save(folder / "sub" / "b.png")
    if kind in ("jsonl", "json folder"):
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / "rows.jsonl") if kind == "jsonl" else str(folder)
    if kind == "image folder":
        names = ("a.png", "sub/b.png")
        lines = [{"file_name": name, "messages": row["messages"]} for name, row in zip(names, rows, strict=True)]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder)
    loaded = [{**row, "images": [PIL.open(folder / name) for name in row["images"]]} for row in rows]
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "messages": List(message)})
    dataset = Dataset.from_list(loaded, features=features)
    if kind == "parquet":
        dataset.to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    dataset.save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json folder", "image folder", "parquet", "saved"])
def test_every_source_gives_the_same_chats(kind: str, streaming: bool, tmp_path: Path) -> None:
    dataset, folder = open_dataset(write_source(kind, tmp_path / "d"), "train", streaming=streaming)
    chats = [data.read_chat(name, row, folder) for name, row in Rows("d", dataset).epoch(0)]
    assert [chat.answer for chat in chats] == ["a square", "another"]
    assert [chat.messages[0]["content"][0]["image"].size for chat in chats] == [(28, 28), (56, 56)]
    assert [chat.question for chat in chats] == ["What is it?"] * 2


def test_unknown_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    for source, words in {
        str(tmp_path / "empty"): "empty",
        str(tmp_path / "rows.txt"): "unknown file type",
        str(tmp_path / "broken.jsonl"): "broken.jsonl",
        str(tmp_path / "absent.parquet"): "absent.parquet",
        "digits:blurred": "digits:blank",
    }.items():
        with pytest.raises(ValueError, match=words) as error:
            open_dataset(source, "train")
        assert "\n" not in str(error.value)


def test_tables_of_one_folder_have_one_format(tmp_path: Path) -> None:
    line = json.dumps({"messages": CHAT}) + "\n"
    (tmp_path / "train.jsonl").write_text(line)
    (tmp_path / "train-2.json").write_text(line)
    assert len(open_dataset(str(tmp_path), "train")[0]) == 2
    (tmp_path / "a.csv").write_text("prompt,completion\n1,2\n")
    with pytest.raises(ValueError, match=r"mixes formats, a\.csv and train-2\.json"):
        open_dataset(str(tmp_path), "train")


def test_digits_split_is_disjoint_and_controls_differ_in_one_thing() -> None:
    train, test = handwritten_digits("train"), handwritten_digits("test")
    assert (len(train), len(test)) == (1442, 355)
    pixels = {split: {image[0].tobytes() for image in rows["images"]} for split, rows in (("a", train), ("b", test))}
    assert not pixels["a"] & pixels["b"]
    counts = torch.bincount(torch.tensor([int(m[1]["content"]) for m in test["messages"]]))
    assert counts.tolist() == pytest.approx([36] * 10, abs=2)
    blank, shuffled = handwritten_digits("test", "blank"), handwritten_digits("train", "shuffled")
    assert blank["messages"] == test["messages"] and len({i[0].tobytes() for i in blank["images"]}) == 1
    assert shuffled[0]["images"][0].tobytes() == train[0]["images"][0].tobytes()
    same = [a == b for a, b in zip(shuffled["messages"], train["messages"], strict=True)]
    assert sum(same) / len(same) < 0.15
    assert handwritten_digits("test", "shuffled")["messages"] == test["messages"]


def test_texts_stay_texts_beside_lists_of_parts(tmp_path: Path) -> None:
    """A column that mixes both is stored as JSON, and answers that look like JSON must not be read as
    such."""
    texts = ["1.50", "3", "null", "true", "plain", '{"a": 1}', "[1, 2]"]
    question = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        dataset, _ = open_dataset(str(tmp_path / "rows.jsonl"), "train", streaming=streaming)
        chats = [data.read_chat(name, row) for name, row in Rows("d", dataset).epoch(0)]
        assert [chat.answer for chat in chats] == texts
        assert all(chat.question == "?" for chat in chats)


def test_rows_are_split_over_processes_and_reshuffled_every_epoch() -> None:
    def order(rank: int, epoch: int, seed: int = 3) -> list[str]:
        rows = Rows("d", table(), rank, 3, seed).epoch(epoch)
        return [row["messages"][1]["content"] for _, row in rows]

    assert sorted(order(0, 0) + order(1, 0) + order(2, 0), key=int) == [str(i) for i in range(10)]
    assert order(0, 0) == order(0, 0) != order(0, 1)
    assert order(0, 0) != order(0, 0, seed=4)
    streamed = table().to_iterable_dataset(num_shards=1)
    seen = [row["messages"][1]["content"] for rank in range(3) for _, row in Rows("d", streamed, rank, 3, 0).epoch(0)]
    assert sorted(seen, key=int) == [str(i) for i in range(10)]


def test_fewer_rows_than_processes_and_missing_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset d has 2 rows, fewer than the 3 processes"):
        Rows("d", table(2), 0, 3, seed=0)
    # held-out rows, which are not shuffled, may be few: the third process has none
    assert [len(list(Rows("d", table(2), rank, 3).epoch(0))) for rank in range(3)] == [1, 1, 0]
    with pytest.raises(ValueError, match=r"neither a column `messages`.*only images, text"):
        Rows("d", Dataset.from_dict({"images": [1], "text": ["x"]}))


# --- chats


def test_prompt_and_completion_are_a_chat() -> None:
    chat = data.read_chat("row 0", {"prompt": "What?", "completion": "That.", "image": picture()})
    assert chat.context == 1 and chat.answer == "That."
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[0]["content"][1] == {"type": "text", "text": "What?"}


def test_images_go_where_their_parts_are() -> None:
    first, second = picture(28), picture(56)
    parts = [{"type": "text", "text": "before"}, {"type": "image"}, {"type": "text", "text": "after"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "image", "text": None}]},
        {"role": "assistant", "content": "ok"},
    ]
    chat = data.read_chat("row 0", {"messages": messages, "images": [first, second]})
    assert chat.messages[0]["content"][1]["image"].size == (28, 28)
    assert chat.messages[2]["content"] == [{"type": "image", "image": second}]


def test_parts_may_carry_their_own_images(tmp_path: Path) -> None:
    sizes = {"a.png": 28, "b.png": 56, "c.png": 84}
    for name, size in sizes.items():
        picture(size).save(tmp_path / name)
    parts = [
        {"type": "image", "path": "a.png"},
        {"type": "image", "image": "b.png"},
        {"type": "image_url", "image_url": {"url": "c.png"}},
    ]
    chat = data.read_chat("row 0", {"messages": [{"role": "user", "content": parts}, CHAT[1]]}, tmp_path)
    assert [part["image"].size[0] for part in chat.messages[0]["content"]] == [28, 56, 84]
    mixed = {"messages": [{"role": "user", "content": [{"type": "image"}, parts[0]]}, CHAT[1]]}
    chat = data.read_chat("row 0", {**mixed, "images": [picture(14)]}, tmp_path)
    assert [part["image"].size[0] for part in chat.messages[0]["content"]] == [14, 28]
    with pytest.raises(ValueError, match="`messages` has 1 image placeholders but `images` holds 2"):
        data.read_chat("row 0", {**mixed, "images": [picture(14)] * 2}, tmp_path)
    with pytest.raises(data.UnreadableImageError, match=r"row 0: .*no\.png"):
        part = {"type": "image", "path": "no.png"}
        data.read_chat("row 0", {"messages": [{"role": "user", "content": [part]}, CHAT[1]]}, tmp_path)


def test_question_of_a_chat_without_a_user() -> None:
    messages = [{"role": "system", "content": "s"}, CHAT[1]]
    assert data.read_chat("row 0", {"messages": messages}).question == ""
    chats = [{"messages": messages}, {"messages": CHAT}]
    assert data.Chats(Rows("d", Dataset.from_list(chats)), None, 2).question() == "What is it?"
    assert data.Chats(Rows("d", Dataset.from_list(chats)), None, 1).question() == ""


def test_tool_calls_are_read() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"name": "g"}]
    chat = data.read_chat("row 0", {"messages": [CHAT[0], {"role": "assistant", "tool_calls": calls}]})
    assert chat.messages[1] == {"role": "assistant", "tool_calls": calls, "content": ""}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "row 4: `messages` is an empty list"),
        ({"messages": [{"content": [{"type": "text", "text": "x"}]}]}, "row 4: `messages` must be a list of messages"),
        ({"messages": [{"role": "assistant", "tool_calls": "zzz"}]}, "row 4: `tool_calls` must be a list of calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "row 4: `tool_calls` must be a"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "row 4: `tool_calls` must be a list of calls"),
        ({"messages": CHAT, "images": ["no.png"]}, r"d, row 4: .*no\.png"),
        ({"messages": CHAT, "images": [{"bytes": b"junk", "path": "x.png"}]}, r"row 4: .*x\.png"),
        ({"prompt": "x"}, r"row 4: neither `messages` nor `prompt` and `completion`"),
        ({"messages": [{"from": "human"}]}, r"row 4: `messages` must be a list of messages"),
        ({"messages": [{"role": "user", "content": 3}]}, r"row 4: `messages` must be a list of messages"),
        ({"prompt": "x", "completion": 3}, r"row 4: `completion` must be a list of messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 image placeholders but .* holds 0",
        ),
        ({"messages": CHAT[1:], "images": [PIL.new("RGB", (9, 9))]}, "no user message"),
    ],
)
def test_mistakes_in_a_row_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        data.read_chat("d, row 4", row, tmp_path)


def test_placeholders_and_images_must_match() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, CHAT[1]]
    with pytest.raises(ValueError, match="row 4: `messages` has 2 image placeholders but `images` holds 1"):
        data.read_chat("row 4", {"messages": messages, "images": [picture()]})


# --- samples


def test_only_the_assistant_is_learned(processor: LatentMoEProcessor) -> None:
    chat = data.read_chat("r", {"messages": [*CHAT, *CHAT], "images": [picture()]})
    sample = data.encode_chat(processor, chat)
    learned = processor.tokenizer.decode(sample.labels[sample.labels != data.IGNORE])
    response = "<|open|>response<|sep|>a square<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert learned == 2 * response
    assert (sample.labels[sample.input_ids == processor.image_token_id] == data.IGNORE).all()
    assert sample.pixel_values.shape[1:] == (3, 14, 14) and sample.grid_thws.tolist() == [[1, 2, 2]]


def test_assistant_turns_of_a_prompt_are_not_learned(processor: LatentMoEProcessor) -> None:
    chat = data.read_chat("r", {"prompt": [*CHAT, CHAT[0]], "completion": "a red square"})
    sample = data.encode_chat(processor, chat)
    learned = processor.tokenizer.decode(sample.labels[sample.labels != data.IGNORE])
    assert learned.startswith("<|open|>response<|sep|>a red square<|close|>") and learned.count("response") == 2


def test_a_chat_without_an_answer_is_refused(processor: LatentMoEProcessor) -> None:
    with pytest.raises(ValueError, match="row 3: no assistant message"):
        data.encode_chat(processor, data.Chat("row 3", CHAT[:1]))


def test_prompt_is_the_beginning_of_the_sample(processor: LatentMoEProcessor) -> None:
    chat = data.read_chat("r", {"messages": CHAT, "images": [picture()]})
    prompt, sample = data.encode_prompt(processor, chat), data.encode_chat(processor, chat)
    assert torch.equal(sample.input_ids[: len(prompt)], prompt.input_ids)
    assert processor.tokenizer.decode(sample.input_ids[len(prompt) :]).startswith("a square<|close|>")


# --- batches


def test_padding_on_either_side() -> None:
    short, long = (data.Sample(torch.arange(1, n), torch.arange(1, n)) for n in (3, 5))
    right, left = data.pad([short, long], 0), data.pad([short, long], 0, left=True)
    assert right["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert right["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, 4]]
    assert right["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert left["input_ids"].tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert left["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_padding_is_not_counted() -> None:
    samples = [data.Sample(torch.arange(1, n), torch.arange(1, n)) for n in (3, 5)]
    assert data.count_tokens(data.pad(samples, 0)) == data.count_tokens(data.pack(samples)) == 6


def test_first_fit_fills_bins() -> None:
    assert data.first_fit([5, 3, 7, 2, 4], 10) == [[2, 1], [0, 4], [3]]
    assert data.first_fit([10, 10], 10) == [[0], [1]]
    lengths = torch.randint(1, 100, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = data.first_fit(lengths, 100)
    assert sorted(i for members in bins for i in members) == list(range(200))
    assert all(sum(lengths[i] for i in members) <= 100 for members in bins)
    assert len(bins) <= 1.25 * sum(lengths) / 100 + 1


def test_an_epoch_holds_every_row_once(processor: LatentMoEProcessor) -> None:
    stream = iter(source := batches(Rows("d", table(), seed=0), processor))
    sizes, seen = [], []
    for _ in range(3):
        batch = next(stream)
        sizes.append(len(batch["input_ids"]))
        seen += answers(batch, processor)
        patches = batch["grid_thws"].prod(1).sum()
        assert len(batch["pixel_values"]) == patches
        assert (batch["input_ids"] == processor.image_token_id).sum() * 4 == patches
    assert sizes == [4, 4, 2] and sorted(seen, key=int) == [str(i) for i in range(10)]
    assert source.rows_seen == 10
    next(stream)
    assert source.rows_seen == 14 and source.epoch == 1


def test_packed_rows_have_boundaries_and_no_padding(processor: LatentMoEProcessor) -> None:
    rows = Rows("d", table(), seed=0)
    stream = iter(source := batches(rows, processor, packing=True, batch_size=2, max_length=60))
    seen = []
    while source.rows_seen < 10:
        batch = next(stream)
        ids, borders = batch["input_ids"], batch["cu_seqlens"]
        assert ids.shape[0] == 1 and ids.shape[1] <= 120 and "attention_mask" not in batch
        assert borders[0] == 0 and borders[-1] == ids.shape[1] and borders.dtype == torch.int32
        assert (borders.diff() > 0).all(), "an empty document has a boundary of its own"
        assert not (ids == processor.tokenizer.pad_token_id).any()
        assert (batch["labels"][0, borders[:-1].long()] == data.IGNORE).all()
        assert len(batch["grid_thws"]) == len(borders) - 1
        seen += answers(batch, processor)
    assert sorted(seen, key=int) == [str(i) for i in range(10)]


def test_long_samples_are_dropped_whole_and_counted(processor: LatentMoEProcessor) -> None:
    rows = Rows("d", table(), seed=0)
    lengths = {len(batches(rows, processor).encode(name, row)) for name, row in rows.epoch(0)}
    assert len(lengths) == 2, "odd rows have a larger image"
    source = batches(rows, processor, max_length=min(lengths))
    stream = iter(source)
    seen = answers(next(stream), processor) + answers(next(stream), processor)
    assert sorted(seen, key=int) == ["0", "2", "4", "6", "8"]
    assert source.too_long == 5
    with pytest.raises(ValueError, match=r"nothing to train on: 10 samples exceed --max_length 5"):
        next(iter(batches(rows, processor, max_length=5)))


def test_a_share_without_usable_rows_waits_for_the_next_epoch(processor: LatentMoEProcessor) -> None:
    """Of four rows one is short enough: in every epoch one of two processes has nothing."""
    texts = ["3"] + ["3 " * 40] * 3
    dataset = Dataset.from_list([{"prompt": "Which digit is this?", "completion": text} for text in texts])
    limit = len(data.encode_chat(processor, data.read_chat("d", dataset[0])))
    owners = [
        len([row for row in Rows("d", dataset, 0, 2, 0).epoch(epoch) if row[0] == "d, row 0"]) for epoch in range(9)
    ]
    assert {0, 1} == set(owners)
    for rank in range(2):
        source = batches(Rows("d", dataset, rank, 2, seed=0), processor, max_length=limit)
        assert [answers(batch, processor) for batch in islice(source, 3)] == [["3"]] * 3
        with pytest.raises(ValueError, match="nothing to train on: 2 samples exceed"):
            next(iter(batches(Rows("d", dataset, rank, 2, seed=0), processor, max_length=limit - 1)))


def test_bad_images_stop_the_run_or_are_counted(processor: LatentMoEProcessor) -> None:
    rows = [{"images": [{"bytes": None, "path": f"{i}.png"}], "messages": CHAT} for i in range(3)]
    rows += [{"images": [], "messages": CHAT}]
    features = Features({"images": List(Image()), "messages": List({k: Value("string") for k in CHAT[0]})})
    dataset = Dataset.from_list(rows, features=features)
    with pytest.raises(data.UnreadableImageError, match=r"d, row \d: .*\d\.png"):
        next(iter(batches(Rows("d", dataset), processor)))
    source = batches(Rows("d", dataset), processor, skip_bad_images=True)
    assert len(next(iter(source))["input_ids"]) == 1
    assert source.bad_images == 3 and source.rows_seen == 4


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_continuing_gives_exactly_the_remaining_batches(
    packing: bool, streamed: bool, processor: LatentMoEProcessor
) -> None:
    dataset = table().to_iterable_dataset() if streamed else table()

    def make() -> data.Batches:
        rows = Rows("d", dataset, seed=1)
        return batches(rows, processor, packing=packing, batch_size=2, max_length=60)

    whole = make()
    stream, states, expected = iter(whole), [], []
    for _ in range(12):
        expected.append(next(stream))
        states.append(whole.state_dict())
    for done in (1, 2, 5, 6, 9):
        again = make()
        again.load_state_dict(states[done - 1])
        continued = iter(again)
        for batch, state in zip(expected[done:], states[done:], strict=True):
            other = next(continued)
            assert batch.keys() == other.keys() and all(torch.equal(batch[k], other[k]) for k in batch)
            assert again.state_dict() == state
