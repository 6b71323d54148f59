"""The plan: chunks of tokens, each with two matrix products and one pass over its logits.

Shapes: N tokens, C tokens of a chunk, S splits of the vocabulary, D model width, V vocabulary.

Memory beside the inputs: logits of one chunk, partial products of one chunk, the results.
"""

from collections.abc import Iterator

import torch

from .rows import pitched_rows, row_loss, row_loss_and_gradient

# Bytes of the logits of a chunk: 512 tokens of 163840 bf16 logits.
LOGITS_BYTES = 160 * 2**20
# Tokens of a chunk are a multiple of the matrix product's tile.
TOKEN_TILE = 128
# Bytes of the partial products of a chunk: 8 splits of 512 x 7168 in fp32.
PARTIAL_BYTES = 112 * 2**20


def chunk_tokens(vocabulary: int, element_size: int) -> int:
    """Tokens per chunk."""
    return max(LOGITS_BYTES // (vocabulary * element_size) // TOKEN_TILE, 1) * TOKEN_TILE


def splits(tokens: int, width: int, vocabulary: int) -> int:
    """Parts of the vocabulary that the second product sums over apart from each other.

    Its output is small and its sum long: 512 x 7168 in tiles of 128 x 256 occupies 112 of 132 SMs once, for the whole
    sum. In 8 parts it is 896 tiles, 7 rounds that are 97 % full. Parts begin at multiples of 8 elements.
    """
    for parts in (8, 4, 2):
        if vocabulary % (8 * parts) == 0 and 4 * parts * tokens * width <= PARTIAL_BYTES:
            return parts
    return 1


def _hidden_gradient(gradient_CV: torch.Tensor, weight_VD: torch.Tensor, out_CD: torch.Tensor) -> None:
    """out = gradient @ weight, rounded once from fp32."""
    (tokens, vocabulary), width = gradient_CV.shape, weight_VD.shape[1]
    parts = splits(tokens, width, vocabulary)
    if parts == 1:
        torch.mm(gradient_CV, weight_VD, out=out_CD)
        return
    gradient_SCV = gradient_CV.unflatten(1, (parts, -1)).transpose(0, 1)
    weight_SVD = weight_VD.unflatten(0, (parts, -1))
    out_CD.copy_(torch.bmm(gradient_SCV, weight_SVD, out_dtype=torch.float32).sum(0))


def _chunks(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tokens of each chunk and their logits, which the next chunk overwrites."""
    size = chunk_tokens(len(weight_VD), hidden_ND.element_size())
    buffer_CV = pitched_rows(min(size, len(hidden_ND)), len(weight_VD), like=hidden_ND)
    for start in range(0, len(hidden_ND), size):
        rows = slice(start, min(start + size, len(hidden_ND)))
        logits_CV = buffer_CV[: rows.stop - rows.start]
        torch.mm(hidden_ND[rows], weight_VD.t(), out=logits_CV)
        yield rows, logits_CV


def loss(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Losses fp32 [N]."""
    loss_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    for rows, logits_CV in _chunks(hidden_ND, weight_VD):
        row_loss(logits_CV, target_N[rows], loss_N[rows], ignore_index)
    return loss_N


def loss_and_gradient(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses fp32 [N], and d loss_n / d hidden_n [N, D] in the dtype of hidden."""
    loss_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    gradient_ND = torch.empty_like(hidden_ND)
    for rows, logits_CV in _chunks(hidden_ND, weight_VD):
        row_loss_and_gradient(logits_CV, target_N[rows], loss_N[rows], ignore_index)
        _hidden_gradient(logits_CV, weight_VD, gradient_ND[rows])
    return loss_N, gradient_ND
