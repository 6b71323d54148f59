"""Fifty steps of adapter training through kernels follow those through torch: packed experts, KDA and attention."""

import pytest
import torch

from modeling_latentmoe import kernel_loading
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.lora import add_adapter

pytest.importorskip("triton")
STEPS, TOKENS = 50, 96


def model_of(dtype: torch.dtype, device: str) -> LatentMoEForConditionalGeneration:
    """A tiny model with heads as wide as kernels take, random packed experts and an adapter on everything."""
    config = LatentMoEConfig.tiny(vision=False).to_dict()
    config["text_config"]["linear_attn_config"] |= {"num_heads": 2, "head_dim": 64}
    # Dense attention everywhere: a choice of keys may turn over by a rounding.
    config["text_config"] |= {"index_topk": TOKENS}
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.from_dict(config)).to(dtype)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            low, high = (0x78, 0x7B) if name.endswith("_scale") else (0, 256)
            parameter.data.random_(low, high)
    return add_adapter(model.to(device), r=4, lora_alpha=8, expert_rank=2).train()


def losses(kernels: str, dtype: torch.dtype, device: str, steps: int) -> list[float]:
    model = model_of(dtype, device)
    model.get_base_model().config.kernels = kernels
    ids = torch.randint(5, 200, (4, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    found = []
    for step in range(steps):
        row = ids[step % len(ids)].unsqueeze(0)
        # Two documents in a row: what leaks from one to the other would show.
        borders = torch.tensor([0, 30, TOKENS], dtype=torch.int32, device=device)
        loss = model(input_ids=row, labels=row, cu_seqlens=borders, return_logits=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def follow(dtype: torch.dtype, device: str, steps: int, tolerance: float) -> None:
    plain, ours = (losses(choice, dtype, device, steps) for choice in ("torch", "auto"))
    assert {"kda", "latent_moe", "residual"} <= {name for name, _ in kernel_loading._LOADED}
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=tolerance, atol=0)
    assert plain[-1] < 0.9 * plain[0], "the model does not learn, the comparison says little"


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    follow(torch.bfloat16, "cuda", STEPS, 1e-2)
