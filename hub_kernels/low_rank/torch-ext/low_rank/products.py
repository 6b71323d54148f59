"""The three products of the low-rank update as launches: how rows and sums are shared out among programs.

Legend: T rows, K their width, r rank, R rank up to a power of two, P parts of a number (kernels.py), I and O widths of
        a layer's input and output, S sums that are added up later, M and N rows and columns of a sum.
"""

import torch

from .kernels import add_kernel, gradient_kernel, low_kernel, split_kernel, split_sums_kernel

# Programs that fill the GPU, and how much one of them takes at least. Constants, so that the order of a sum does not
# depend on the GPU: two programs of the first kind for each of 132 processors, and three that share out columns.
ROW_PROGRAMS, COLUMN_PROGRAMS = 264, 396
LEAST_COLUMNS, LEAST_ROWS = 1024, 256


# Not triton.cdiv: called from Python, that takes as long as a launch.
def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def padded(rank: int) -> int:
    """The least contraction of a tensor core is 16."""
    return max(16, 1 << (rank - 1).bit_length())


def parts_of(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """As what factors and low rows meet rows of this dtype: how many parts, and their dtype."""
    return (3, torch.bfloat16) if dtype == torch.bfloat16 else (1, torch.float32)


def split_factors(a_rI: torch.Tensor, b_Or: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts [P, R, I] of a and [P, R, O] of b transposed, for rows of this dtype."""
    (outputs, rank), inputs = b_Or.shape, a_rI.shape[1]
    P, part = parts_of(dtype)
    R = padded(rank)
    a_PRI, b_PRO = (a_rI.new_empty(P, R, K, dtype=part) for K in (inputs, outputs))
    BK = 2048 // R
    split_kernel[(_cdiv(max(inputs, outputs), BK), 2)](
        a_rI.contiguous(), b_Or.contiguous(), a_PRI, b_PRO, inputs, outputs, rank, R=R, PARTS=P, BK=BK, num_warps=4
    )
    return a_PRI, b_PRO


def _sum(x_SMN: torch.Tensor, scaling: float, P: int, dtype: torch.dtype) -> torch.Tensor:
    """[P, M, N]: parts of scaling times the sum over S."""
    S, M, N = x_SMN.shape
    out_PMN = x_SMN.new_empty(P, M, N, dtype=dtype)
    BN = min(128, padded(N))
    BM = 1024 // BN
    grid = _cdiv(M, BM), _cdiv(N, BN)
    split_sums_kernel[grid](x_SMN, out_PMN, S, M, N, *x_SMN.stride(), scaling, PARTS=P, BM=BM, BN=BN, num_warps=4)
    return out_PMN


def low_rows(x_TK: torch.Tensor, factor_PRK: torch.Tensor) -> torch.Tensor:
    """Parts [P, T, R] of x times the factor transposed."""
    x_TK = x_TK.contiguous()
    (T, K), (P, R, _) = x_TK.shape, factor_PRK.shape
    BT, BK, stages = (64, max(32, min(128, 2048 // R)), 4) if P > 1 else (32, 32, 2)
    blocks = _cdiv(T, BT)
    S = max(1, min(ROW_PROGRAMS // max(1, blocks), K // LEAST_COLUMNS))
    KS = _cdiv(_cdiv(K, S), BK) * BK
    low_STR = x_TK.new_empty(_cdiv(K, KS), T, R, dtype=torch.float32)
    low_kernel[(blocks, len(low_STR))](
        x_TK, factor_PRK, low_STR, T, K, KS, R=R, PARTS=P, BT=BT, BK=BK, num_warps=4, num_stages=stages
    )
    return _sum(low_STR, 1.0, P, factor_PRK.dtype)


def _row_share(T: int, blocks: int, BT: int) -> int:
    """Rows for a program where there are this many blocks of columns, a multiple of BT."""
    S = max(1, min(COLUMN_PROGRAMS // blocks, T // LEAST_ROWS))
    return max(1, _cdiv(_cdiv(T, S), BT)) * BT


def added_rows(
    y_TK: torch.Tensor | None, low_PTR: torch.Tensor, factor_PRK: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """[T, K] in this dtype: y, or zero without it, plus scaling times low rows times the factor."""
    (P, T, R), K = low_PTR.shape, factor_PRK.shape[2]
    out_TK = low_PTR.new_empty(T, K, dtype=dtype)
    BT, BK, stages = (64, 128 if R <= 32 else 64, 3 if R <= 64 else 2) if P > 1 else (32, 64, 1)
    blocks = _cdiv(K, BK)
    TS = _row_share(T, blocks, BT)
    add_kernel[(blocks, _cdiv(T, TS))](
        None if y_TK is None else y_TK.contiguous(), low_PTR, factor_PRK, out_TK, T, K, TS, scaling,
        R=R, PARTS=P, BT=BT, BK=BK, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out_TK


def factor_gradient(
    low_PTR: torch.Tensor, x_TK: torch.Tensor, rank: int, scaling: float, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    """[r, K] in this dtype, or its transpose: scaling times the low rows, transposed, times x."""
    x_TK = x_TK.contiguous()
    (T, K), (P, _, R) = x_TK.shape, low_PTR.shape
    BT, BK, stages = (64, 128 if R <= 32 else 64, 3) if P > 1 else (32, 32, 2)
    blocks = _cdiv(K, BK)
    TS = _row_share(T, blocks, BT)
    gradient_SKR = x_TK.new_empty(max(1, _cdiv(T, TS)), K, R, dtype=torch.float32)
    gradient_kernel[(blocks, len(gradient_SKR))](
        low_PTR, x_TK, gradient_SKR, T, K, TS, R=R, PARTS=P, BT=BT, BK=BK, num_warps=4, num_stages=stages
    )
    gradient_SKr = gradient_SKR[..., :rank]
    return _sum(gradient_SKr if transposed else gradient_SKr.transpose(1, 2), scaling, 1, dtype)[0]
