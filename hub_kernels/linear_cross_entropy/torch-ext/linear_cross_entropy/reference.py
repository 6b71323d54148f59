"""What the kernels compute, as plain torch: differentiable in the hidden states, and exact in float64.

Legend: N tokens, D model width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Tokens whose logits exist at the same time.
CHUNK = 1024


def _chunk_loss(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    ignored_N = target_N == ignore_index
    inside_N = (target_N >= 0) & (target_N < weight_VD.shape[0])
    # With its hidden state replaced, an ignored token has finite logits and a gradient of exactly zero.
    logits_NV = F.linear(hidden_ND.masked_fill(ignored_N.unsqueeze(1), 0), weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    row_N1 = torch.where(inside_N, target_N, 0).unsqueeze(1)
    loss_N = logits_NV.logsumexp(1) - logits_NV.gather(1, row_N1).squeeze(1)
    # A factor, not a fill: the gradient of a target outside the vocabulary is NaN like its loss.
    loss_N = loss_N * torch.where(inside_N | ignored_N, 1.0, torch.nan)
    return loss_N.masked_fill(ignored_N, 0)


def linear_cross_entropy_reference(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """logsumexp_v(l_v) - l_target for l = hidden @ weight^T, zero where the target is `ignore_index`.

    hidden [N, D], weight [V, D], target int64 [N]. Returns losses [N] in promote_types(dtype, float32); NaN for a
    target that is neither in [0, V) nor `ignore_index`. Logits are rounded to the input dtype, as `F.linear` does;
    they are recomputed in backward, chunk by chunk.
    """
    chunks = zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    return torch.cat([checkpoint(_chunk_loss, h, weight, t, ignore_index, use_reentrant=False) for h, t in chunks])
