"""save_pretrained, then from_pretrained, for every exported class and for dense and text-only variants."""

import inspect
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from modeling_latentmoe import modeling_latentmoe
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig

EXPORTED = {
    name: cls
    for name, cls in inspect.getmembers(modeling_latentmoe, inspect.isclass)
    if issubclass(cls, PreTrainedModel) and cls.__module__ == modeling_latentmoe.__name__ and "forward" in vars(cls)
}
IDS_BT = torch.tensor([[1, 5, 9, 200, 31, 7, 100, 42, 8]])


def build(cls: type[PreTrainedModel], config: LatentMoEConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    if cls.__name__ != "LatentMoEForConditionalGeneration":
        config = config.text_config
    return cls(config).eval()


def output(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS_BT)[0]


def round_trip(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Save, load, and require that loading found every tensor and no other."""
    model.save_pretrained(path)
    loaded, info = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    trainable = {name: param.requires_grad for name, param in model.named_parameters()}
    assert {name: param.requires_grad for name, param in loaded.named_parameters()} == trainable
    return loaded.eval()


def test_the_exported_classes_are_known() -> None:
    assert set(EXPORTED) >= {"LatentMoEModel", "LatentMoEForCausalLM", "LatentMoEForConditionalGeneration"}


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_class(name: str, tmp_path: Path) -> None:
    model = build(EXPORTED[name], LatentMoEConfig.tiny(packed=False))
    assert hasattr(model, "all_tied_weights_keys"), "post_init was not called"
    loaded = round_trip(model, tmp_path)
    assert torch.equal(output(loaded), output(model))
    for (key, ours), (other, theirs) in zip(
        sorted(model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
    ):
        assert key == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs), key


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tied: bool, tmp_path: Path) -> None:
    """The head shares the embedding's storage exactly when asked, before saving and after loading."""
    config = LatentMoEConfig.tiny(packed=False)
    text = {**config.text_config.to_dict(), "tie_word_embeddings": tied}
    config = LatentMoEConfig(
        **{**config.to_dict(), "text_config": text, "tie_word_embeddings": tied},
    )
    model = build(EXPORTED["LatentMoEForConditionalGeneration"], config)
    assert isinstance(model._tied_weights_keys, dict)
    for candidate in (model, round_trip(model, tmp_path)):
        head, embedding = candidate.get_output_embeddings().weight, candidate.get_input_embeddings().weight
        assert (head.data_ptr() == embedding.data_ptr()) is tied
        assert torch.equal(output(candidate), output(model))


@pytest.mark.parametrize(
    ("experts", "vision"),
    [
        pytest.param(0, False, id="text-dense"),
        pytest.param(16, False, id="text-moe", marks=pytest.mark.slow),
        pytest.param(0, True, id="vision-dense", marks=pytest.mark.slow),
        pytest.param(16, True, id="vision-moe"),
    ],
)
def test_small_variants_load_train_and_export(experts: int, vision: bool, tmp_path: Path) -> None:
    model = build(
        EXPORTED["LatentMoEForConditionalGeneration"],
        LatentMoEConfig.tiny(vision=vision, experts=experts, packed=False),
    )
    names = [name for name, _ in model.named_parameters()]
    assert any("vision_tower" in name for name in names) is vision
    assert any(".experts." in name for name in names) is bool(experts)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model.train()(input_ids=IDS_BT, labels=IDS_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(output(round_trip(model.eval(), tmp_path)), output(model))


def test_a_share_of_the_experts_is_not_saved(tmp_path: Path) -> None:
    """Under the names of all experts it would look like a whole model with the first ones repeated."""
    model = build(EXPORTED["LatentMoEForCausalLM"], LatentMoEConfig.tiny())
    experts = next(module for module in model.modules() if type(module).__name__ == "Experts")
    experts.restrict(range(4, 8))
    with pytest.raises(ValueError, match="share of its experts"):
        model.save_pretrained(tmp_path / "share")
    assert not (tmp_path / "share").exists()
