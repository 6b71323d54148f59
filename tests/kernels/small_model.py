"""A dense model with KDA and MLA layers: nothing in it decides, so that two dtypes compute the same function."""

import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM

VOCABULARY = 50


def small_model(
    head_dim: int = 64, heads: int = 2, layers: int = 3, conv_width: int = 4, **attention: int
) -> LatentMoEForCausalLM:
    """The last layer is MLA with fields `attention`, all before it are KDA; the head is frozen, as in training."""
    linear = {"kda_layers": list(range(1, layers)), "full_attn_layers": [layers]}
    linear |= {"num_heads": heads, "head_dim": head_dim, "short_conv_kernel_size": conv_width}
    linear |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    fields = {"kv_lora_rank": 16, "qk_rope_head_dim": 8} | attention
    config = LatentMoETextConfig(
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_experts=0,
        attn_res_block_size=2,
        linear_attn_config=linear,
        pad_token_id=0,
        **fields,
    )
    torch.manual_seed(0)
    model = LatentMoEForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # decays, gates and scores that are not all alike
            noise = 0.5 if parameter.ndim == 1 or "res_proj" in name else 0.05
            parameter.add_(noise * torch.randn_like(parameter))
    model.lm_head.requires_grad_(False)
    return model


def batches(device: str = "cpu", T: int = 70) -> dict[str, dict[str, torch.Tensor]]:
    """One row, rows with padding, and packed documents of which one has a single token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, T), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, T // 2 + 6 :], mask[1, :9] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    border = torch.tensor([0, 5, 6, T], dtype=torch.int32)
    found = {
        "one row": {"input_ids": ids[:1], "labels": ids[:1]},
        "padded": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "packed": {"input_ids": ids[:1], "cu_seqlens": border, "labels": ids[:1]},
    }
    return {name: {key: value.to(device) for key, value in batch.items()} for name, batch in found.items()}


def results(model: LatentMoEForCausalLM, batch: dict[str, torch.Tensor], kernels: str) -> dict[str, torch.Tensor]:
    """Loss, logits where tokens are real, and all gradients."""
    model.config.kernels = kernels
    model.zero_grad()
    output = model(**batch, return_logits=False)
    loss = output.loss
    (loss if output.indexer_loss is None else loss + output.indexer_loss).backward()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], **borders(batch)).logits
    found = {"loss": loss.detach(), "logits": logits[batch["labels"] != -100]}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def borders(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("attention_mask", "cu_seqlens") if name in batch}


def assert_as_accurate(
    got: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], true: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Loss, logits and the gradient err at most twice as much as those of plain torch in the same dtype, both against
    float64. Of a single parameter's gradient, often a sum that cancels, either error may be small by luck."""
    assert got.keys() == plain.keys() == true.keys()
    together = {"loss": ["loss"], "logits": ["logits"], "gradient": [*(true.keys() - {"loss", "logits"})]}
    for name, parts in together.items():
        check(name, *(torch.cat([x[part].double().flatten() for part in parts]) for x in (got, plain, true)), dtype, 2)
    for name in together["gradient"]:
        check(name, got[name].double(), plain[name].double(), true[name], dtype, 8)


def check(name: str, got: torch.Tensor, plain: torch.Tensor, true: torch.Tensor, dtype: torch.dtype, most: int) -> None:
    errors = [((x - true).norm() / true.norm()).item() for x in (got, plain)]
    floor = 8 * torch.finfo(dtype).eps / true.numel() ** 0.5
    assert errors[0] <= most * errors[1] + floor, f"{name}: error {errors[0]:.3g}, torch {errors[1]:.3g}"
