"""The default configuration is the released Kimi-K3, field by field, and has the published size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration

RELEASED = Path(__file__).resolve().parents[1] / "fixtures" / "k3"

# Fields that name the released repository's own classes or were written by its transformers version.
BOOKKEEPING = {
    *("architectures", "auto_map", "dtype", "model_type", "transformers_version", "_attn_implementation"),
    *("text_config", "vision_config", "quantization_config"),
}

# Parameters in the Kimi-K3 report; "active" counts 16 experts of each layer and the head, not the embedding.
TEXT_PARAMETERS, ACTIVE_PARAMETERS = 2.7795e12, 104.19e9
TOWER_PARAMETERS, PROJECTOR_PARAMETERS = 401.2e6, 46.1e6


@pytest.fixture(scope="module")
def released() -> dict[str, Any]:
    return json.loads((RELEASED / "config.json").read_text())


@pytest.mark.parametrize("part", ["root", "text_config", "vision_config"])
def test_defaults_equal_the_released_fields(released: dict[str, Any], part: str) -> None:
    """So do the fields read from the released file: reading neither drops nor alters one."""
    expected = released if part == "root" else released[part]
    for config in (LatentMoEConfig(), LatentMoEConfig.from_pretrained(RELEASED)):
        section = config if part == "root" else getattr(config, part)
        for name, value in expected.items():
            if name not in BOOKKEEPING:
                assert getattr(section, name) == value, f"{part}.{name}"


def test_no_default_contradicts_what_is_absent_from_the_release() -> None:
    """Everything the file does not mention has the same value after reading it as in a default config."""
    default, read = LatentMoEConfig().to_dict(), LatentMoEConfig.from_pretrained(RELEASED).to_dict()
    for name in ("text_config", "vision_config"):
        ours, theirs = default.pop(name), read.pop(name)
        assert {key: theirs[key] for key in ours if key not in BOOKKEEPING} == {
            key: value for key, value in ours.items() if key not in BOOKKEEPING
        }
    assert {key: read[key] for key in default if key not in BOOKKEEPING} == {
        key: value for key, value in default.items() if key not in BOOKKEEPING
    }


def test_quantization_moves_to_the_root() -> None:
    config = LatentMoEConfig.from_pretrained(RELEASED)
    assert config.model_type == "latentmoe"
    assert config.packed_experts and config.quantization_config == LatentMoEConfig.kimi_k3().quantization_config
    assert config.quantization_config["quant_method"] == "latentmoe_mxfp4"
    assert not LatentMoEConfig().packed_experts


def test_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = LatentMoEConfig.from_pretrained(RELEASED)
    config.save_pretrained(tmp_path)
    assert LatentMoEConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "latentmoe"


def test_parameter_counts() -> None:
    """On the meta device, unpacked: total, active, tower, projector within 0.1 % of the published sizes."""
    config = LatentMoEConfig()
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def count(*parts: str) -> int:
        return sum(size for name, size in sizes.items() if any(part in name for part in parts))

    assert count("language_model.") == pytest.approx(TEXT_PARAMETERS, rel=1e-3)
    routed = count(".experts.")
    share = config.text_config.num_experts_per_token / config.text_config.num_experts
    active = count("language_model.") - count("embed_tokens") - routed * (1 - share)
    assert active == pytest.approx(ACTIVE_PARAMETERS, rel=1e-3)
    assert count("vision_tower.") == pytest.approx(TOWER_PARAMETERS, rel=1e-3)
    assert count("mm_projector.") == pytest.approx(PROJECTOR_PARAMETERS, rel=1e-3)
