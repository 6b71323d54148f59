"""XTML, the chat format of Kimi-K3: messages -> segments -> token ids, and generated ids -> an answer.

    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>

A conversation becomes a list of segments that are tokenised one by one. Only segments that the format itself
writes may hold special tokens, so a marker that a user types stays ordinary text. Nothing is put between
segments, and no [BOS] before them. Fixed sentences are part of the released format (Kimi-K3 chat encoding)
and must not be edited.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
# Stands for an image inside message text; never a token.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
THINKING_EFFORTS = ("low", "medium", "high", "max")

Message = Mapping[str, Any]
# Called for every image in reading order, with its content part, or None for a placeholder inside a text;
# returns the text that takes its place.
ImagePrompt = Callable[[Mapping[str, Any] | None], str]


class Segment(NamedTuple):
    """A piece of the prompt that is tokenised alone. `is_assistant` marks what the assistant wrote."""

    text: str
    allow_special: bool = False
    is_assistant: bool = False


def image_text(width: int, height: int) -> str:
    """What an image of this original size in pixels becomes; the processor repeats the pad per image row."""
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"


def build_chat_segments(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    image_prompt: ImagePrompt | None = None,
    image_placeholder: str | None = IMAGE_PLACEHOLDER,
) -> list[Segment]:
    """One conversation as segments.

    `thinking=False` leaves the think channel out of history and prompt, and the effort message with it.
    `thinking_effort` None writes no effort message. `tool_choice` is "auto", "required" or "none".
    `response_format` is "json_object" or an OpenAI-style {"type": "json_schema", "json_schema": ...}. Without
    `image_prompt` an image part becomes the placeholder string; with it, `image_placeholder` inside any text
    (None: no string) stands for an image as well. Raises ValueError for what the format cannot express.
    """
    images = _Images(image_prompt, image_placeholder)
    segments = list(_tool_declaration(tools, _TOOLS)) if tools else []
    if thinking and thinking_effort is not None:
        if thinking_effort not in THINKING_EFFORTS:
            raise ValueError(f"thinking_effort: {thinking_effort!r}, expected one of {', '.join(THINKING_EFFORTS)}")
        segments += _system("thinking-effort", _EFFORT.format(effort=thinking_effort))
    for message, tool_index in _number_tool_results(_in_call_order(messages)):
        segments += _message(message, tool_index, thinking, images)
    if tool_choice in _TOOL_CHOICE:
        segments += _system(
            "tool-choice",
            f"The system is invoked with `tool_choice={tool_choice}`.\n{_TOOL_CHOICE[tool_choice]}",
        )
    elif tool_choice not in (None, "auto"):
        raise ValueError(f"tool_choice: {tool_choice!r}, expected 'auto', 'required' or 'none'")
    if response_format is not None:
        segments += _system("response-format", _response_format(response_format))
    if add_generation_prompt:
        segments += [*_open("message", role="assistant"), *_open("think" if thinking else "response")]
    return segments


def refuse_unsupported(**options: Any) -> None:
    """Keywords of `apply_chat_template` in transformers that this format cannot honour.

    Raises ValueError naming the first that is set; None, False and empty values pass.
    """
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}: {value!r} is not supported: {_UNSUPPORTED[name]}")


def encode_segments(tokenizer: Any, segments: Iterable[Segment]) -> tuple[list[int], list[int]]:
    """Token ids and, of the same length, 1 where the assistant wrote the token and 0 elsewhere.

    `tokenizer` is any transformers tokenizer that has the markers as special tokens.
    """
    ids: list[int] = []
    mask: list[int] = []
    # Tags repeat many times in a conversation, and a call of the tokenizer costs far more than a lookup.
    known: dict[tuple[str, bool], list[int]] = {}
    for text, allow_special, is_assistant in segments:
        piece = known.get((text, allow_special))
        if piece is None:
            piece = known[text, allow_special] = encode_text(tokenizer, text, allow_special)
        ids += piece
        mask += [int(is_assistant)] * len(piece)
    return ids, mask


def encode_text(tokenizer: Any, text: str, allow_special: bool) -> list[int]:
    """Ids of one segment; without `allow_special` marker strings are spelled out in ordinary tokens."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not allow_special)


