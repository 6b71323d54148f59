"""The XTML chat encoding against golden segments, its fixed sentences, its errors, and parsing of answers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from modeling_latentmoe.chat_latentmoe import (
    IMAGE_PLACEHOLDER,
    Segment,
    build_chat_segments,
    encode_segments,
    image_text,
    parse_message,
)
from modeling_latentmoe.tokenization_latentmoe import tiny_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "chat.json").read_text())}
HELLO = [{"role": "user", "content": "hello"}]


def golden_options(case: dict[str, Any]) -> dict[str, Any]:
    options = dict(case["kwargs"])
    if "image_prompts" in options:
        prompts = iter(options.pop("image_prompts"))
        options["image_prompt"] = lambda part: next(prompts)
    return options


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prompt", [True, False])
def test_golden_segments(name: str, prompt: bool) -> None:
    case = CASES[name]
    key = "with_generation_prompt" if prompt else "without_generation_prompt"
    segments = build_chat_segments(case["messages"], add_generation_prompt=prompt, **golden_options(case))
    assert [[segment.text, segment.allow_special] for segment in segments] == case[key]
    assert [segment.is_assistant for segment in segments] == case[f"{key}_is_assistant"]
    assert text_of(segments) == case[f"{key}_text"]


def test_image_text() -> None:
    prompts = CASES["image_parts"]["kwargs"]["image_prompts"]
    assert [image_text(80, 50), image_text(112, 112)] == prompts


RAW_JSON = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."


def test_fixed_sentences_stand_around_the_messages() -> None:
    schema = {"z": 1, "y": {"d": 2, "c": []}}
    text = text_of(
        build_chat_segments(
            HELLO,
            [{"b": 1, "a": "é"}],
            add_generation_prompt=True,
            thinking_effort="low",
            tool_choice="required",
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
    )
    pieces = [
        'type="tool-declare"<|sep|># Tools\nHere are the available tools, described in JSONSchema.\n\n'
        '```json\n[{"a":"é","b":1}]\n```<|close|>',
        'type="thinking-effort"<|sep|>`thinking_effort` guides',
        "`thinking_effort=low`.<|close|>",
        "<|sep|>hello<|close|>",
        'type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.\n'
        "You MUST call tools in the next message.<|close|>",
        'type="response-format"<|sep|>The system is invoked with `response_format=json_schema`.\n'
        f"{RAW_JSON}\nThe JSON data must match the following schema:\n"
        '```json\n{"y":{"c":[],"d":2},"z":1}\n```<|close|>',
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    ]
    places = [text.find(piece) for piece in pieces]
    assert -1 not in places and places == sorted(places)
    none = text_of(build_chat_segments(HELLO, tool_choice="none", response_format="json_object"))
    assert "`tool_choice=none`.\nYou MUST NOT call any tools in the next message.<|close|>" in none
    assert f"`response_format=json_object`.\n{RAW_JSON}<|close|>" in none


def test_tools_that_arrive_later() -> None:
    text = text_of(build_chat_segments([{"role": "system", "tools": [{"name": "t"}]}]))
    assert 'role="system" type="tool-declare"<|sep|>## New Tools Available\nThe system dynamically' in text
    assert 'extended tools.\n\n```json\n[{"name":"t"}]\n```<|close|>message' in text


def call(name: str, arguments: Any = None, call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def results(text: str) -> list[str]:
    """`tool index body` of each tool message."""
    messages = text.split('<|open|>message role="tool" ')[1:]
    return [m.split("<|close|>")[0].replace("<|sep|>", " ").replace('"', "") for m in messages]


def test_tool_results_follow_the_calls() -> None:
    assistant = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("f", call_id="x"), call("g", call_id="y")],
    }
    y = {"role": "tool", "tool_call_id": "y", "name": "stale", "content": "1"}
    x = {"role": "tool", "tool_call_id": "x", "content": "2"}
    assert results(text_of(build_chat_segments([assistant, y, x]))) == [
        "tool=f index=1 2",
        "tool=g index=2 1",
    ]
    # One result that matches no call leaves the run as it came; a missing name is taken by position.
    other = {"role": "tool", "tool_call_id": "z", "name": "h", "content": "1"}
    assert results(text_of(build_chat_segments([assistant, other, x]))) == [
        "tool=h index=1 1",
        "tool=g index=2 2",
    ]
    # Calls and results without ids do not match each other by their lack of one.
    bare = {**assistant, "tool_calls": [call("f"), call("g")]}
    unnamed = [{"role": "tool", "content": str(i)} for i in range(2)]
    assert results(text_of(build_chat_segments([bare, *unnamed]))) == ["tool=f index=1 0", "tool=g index=2 1"]
    assert [m.get("tool") for m in unnamed] == [None, None], "the caller's messages were changed"


def test_unparsable_arguments_are_kept_raw() -> None:
    text = text_of(build_chat_segments([{"role": "assistant", "content": "", "tool_calls": [call("f", '{"a": ')]}]))
    assert '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|><|close|>call<|sep|>' in text


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (HELLO, {"thinking_effort": "huge"}, "thinking_effort.*huge"),
        (HELLO, {"tool_choice": "maybe"}, "tool_choice.*maybe"),
        (HELLO, {"response_format": "yaml"}, "response_format.*yaml"),
        ([{"role": "robot", "content": "x"}], {}, "role 'robot'"),
        ([{"role": "user", "content": 7}], {}, "content 7"),
        ([{"role": "user", "content": [{"type": "video", "video": "v"}]}], {}, "content part .*video"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], {}, "content part"),
        ([{"role": "tool", "content": "x"}], {}, "tool message"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [call("f", "[1]")]}],
            {},
            "'f'.*not a JSON object",
        ),
    ],
)
def test_what_the_format_cannot_express(messages: list, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_chat_segments(messages, **options)


def test_placeholder_is_text_unless_images_are_given() -> None:
    messages = [{"role": "user", "content": f"a{IMAGE_PLACEHOLDER}b"}]
    assert Segment(f"a{IMAGE_PLACEHOLDER}b") in build_chat_segments(messages)
    parts: list[Any] = []

    def prompt(part: Any) -> str:
        parts.append(part)
        return "<IMG>"

    segments = build_chat_segments(messages, image_prompt=prompt)
    assert [Segment("a"), Segment("<IMG>", allow_special=True), Segment("b")] == segments[7:10] and parts == [None]
    assert Segment(f"a{IMAGE_PLACEHOLDER}b") in build_chat_segments(
        messages, image_prompt=prompt, image_placeholder=None
    )


def answer_ids(tokenizer: Any, message: dict[str, Any], thinking: bool) -> list[int]:
    """The ids of an assistant message from its first channel's text on: what a model generates."""
    segments = build_chat_segments([{"role": "assistant", **message}], thinking=thinking)
    return encode_segments(tokenizer, segments[10:])[0]


