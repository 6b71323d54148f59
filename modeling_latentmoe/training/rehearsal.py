"""A snapshot of the released layout without its weights: every file, name, shape and dtype, and holes for the data.

What reads, checks or rewrites a checkpoint of 1.5 TB runs against it in seconds, on megabytes of disk. Chosen layers
and experts get random bytes of sane values, which are the same whatever else is chosen, so that they compute.

    folder/
      config.json  preprocessor_config.json  tokenizer_config.json  tiktoken.model  model.safetensors.index.json
      model-00001-of-000096.safetensors   layer 0, and so on: a shard for each layer
      model-00094-of-000096.safetensors   embeddings, head, last norms
      model-00095-of-000096.safetensors   projector
      model-00096-of-000096.safetensors   vision tower
"""

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain, islice, product
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from tqdm import tqdm

from modeling_latentmoe import chat_latentmoe as chat
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.conversion import BYTES, expected_tensors
from modeling_latentmoe.headers import DTYPE_BYTES, StoredTensor, read_header
from modeling_latentmoe.image_processing_latentmoe import KIMI_K3_MEDIA_PROC_CFG
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.tokenization_latentmoe import RESERVED_TOKENS, VOCAB_FILE
from modeling_latentmoe.training.files import new_folder
from modeling_latentmoe.training.shards import Layout, data_bytes, write_header
from modeling_latentmoe.training.sources import INDEX

# Values that are drawn and written at a time.
CHUNK = 1 << 24
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
# Mean and standard deviation of a tensor by what its name contains; the first match counts, 0 and 0.02 otherwise.
DISTRIBUTIONS = {".bias": (0, 0.1), "_bias": (0, 0.1), "norm": (1, 0.1), "conv1d": (0, 0.5)}
SCALES = (0x78, 0x7A)

# Named special tokens and their places among the reserved ids, as released.
SPECIAL_TOKENS = {
    **{"[BOS]": 0, "[EOS]": 1, chat.END_OF_MSG: 2, chat.OPEN: 3, chat.CLOSE: 4, chat.SEP: 5},
    **{"[start_header_id]": 6, "[end_header_id]": 7, "[EOT]": 9},
    **{chat.MEDIA_BEGIN: 18, chat.MEDIA_CONTENT: 19, chat.MEDIA_END: 20, chat.MEDIA_PAD: 21, "<osagent_mode>": 65},
    **{"[UNK]": RESERVED_TOKENS - 2, "[PAD]": RESERVED_TOKENS - 1},
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write_snapshot(
    folder: Path, config: LatentMoEConfig, fill: Callable[[str], bool] = lambda name: False, seed: int = 0
) -> None:
    """Write the snapshot of a model of this config into the new folder `folder`.

    fill: whether the tensor of this name gets real bytes. seed: of the bytes, and of the order of experts in a shard.
    It appears when it is complete. ValueError for a folder in use, or a vocabulary too small for a tokenizer.
    """
    ordinary = config.text_config.vocab_size - RESERVED_TOKENS
    if ordinary < 256:
        raise ValueError(f"vocab_size: {ordinary + RESERVED_TOKENS}, a tokenizer needs {256 + RESERVED_TOKENS} or more")
    shards = shards_of(config, seed)
    with new_folder(folder) as partial:
        (partial / "config.json").write_text(config.to_json_string())
        write_processor_files(partial, ordinary)
        weight_map, total = {}, 0
        for name, shard in shards.items():
            write_holes(partial / name, shard)
            weight_map |= dict.fromkeys(shard, name)
            total += data_bytes(shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index))
        fill_holes([partial / name for name in shards], config, fill, seed)


def chosen(layers: list[int], experts: list[int], rest: bool) -> Callable[[str], bool]:
    """A `fill` for these experts and all else of these layers, and with `rest` for what is in no layer."""

    def fill(name: str) -> bool:
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        if layer is None:
            return rest
        return int(layer[1]) in layers and (expert is None or int(expert[1]) in experts)

    return fill