def parse_message(tokenizer: Any, ids: Sequence[int], thinking: bool = True) -> dict[str, str]:
    """What the model generated after a generation prompt -> {"think": text, "response": text}.

    `ids` may stop anywhere: an unclosed channel holds what there is of it. `thinking` is the mode of the
    prompt, whose last tag opened the first channel. Tool calls are left out.
    """
    channels = {"think": [], "response": []}
    marker = {tokenizer.convert_tokens_to_ids(name): name for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
    current: str | None = "think" if thinking else "response"
    tag: list[int] | None = None
    depth = 1
    for token in map(int, ids):
        name = marker.get(token)
        if name == END_OF_MSG:
            break
        if name in (OPEN, CLOSE):
            tag, opens = [], name == OPEN
        elif name == SEP and tag is not None:
            depth += 1 if opens else -1
            opened = tokenizer.decode(tag).split(" ")[0] if opens and depth == 1 else None
            current = opened if opened in channels else None
            tag = None
        elif tag is not None:
            tag.append(token)
        elif current is not None:
            channels[current].append(token)
    return {name: tokenizer.decode(tokens) for name, tokens in channels.items()}


_UNSUPPORTED = {
    "chat_template": "the chat format is written by code, leave it out",
    "documents": "the chat format has none, put them into a message",
    "continue_final_message": "every message is closed, use add_generation_prompt instead",
    "truncation": "it could cut through a message or an image, shorten the conversation instead",
    "max_length": "nothing is truncated or padded to a fixed length, leave it out",
    "tokenizer_kwargs": "segments are encoded in one fixed way, leave it out",
}
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_JSON_ONLY = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)


class _Images:
    """Puts the text of the next image where a content part or a placeholder asks for one."""

    def __init__(self, prompt: ImagePrompt | None, placeholder: str | None) -> None:
        self.prompt = prompt
        self.placeholder = placeholder if prompt is not None else None

    def text(self, text: str) -> Iterator[Segment]:
        pieces = [text] if self.placeholder is None else text.split(self.placeholder)
        for index, piece in enumerate(pieces):
            if index:
                yield Segment(self.prompt(None), allow_special=True)
            if piece:
                yield Segment(piece)

    def content(self, content: Any) -> Iterator[Segment]:
        if isinstance(content, str):
            yield from self.text(content)
        elif content is None or isinstance(content, list | tuple):
            for part in content or ():
                yield from self._part(part)
        else:
            raise ValueError(f"message content {content!r} is neither a string nor a list of parts")

    def _part(self, part: Mapping[str, Any]) -> Iterator[Segment]:
        if part.get("type") in ("image", "image_url"):
            yield Segment(self.prompt(part) if self.prompt else IMAGE_PLACEHOLDER, allow_special=True)
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            yield from self.text(part["text"])
        else:
            raise ValueError(f"content part {str(part)[:200]}: expected type 'text', 'image' or 'image_url'")


def _open(tag: str, **attributes: Any) -> Iterator[Segment]:
    yield Segment(OPEN, allow_special=True)
    yield Segment(tag)
    for key, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        yield from (Segment(text) for text in (f" {key}", '="', escaped, '"') if text)
    yield Segment(SEP, allow_special=True)


def _close(tag: str) -> Iterator[Segment]:
    yield from (Segment(CLOSE, allow_special=True), Segment(tag), Segment(SEP, allow_special=True))


def _end_message() -> Iterator[Segment]:
    yield from _close("message")
    yield Segment(END_OF_MSG, allow_special=True)


def _system(kind: str, body: str) -> Iterator[Segment]:
    yield from _open("message", role="system", type=kind)
    yield Segment(body)
    yield from _end_message()


def _tool_declaration(tools: Sequence[Mapping[str, Any]], heading: str) -> Iterator[Segment]:
    return _system("tool-declare", f"{heading}\n\n{_json_block(tools)}")


