"""Ask a model about images, or about nothing but a question, and watch the answer come.

    python scripts/generate.py --image cat.png --question "What is it?"
    python scripts/generate.py --adapter runs/digits --image seven.png --question "Which digit is this?"
    python scripts/generate.py --model org/model --dtype bf16 --thinking --question "Why is the sky blue?"

Every mistake in the input ends it with one line and exit code 2.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers.generation import BaseStreamer

from modeling_latentmoe.chat_latentmoe import parse_message
from modeling_latentmoe.image_processing_latentmoe import load_image
from modeling_latentmoe.training import monitor
from modeling_latentmoe.training.arguments import option
from modeling_latentmoe.training.loading import SHIPPED_MODEL, load_model, load_processor
from modeling_latentmoe.training.lora import load_adapter


class AnswerStreamer(BaseStreamer):
    """Prints the think and response channels of one generated message while its tokens come."""

    def __init__(self, tokenizer: Any, thinking: bool) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self.ids: list[int] | None = None
        self.shown = ""

    def put(self, value: torch.Tensor) -> None:
        if self.ids is None:
            # generate hands over the prompt first
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        self.show(final=False)

    def end(self) -> None:
        self.show(final=True)
        print(flush=True)

    def show(self, final: bool) -> None:
        channels = parse_message(self.tokenizer, self.ids, self.thinking)
        think, response = channels["think"], channels["response"]
        text = f"{think}\n\n{response}" if think and response else think or response
        # the last bytes of a character may still be missing
        if final or not text.endswith("�"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


@dataclass(frozen=True)
class Arguments:
    question: str = field(metadata={"help": "what to ask"})
    image: list[str] = field(
        default_factory=list, metadata={"help": "image files or URLs, in the order they are shown"}
    )
    model: str = option(SHIPPED_MODEL, "local folder or Hub id")
    adapter: str | None = option(None, "LoRA adapter, a folder or a Hub id")
    system: str | None = option(None, "system message")
    thinking: bool = option(False, "let the model think before it answers")
    max_new_tokens: int = option(256, "longest answer in tokens")
    temperature: float = option(0.0, "0 always takes the most likely token")
    seed: int = option(0, "seed of sampling")
    dtype: Literal["fp32", "bf16"] = option("fp32", "precision of the weights")
    kernels: Literal["auto", "torch", "hub"] = option(
        "auto", "fused operations on CUDA: kernels that are at hand, none, or those on the Hub, downloaded"
    )
    traceback: bool = option(False, "show where in the code an error was raised")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens {self.max_new_tokens} must be at least 1")


def answer(args: Arguments, argv: Sequence[str]) -> None:
    torch.manual_seed(args.seed)
    content = [{"type": "image", "image": load_image(image)} for image in args.image]
    content.append({"type": "text", "text": args.question})
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": content})

    processor = load_processor(args.model)
    inputs = processor.apply_chat_template(
        messages,
        thinking=args.thinking,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = load_model(args.model, args.dtype, kernels=args.kernels)
    if args.adapter:
        model = load_adapter(model, args.adapter)
    model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu").eval()
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    model.generate(
        **inputs.to(model.device),
        **sampling,
        max_new_tokens=args.max_new_tokens,
        streamer=AnswerStreamer(processor.tokenizer, args.thinking),
    )


def main(argv: Sequence[str]) -> int:
    return monitor.run_script(answer, Arguments, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
