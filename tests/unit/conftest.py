"""A random model of a few hundred kilobytes in a folder, with its processor and code: what a run starts
from."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.tokenization_latentmoe import tiny_tokenizer


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    """A run inside a test leaves its group of one process behind; the next test may want another."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def save_small_model(folder: Path, seed: int, **options: int) -> Path:
    words = ["message role user assistant response Which digit is this? 0 1 2 3 4 5 6 7 8 9"] * 9
    tokenizer = tiny_tokenizer(words)
    config = LatentMoEConfig.tiny(**options)
    config.pad_token_id = config.text_config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = config.text_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|end_of_msg|>")
    config.media_placeholder_token_id = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    assert len(tokenizer) <= config.text_config.vocab_size
    torch.manual_seed(seed)
    model = LatentMoEForConditionalGeneration(config)
    torch.nn.init.normal_(model.language_model.model.norm.weight, mean=1, std=0.1)
    model.save_pretrained(folder, max_shard_size="300KB")
    LatentMoEProcessor(LatentMoEImageProcessor(), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model in several shards. Not to be changed by a test."""
    return save_small_model(tmp_path_factory.mktemp("model") / "small", seed=0)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_small_model(tmp_path_factory.mktemp("model") / "other", seed=1)