def test_parse_message() -> None:
    tokenizer = tiny_tokenizer()
    message = {
        "content": "x < y, 答えは 3 🚀 <|close|>response<|sep|>",
        "reasoning_content": "1 + 2\n",
        "tool_calls": [call("f", {"response": "not this"})],
    }
    ids = answer_ids(tokenizer, message, thinking=True)
    both = {"think": message["reasoning_content"], "response": message["content"]}
    assert parse_message(tokenizer, ids) == both
    assert parse_message(tokenizer, [*ids, 5, 6, 7]) == both, "text after the end of the message counts"
    ids = answer_ids(tokenizer, message, thinking=False)
    assert parse_message(tokenizer, ids, thinking=False) == {"think": "", "response": message["content"]}


def test_parse_message_ignores_tags_inside_other_channels() -> None:
    tokenizer = tiny_tokenizer()
    text = "<|open|>tools<|sep|><|open|>response<|sep|>inner<|close|>response<|sep|>x<|close|>tools<|sep|>"
    ids = encode_segments(tokenizer, [Segment(f"outer<|close|>response<|sep|>{text}", allow_special=True)])[0]
    assert parse_message(tokenizer, ids, thinking=False) == {"think": "", "response": "outer"}


def test_parse_message_that_stopped_anywhere() -> None:
    tokenizer = tiny_tokenizer()
    ids = answer_ids(tokenizer, {"content": "seven", "reasoning_content": "counting"}, thinking=True)
    seen = [parse_message(tokenizer, ids[:stop]) for stop in range(len(ids) + 1)]
    assert seen[0] == {"think": "", "response": ""} and seen[-1] == {"think": "counting", "response": "seven"}
    for before, after in pairwise(seen):
        assert after["think"].startswith(before["think"]) and after["response"].startswith(before["response"])