def shards_of(config: LatentMoEConfig, seed: int) -> dict[str, Layout]:
    """The shards of a model in the released layout, by file name.

    As released, the six tensors of an expert are neighbours and the experts are in no order. The widest dtype comes
    first, so that every tensor is aligned.
    """
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config)
    layers = config.text_config.num_hidden_layers
    groups: list[list[tuple]] = [[] for _ in range(layers + (1 if config.vision_config is None else 3))]
    for name, tensor in expected_tensors(model, config.packed_experts).items():
        if tensor.dtypes == BYTES:
            dtype = "U8"
        else:
            dtype = "F32" if any(part in name for part in model._keep_in_fp32_modules_strict) else "BF16"
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        place = crc32(f"{seed} {expert[0]}".encode()) if expert else 0
        group = layers + name.startswith("mm_projector.") + 2 * name.startswith("vision_tower.")
        key = (expert is not None, -DTYPE_BYTES[dtype], place, name)
        groups[int(layer[1]) if layer else group].append((key, (dtype, tensor.shape)))
    return {
        f"model-{n:05d}-of-{len(groups):06d}.safetensors": {key[-1]: tensor for key, tensor in sorted(group)}
        for n, group in enumerate(groups, 1)
    }


def write_holes(path: Path, shard: Layout) -> None:
    """A safetensors file whose data take no room on disk."""
    with path.open("wb") as file:
        write_header(file, shard)
        file.truncate(file.tell() + data_bytes(shard))


def fill_holes(files: list[Path], config: LatentMoEConfig, fill: Callable[[str], bool], seed: int) -> None:
    """Put random values into the tensors that `fill` chooses, with a thread for every core."""
    tensors = [(file, name, tensor) for file in files for name, tensor in read_header(file).items() if fill(name)]
    # the largest ones first: none is left for one thread at the end
    tensors.sort(key=lambda found: found[2].start - found[2].stop)
    total = sum(tensor.stop - tensor.start for _, _, tensor in tensors)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="random bytes", disable=not total) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for done in as_completed([pool.submit(fill_hole, *found, config, seed) for found in tensors]):
            bar.update(done.result())


def fill_hole(path: Path, name: str, tensor: StoredTensor, config: LatentMoEConfig, seed: int) -> int:
    """Put random values into one tensor; returns the number of bytes."""
    with path.open("r+b") as file:
        file.seek(tensor.start)
        return sum(file.write(values) for values in random_values(name, tensor, config, seed))


def random_values(name: str, tensor: StoredTensor, config: LatentMoEConfig, seed: int) -> Iterator[np.ndarray]:
    """The bytes of a tensor, piece by piece; a function of name and seed alone.

    Arrays and not `bytes`: copies of them would be made one thread at a time.
    """
    rng = np.random.default_rng([seed, crc32(name.encode())])
    left = math.prod(tensor.shape)
    if name.endswith("A_log"):
        rates = torch.zeros(left)
        heads = config.text_config.linear_attn_config["num_heads"]
        rates[:heads] = torch.from_numpy(np.log(rng.uniform(1, 16, heads)))
        yield rates.numpy().view(np.uint8)
        return
    mean, std = next((value for part, value in DISTRIBUTIONS.items() if part in name), (0, 0.02))
    while left:
        count = min(left, CHUNK)
        left -= count
        if name.endswith("weight_scale"):
            yield rng.integers(*SCALES, count, dtype=np.uint8, endpoint=True)
        elif tensor.dtype == "U8":
            yield rng.integers(1 << 32, size=-(-count // 4), dtype=np.uint32).view(np.uint8)[:count]
        else:
            values = torch.from_numpy(rng.standard_normal(count, dtype=np.float32)).mul_(std).add_(mean)
            yield values.to(TORCH_DTYPES[tensor.dtype]).view(torch.uint8).numpy()


def write_processor_files(folder: Path, ordinary: int) -> None:
    """The released preprocessor_config.json, and a tokenizer of the released form with `ordinary` made-up words."""
    preprocessor = {
        "auto_map": {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"},
        "media_proc_cfg": KIMI_K3_MEDIA_PROC_CFG,
    }
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokenizer = {
        "added_tokens_decoder": {ordinary + i: {"content": token, **special} for token, i in SPECIAL_TOKENS.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        **{"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    words = chain.from_iterable(product(range(256), repeat=length) for length in (1, 2, 3))
    lines = (f"{base64.b64encode(bytes(word)).decode()} {rank}\n" for rank, word in enumerate(islice(words, ordinary)))
    (folder / VOCAB_FILE).write_text("".join(lines))