def _json_block(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"```json\n{text}\n```"


def _response_format(response_format: str | Mapping[str, Any]) -> str:
    kind = response_format if isinstance(response_format, str) else response_format.get("type")
    if kind == "json_object":
        return _JSON_ONLY.format(kind=kind)
    if kind == "json_schema" and not isinstance(response_format, str):
        schema = response_format["json_schema"]
        block = _json_block(schema.get("schema", schema))
        return f"{_JSON_ONLY.format(kind=kind)}\nThe JSON data must match the following schema:\n{block}"
    raise ValueError(f"response_format: {response_format!r}, expected 'json_object' or a json_schema mapping")


def _message(message: Message, tool_index: int, thinking: bool, images: _Images) -> Iterator[Segment]:
    role, content = message.get("role"), message.get("content")
    name = {"name": message["name"]} if message.get("name") else {}
    if role == "system" and message.get("tools"):
        yield from _tool_declaration(message["tools"], _NEW_TOOLS)
    elif role in ("system", "user"):
        yield from _open("message", role=role, **name)
        yield from images.content(content)
        yield from _end_message()
    elif role == "tool":
        tool = message.get("tool") or message.get("name")
        if tool is None:
            raise ValueError("a tool message needs `tool` or `name`, or a preceding assistant tool call to answer")
        yield from _open("message", role=role, tool=tool, index=tool_index)
        yield from images.content(content)
        yield from _end_message()
    elif role == "assistant":
        yield from _open("message", role=role, **name)
        body = (*_channels(message, thinking, images), *_end_message())
        yield from (segment._replace(is_assistant=True) for segment in body)
    else:
        raise ValueError(f"message role {role!r}: expected 'system', 'user', 'assistant' or 'tool'")


def _channels(message: Message, thinking: bool, images: _Images) -> Iterator[Segment]:
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        yield from _open("think")
        if reasoning.strip():
            yield from images.text(reasoning)
        yield from _close("think")
    yield from _open("response")
    yield from images.content(message.get("content"))
    yield from _close("response")
    if message.get("tool_calls"):
        yield from _open("tools")
        for index, call in enumerate(message["tool_calls"], start=1):
            yield from _call(call.get("function", call), index, images)
        yield from _close("tools")


def _call(function: Mapping[str, Any], index: int, images: _Images) -> Iterator[Segment]:
    arguments = function.get("arguments") or {}
    yield from _open("call", tool=function["name"], index=index)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError:
            yield from _open("json", type="object")
            yield from images.text(arguments)
            yield from _close("json")
            arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of the call to {function['name']!r}: {arguments!r} is not a JSON object")
    for key, value in arguments.items():
        yield from _open("argument", key=key, type=_json_type(value))
        yield from images.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        yield from _close("argument")
    yield from _close("call")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    # bool before number: Python's True is an int.
    names = ((bool, "boolean"), (int | float, "number"), (str, "string"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "array")


def _call_name(call: Mapping[str, Any]) -> str | None:
    return call.get("function", call).get("name")


def _in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
    """Each run of tool results in the order of the assistant's calls, matched by `tool_call_id`, named after them.

    A run with a result that matches no call keeps its order and its own names.
    """
    calls: dict[str, tuple[int, str | None]] = {}
    run: list[Message] = []

    def sorted_run() -> list[Message]:
        keys = [result.get("tool_call_id") or result.get("id") for result in run]
        if not all(key in calls for key in keys):
            return run
        ordered = sorted(zip(keys, run, strict=True), key=lambda pair: calls[pair[0]][0])
        return [{**result, "tool": calls[key][1]} for key, result in ordered]

    for message in messages:
        if message.get("role") == "tool":
            run.append(message)
            continue
        yield from sorted_run()
        run = []
        if message.get("role") == "assistant":
            calls = {}
            for position, call in enumerate(message.get("tool_calls") or ()):
                if call.get("id") is not None:
                    calls.setdefault(call["id"], (position, _call_name(call)))
        yield message
    yield from sorted_run()


def _number_tool_results(messages: Iterable[Message]) -> Iterator[tuple[Message, int]]:
    """With each message the count of tool results since the last assistant; unnamed results take the call's name."""
    calls: Sequence[Mapping[str, Any]] = ()
    count = 0
    for message in messages:
        if message.get("role") == "assistant":
            calls, count = message.get("tool_calls") or (), 0
        elif message.get("role") == "tool":
            count += 1
            if not (message.get("tool") or message.get("name")) and count <= len(calls):
                message = {**message, "tool": _call_name(calls[count - 1])}
        yield message, count
