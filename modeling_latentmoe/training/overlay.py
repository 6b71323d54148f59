"""A folder that loads a downloaded release here: our code, config and processor, and links to its weights."""

import shutil
from pathlib import Path

import modeling_latentmoe
from modeling_latentmoe.headers import index_path
from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM, LatentMoEForConditionalGeneration
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.tokenization_latentmoe import LatentMoETokenizer
from modeling_latentmoe.training.files import new_folder
from modeling_latentmoe.training.preflight import is_released, read_config


def check_overlay(snapshot: Path, out: Path) -> None:
    """Raise ValueError for a snapshot that needs no overlay, and for an `out` that is in use or inside of it."""
    if not is_released(snapshot):
        raise ValueError(f"{snapshot} has our config already: load it as it is")
    if out.resolve().is_relative_to(snapshot.resolve()):
        raise ValueError(f"{out} is inside of {snapshot}, which is not written to: choose another folder")
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ValueError(f"{out} is in use: choose another folder")


def make_overlay(snapshot: Path, shards: list[str], out: Path) -> None:
    """Make the folder `out`, which loads the released checkpoint `snapshot` whose weight files are `shards`.

    It appears when it is complete. Links are absolute: the snapshot has to stay where it is.
    """
    check_overlay(snapshot, out)
    with new_folder(out) as partial:
        write_config(snapshot, partial)
        write_processor(snapshot, partial)
        copy_code(partial)
        link_weights(snapshot, shards, partial)


def write_config(snapshot: Path, folder: Path) -> None:
    """config.json in our form, with the class of every Auto class, and the released generation_config.json."""
    config = read_config(snapshot)
    config.architectures = [LatentMoEForConditionalGeneration.__name__]
    config.text_config.architectures = [LatentMoEForCausalLM.__name__]
    (folder / "config.json").write_text(config.to_json_string())
    generation = snapshot / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)


def write_processor(snapshot: Path, folder: Path) -> None:
    """The released tokenizer and image settings under our classes."""
    tokenizer = LatentMoETokenizer.from_pretrained(snapshot)
    LatentMoEProcessor(LatentMoEImageProcessor.from_pretrained(snapshot), tokenizer).save_pretrained(folder)


def copy_code(folder: Path) -> None:
    """The model files of this package, as remote code."""
    for file in Path(modeling_latentmoe.__file__).parent.glob("*.py"):
        if file.name != "__init__.py":
            shutil.copyfile(file, folder / file.name)


def link_weights(snapshot: Path, shards: list[str], folder: Path) -> None:
    """Links to the shards and their index."""
    index = index_path(snapshot / shards[0]).name
    for name in [*shards, *([index] if (snapshot / index).is_file() else [])]:
        (folder / name).symlink_to(snapshot.resolve() / name)
