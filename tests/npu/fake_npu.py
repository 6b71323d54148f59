"""The operators of torch-npu that the model calls, on CPU: real schemas, plain definitions, every documented limit.

`library()` defines torch.ops.npu from the schemas of torch-npu 2.14 (tests/fixtures/npu) and gives those that the model
uses an implementation. It computes in float64 (sparse attention and its indexer in float32) and rounds once to the
dtype that the operator returns. What a card refuses is a RuntimeError here: head counts, widths, layouts, dtypes,
lengths, kinds of group lists, tensors that are not contiguous, and a gradient through an operator that has none.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

SCHEMAS = Path(__file__).resolve().parents[1] / "fixtures" / "npu" / "torch_npu_2.14_schemas.txt"
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
IMPLEMENTATIONS: dict[str, Callable] = {}
# Operators with a gradient in torch-npu's autograd: the plain function of their inputs.
DIFFERENTIABLE: dict[str, Callable] = {}
CALLS: list[str] = []
CHIP = "Ascend910B3"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"{inspect.stack()[1].function}: {message}")


def is_950() -> bool:
    return "950" in CHIP


def contiguous(**tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise RuntimeError(f"{name} is not contiguous")


def operator(function: Callable) -> Callable:
    """Register an implementation under its own name."""

    @wraps(function)
    def run(*args, **kwargs):
        CALLS.append(function.__name__)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(f"{function.__name__} has no gradient")
        return function(*args, **kwargs)

    IMPLEMENTATIONS[function.__name__] = run
    return function


def schemas() -> list[str]:
    """Three of the 351 strings found in the library are parts of messages, and have no result."""
    return [line for line in SCHEMAS.read_text().splitlines() if " -> " in line]


@contextmanager
def library() -> Iterator[None]:
    """torch.ops.npu, for as long as this lasts."""
    with torch.library._scoped_library("npu", "DEF") as found:
        for schema in schemas():
            found.define(schema)
        for name, function in IMPLEMENTATIONS.items():
            found.impl(name, function, "CPU")
        for name, plain in DIFFERENTIABLE.items():
            found.impl(name, partial(_run, getattr(torch.ops.npu, name), plain), "AutogradCPU")
        yield


def _run(call: Callable, plain: Callable, *args, **kwargs):
    return Differentiated.apply(call, plain, kwargs, *args)


class Differentiated(torch.autograd.Function):
    """An operator with the gradient of a plain function of the same inputs. Those given by name have none."""

    @staticmethod
    def forward(ctx, call, plain, kwargs, *args):
        ctx.plain, ctx.kwargs = plain, kwargs
        ctx.places = [isinstance(x, torch.Tensor) for x in args]
        ctx.others = [x for x, tensor in zip(args, ctx.places, strict=True) if not tensor]
        ctx.save_for_backward(*(x for x, tensor in zip(args, ctx.places, strict=True) if tensor))
        with torch._C._AutoDispatchBelowAutograd():
            outputs = call(*args, **kwargs)
        if isinstance(outputs, tuple):
            whole = [x for x in outputs if isinstance(x, torch.Tensor) and not x.is_floating_point()]
            ctx.mark_non_differentiable(*whole)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        saved, others = iter(ctx.saved_tensors), iter(ctx.others)
        needed = ctx.needs_input_grad[3:]
        args = [next(saved).detach() if tensor else next(others) for tensor in ctx.places]
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x, need in zip(args, needed, strict=True) if need]
            outputs = ctx.plain(*args, **ctx.kwargs)
            pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=False) if y is not None and y.requires_grad]
            found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [grad for _, grad in pairs]))
        return None, None, None, *(next(found) if need else None for need in needed)


# Norm, loss and gate.


def plain_rms_norm(x, gamma, epsilon=1e-6):
    wide = x.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.double()).to(x.dtype), rstd.float()


@operator
def npu_rms_norm(x, gamma, epsilon=1e-6):
    require(x.dtype in FLOATS and x.dtype == gamma.dtype, f"dtypes {x.dtype}, {gamma.dtype}")
    require(1 <= x.dim() <= 8 and x.shape[-1:] == gamma.shape, f"shapes {x.shape}, {gamma.shape}")
    return plain_rms_norm(x, gamma, epsilon)


def plain_cross_entropy(logits, target, *_, **__):
    return (F.cross_entropy(logits.double(), target, reduction="none").to(logits.dtype),)


@operator
def npu_cross_entropy_loss(
    logits, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, scale=0.0, return_zloss=False
):
    require(logits.dtype in FLOATS and target.dtype == torch.int64, f"dtypes {logits.dtype}, {target.dtype}")
    require(0 < len(logits) <= 200_000 and logits.dim() == 2, f"logits {logits.shape}")
    require(bool(((target >= 0) & (target < logits.shape[1])).all()), "targets outside of the classes")
    require(weight is None and reduction == "none" and ignore_index == -100, "arguments without a gradient")
    require(not (label_smoothing or scale or return_zloss), "smoothing and zloss")
    (loss,) = plain_cross_entropy(logits, target)
    return loss, logits.log_softmax(-1), loss.new_empty(0), loss.new_empty(0)


def plain_gating(
    x, k, *, bias=None, k_group=1, group_count=1, group_select_mode=0, routed_scaling_factor=1.0, eps=1e-20, **_
):
    score = x.double().sigmoid()
    choice = score.detach() + (0 if bias is None else bias.double())
    if group_count > 1:
        grouped = choice.unflatten(1, (group_count, -1))
        best = grouped.topk(2 if group_select_mode else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(k_group, dim=-1).indices, 1).bool()
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    index = choice.topk(k, dim=-1).indices
    chosen = score.gather(1, index)
    y = chosen / (chosen.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return y.to(x.dtype), None, None, index, score.detach()


@operator
def npu_moe_gating_top_k(
    x,
    k,
    *,
    bias=None,
    input_ids=None,
    tid2eid=None,
    k_group=1,
    group_count=1,
    group_select_mode=0,
    renorm=0,
    norm_type=0,
    out_flag=False,
    routed_scaling_factor=1.0,
    eps=1e-20,
):
    experts = x.shape[1]
    require(x.dim() == 2 and x.dtype in FLOATS and experts <= 2048, f"x {x.dtype} {x.shape}")
    require(bias is None or (bias.dtype == x.dtype and bias.shape == (experts,)), "bias")
    require(input_ids is None and tid2eid is None, "hash mode is for other models")
    require(experts % group_count == 0 and experts // group_count > 2, f"{experts} experts in {group_count} groups")
    require(-(-experts // group_count // 32) * 32 * group_count <= 2048, "aligned groups")
    require(1 <= k_group <= group_count and 1 <= k <= experts // group_count * k_group, f"k {k} of {k_group} groups")
    require(renorm == 0 and norm_type == 1 and group_select_mode in (0, 1), "modes; softmax is not played")
    options = {"routed_scaling_factor": routed_scaling_factor, "eps": eps}
    groups = {"k_group": k_group, "group_count": group_count, "group_select_mode": group_select_mode}
    y, _, _, index, score = plain_gating(x, k, bias=bias, **groups, **options)
    # without it the output is not written, and there is nothing for backward
    return y, index.int(), score.float() if out_flag else torch.full_like(score, torch.nan).float()


# Dense attention.


def documents(query_ends: list[int], key_ends: list[int]) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of every document, and nothing else."""
    require(len(query_ends) == len(key_ends), f"{len(query_ends)} ends of queries, {len(key_ends)} of keys")
    start = low = 0
    for stop, end in zip(query_ends, key_ends, strict=True):
        require(stop >= start and end >= low, f"ends that fall: {query_ends}, {key_ends}")
        yield slice(start, stop), slice(low, end)
        start, low = stop, end


def causal(queries: int, keys: int) -> torch.Tensor:
    """Aligned to the last query and the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def plain_attention(q, k, v, *rest, scale=1.0, actual_seq_qlen=None, actual_seq_kvlen=None, **_):
    if len(rest) > 2:
        # head_num, layout, pse, padding_mask, atten_mask, scale, keep_prob, pre, next, inner_precise, prefix, ends
        scale, actual_seq_qlen, actual_seq_kvlen = rest[5], *rest[11:13]
    outs, largest, totals = [], [], []
    for rows, keys in documents(actual_seq_qlen, actual_seq_kvlen):
        score = torch.einsum("tnk,snk->tns", q[rows].double(), k[keys].double()) * scale
        score = score.masked_fill(~causal(*score.shape[::2]).unsqueeze(1), -torch.inf)
        top = score.detach().amax(-1, keepdim=True)
        weight = (score - top).exp()
        total = weight.sum(-1, keepdim=True)
        outs.append(torch.einsum("tns,snv->tnv", weight / total, v[keys].double()))
        largest.append(top)
        totals.append(total)
    return torch.cat(outs).to(q.dtype), torch.cat(largest).detach(), torch.cat(totals).detach()


@operator
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
    dropout_mask=None,
    seed=0,
    offset=0,
):
    require(input_layout == "TND" and softmax_layout in ("", "TND"), "layouts other than TND are not played")
    require(query.dtype in FLOATS and query.dtype == key.dtype == value.dtype, "dtypes")
    (T, N, width), (S, heads, key_width) = query.shape, key.shape
    require(N == head_num == heads == value.shape[1] <= 256 and len(value) == S, "heads")
    require(width == key_width and value.shape[2] <= width <= 768, f"widths {width}, {key_width}, {value.shape[2]}")
    require(1 <= T <= 2**20 and 1 <= S <= 2**20, "tokens")
    require(1 <= len(actual_seq_qlen) <= 1024 and actual_seq_qlen[-1] == T and actual_seq_kvlen[-1] == S, "documents")
    require(sparse_mode == 3 and atten_mask is not None, "masks other than causal are not played")
    require(atten_mask.dtype in (torch.bool, torch.uint8) and atten_mask.shape == (2048, 2048), "mask")
    require(torch.equal(atten_mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "mask is not causal")
    require(all(x is None for x in (pse, padding_mask, prefix, sink, dropout_mask)) and keep_prob == 1, "options")
    ends = {"actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen}
    out, top, total = plain_attention(query, key, value, scale=scale, **ends)
    # Unless asked for, their order is another.
    eight = [x.float().expand(T, N, 8).contiguous().mul(1 if softmax_layout else torch.nan) for x in (top, total)]
    return out, *eight, query.new_empty(0), 0, 0, 0


# Sparse attention and its indexer.


def prefix_sums(ends: torch.Tensor | list[int] | None, tokens: int, kind: type) -> list[int]:
    require(ends is not None, "layout TND needs the ends of documents")
    if kind is torch.Tensor:
        require(isinstance(ends, torch.Tensor) and ends.dtype == torch.int32 and ends.dim() == 1, "ends are int32 [B]")
        ends = ends.tolist()
    require(len(ends) >= 1 and ends[-1] == tokens, f"documents end at {ends[-1:]} of {tokens}")
    return ends


def unlimited(pre_tokens: int, next_tokens: int) -> None:
    require(pre_tokens == next_tokens == 2**63 - 1, "pre_tokens and next_tokens are not supported")


def index_scores(q, k, weight):
    """[t, s], without a scale."""
    dots = F.relu((q.flatten(0, 1).float() @ k.float().T).unflatten(0, q.shape[:2]))
    return torch.einsum("tis,ti->ts", dots, weight.float()).double()


def index_shapes(query, key, weights, heads: tuple[int, ...] | range) -> None:
    require(query.dim() == 3 and key.dim() == 3 and key.shape[1] == 1, "shapes are [T, N, D] and [S, 1, D]")
    require(query.dtype in HALF and key.dtype == query.dtype, f"dtypes {query.dtype}, {key.dtype}")
    require(query.shape[1] in heads and query.shape[2] == key.shape[2] == 128, f"indexer {query.shape}")
    require(weights.shape == query.shape[:2] and weights.dtype in (query.dtype, torch.float32), "weights")
    require(not (is_950() and weights.dtype == torch.float32), "weights on 950 are not fp32")
    contiguous(query=query, key=key, weights=weights)


@operator
def npu_lightning_indexer(
    query,
    key,
    weights,
    *,
    actual_seq_lengths_query=None,
    actual_seq_lengths_key=None,
    block_table=None,
    layout_query="BSND",
    layout_key="BSND",
    sparse_count=2048,
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
    return_value=False,
):
    require(layout_query == layout_key == "TND" and block_table is None, "layouts other than TND are not played")
    require(query.numel() > 0 and key.numel() > 0, "empty inputs")
    index_shapes(query, key, weights, (8, 16, 24, 32, 64) if is_950() else range(1, 65))
    require(1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024), f"sparse_count {sparse_count}")
    require(sparse_mode == 3, "full attention is not played")
    unlimited(pre_tokens, next_tokens)
    ends = [prefix_sums(actual_seq_lengths_query, len(query), torch.Tensor)]
    ends.append(prefix_sums(actual_seq_lengths_key, len(key), torch.Tensor))
    # What the operator leaves behind the last visible key is not documented.
    index = torch.full((len(query), 1, sparse_count), -7, dtype=torch.int32)
    for rows, keys in documents(*ends):
        score = index_scores(query[rows], key[keys].squeeze(1), weights[rows])
        for t, visible in zip(range(rows.start, rows.stop), causal(*score.shape).sum(-1).tolist(), strict=True):
            best = score[t - rows.start, :visible].sort(descending=True, stable=True).indices[:sparse_count]
            index[t, 0, : len(best)] = best
    return index, query.new_empty(0)


def listed_keys(index, rows: slice, queries: int, keys: int) -> list[torch.Tensor]:
    """What each query of a document attends to: as many entries as it may have, each a visible key and none twice."""
    lists = []
    visible = causal(queries, keys).sum(-1).tolist()
    for t, most in zip(range(rows.start, rows.stop), visible, strict=True):
        row = index[t, 0]
        listed = row[: min(most, len(row))]
        require(bool((listed >= 0).all()), f"query {t} sees {most} keys and lists {int((row >= 0).sum())}")
        require(bool((listed < most).all()), f"query {t} lists a key that it does not see")
        require(bool((row[len(listed) :] == -1).all()), f"query {t} lists more keys than it sees")
        require(len(listed.unique()) == len(listed), f"query {t} lists a key twice")
        lists.append(listed.long())
    return lists


def latent_shapes(query, key, value, query_rope, key_rope, heads: tuple[int, ...] | range) -> None:
    require(query.dim() == 3 and key.dim() == 3 and key.shape[1] == 1, "shapes are [T, N, D] and [S, 1, D]")
    require(query.shape[2] == key.shape[2] == 512, f"latents {query.shape[2]}, {key.shape[2]}")
    require(query_rope is not None and key_rope is not None, "the rotary part is required")
    require(query_rope.shape == (*query.shape[:2], 64) and key_rope.shape == (*key.shape[:2], 64), "rotary shapes")
    require(query.shape[1] in heads, f"{query.shape[1]} heads")
    require(value is None or value.shape == key.shape, "value has the shape of key")
    tensors = {"query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope}
    require(all(x is None or (x.dtype == query.dtype and x.dtype in HALF) for x in tensors.values()), "dtypes")
    contiguous(**tensors)


def attention_heads() -> tuple[int, ...] | range:
    return range(1, 129) if is_950() else (1, 2, 4, 8, 16, 32, 64, 128)


LOSS_KEYS = tuple(range(1024, 8193, 1024))
# Queries whose scores are held at a time.
ROWS = 128


def sparse_blocks(query, key, index, ends) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Some queries, the keys of their document up to the last that one sees, and which ones each lists, bool [t, s]."""
    for rows, keys in documents(*ends):
        queries, size = rows.stop - rows.start, keys.stop - keys.start
        lists = listed_keys(index, rows, queries, size)
        for start in range(rows.start, rows.stop, ROWS):
            stop = min(start + ROWS, rows.stop)
            seen = slice(keys.start, keys.stop - (rows.stop - stop))
            mask = torch.zeros(stop - start, seen.stop - seen.start, dtype=torch.bool)
            for t in range(start, stop):
                mask[t - start, lists[t - rows.start]] = True
            yield slice(start, stop), seen, mask


def joined(x, rope) -> torch.Tensor:
    return torch.cat([x, rope], dim=-1).float()


def logits(q, k, scale, mask) -> torch.Tensor:
    """fp32 [t, n, s]: in double the model of the limits' size would take minutes."""
    score = (q.flatten(0, 1) @ k.T).mul_(scale).unflatten(0, q.shape[:2])
    return score.masked_fill_(~mask.unsqueeze(1), -torch.inf)


@operator
def npu_sparse_flash_attention(
    query,
    key,
    value,
    sparse_indices,
    scale_value,
    *,
    block_table=None,
    actual_seq_lengths_query=None,
    actual_seq_lengths_kv=None,
    query_rope=None,
    key_rope=None,
    sparse_block_size=1,
    layout_query="BSND",
    layout_kv="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
    attention_mode=0,
    return_softmax_lse=False,
    sinks=None,
):
    require(layout_query == layout_kv == "TND" and block_table is None, "layouts other than TND are not played")
    require(attention_mode == 2, f"attention_mode {attention_mode}")
    require(value is not None, "without values from CANN 9.2 on")
    require(sparse_block_size == 1 and sparse_mode == 3 and sinks is None, "options that are not played")
    latent_shapes(query, key, value, query_rope, key_rope, attention_heads())
    require(sparse_indices.dtype == torch.int32 and sparse_indices.shape[:2] == (len(query), 1), "sparse_indices")
    contiguous(sparse_indices=sparse_indices)
    unlimited(pre_tokens, next_tokens)
    ends = [prefix_sums(actual_seq_lengths_query, len(query), torch.Tensor)]
    ends.append(prefix_sums(actual_seq_lengths_kv, len(key), torch.Tensor))
    T, N, _ = query.shape
    out, top, total = torch.empty_like(query), torch.full((1, T, N), -torch.inf), torch.zeros(1, T, N)
    q, k, v = joined(query, query_rope), joined(key, key_rope).squeeze(1), value.squeeze(1).float()
    for rows, seen, mask in sparse_blocks(query, key, sparse_indices, ends):
        score = logits(q[rows], k[seen], scale_value, mask)
        top[0, rows] = score.amax(-1)
        weight = score.sub_(top[0, rows].unsqueeze(-1)).exp_()
        total[0, rows] = weight.sum(-1)
        found = (weight.flatten(0, 1) @ v[seen]).unflatten(0, weight.shape[:2])
        out[rows] = (found / total[0, rows].unsqueeze(-1)).to(out.dtype)
    if return_softmax_lse:
        return out, top, total
    return out, torch.empty(0), torch.empty(0)


@operator
def npu_sparse_flash_attention_grad(
    query,
    key,
    value,
    sparse_indices,
    d_out,
    out,
    softmax_max,
    softmax_sum,
    scale_value,
    sparse_block_size,
    query_rope=None,
    key_rope=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
    attention_mode=0,
):
    require(layout == "TND" and attention_mode == 2 and sparse_mode == 3 and sparse_block_size == 1, "options")
    latent_shapes(query, key, value, query_rope, key_rope, attention_heads())
    T, N, _ = query.shape
    require(d_out.shape == out.shape == query.shape and d_out.dtype == out.dtype == query.dtype, "outputs")
    require(softmax_max.shape == softmax_sum.shape == (1, T, N), "softmax statistics are [1, T, N]")
    require(softmax_max.dtype == softmax_sum.dtype == torch.float32, "softmax statistics are fp32")
    contiguous(d_out=d_out, out=out, sparse_indices=sparse_indices, softmax_max=softmax_max, softmax_sum=softmax_sum)
    unlimited(pre_tokens, next_tokens)
    ends = [prefix_sums(actual_seq_qlen, T, torch.Tensor), prefix_sums(actual_seq_kvlen, len(key), torch.Tensor)]
    q, k, v, grad = joined(query, query_rope), joined(key, key_rope).squeeze(1), value.squeeze(1).float(), d_out.float()
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen, mask in sparse_blocks(query, key, sparse_indices, ends):
        score = logits(q[rows], k[seen], scale_value, mask)
        share = score.sub_(softmax_max[0, rows].unsqueeze(-1)).exp_().div_(softmax_sum[0, rows].unsqueeze(-1))
        g, p = grad[rows].flatten(0, 1), share.flatten(0, 1)
        dv[seen] += p.T @ g
        delta = (grad[rows] * out[rows].float()).sum(-1).flatten()
        ds = (g @ v[seen].T).sub_(delta.unsqueeze(1)).mul_(p).mul_(scale_value)
        dq[rows] = (ds @ k[seen]).unflatten(0, share.shape[:2])
        dk[seen] += ds.T @ q[rows].flatten(0, 1)
    dk, dv = dk.unsqueeze(1), dv.unsqueeze(1)
    found = dq[..., :512], dk[..., :512], dv, dq[..., 512:], dk[..., 512:]
    return tuple(x.to(query.dtype).contiguous() for x in found)


def score_gradients(q, k, weight, dscore):
    """Of scores [t, s], for a gradient of them: what reaches q [t, i, k], k [s, k] and weight [t, i]."""
    q, k, weight, dscore = (x.float() for x in (q, k, weight, dscore))
    dots = (q.flatten(0, 1) @ k.T).unflatten(0, q.shape[:2])
    dweight = torch.einsum("tis,ts->ti", F.relu(dots), dscore)
    ddots = ((dots > 0) * weight.unsqueeze(-1) * dscore.unsqueeze(1)).flatten(0, 1)
    return (ddots @ k).unflatten(0, q.shape[:2]), ddots.T @ q.flatten(0, 1), dweight


@operator
def npu_lightning_indexer_grad(
    query,
    key,
    dy,
    sparse_indices,
    weights,
    actual_seq_lengths_query=None,
    actual_seq_lengths_key=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
):
    require(not is_950(), "not on Ascend 950")
    require(layout == "TND" and sparse_mode == 3, "layouts other than TND are not played")
    index_shapes(query, key, weights, range(1, 65))
    require(weights.dtype == dy.dtype == query.dtype, "weights and dy have the dtype of query")
    require(dy.shape == sparse_indices.shape and dy.dim() == 2 and len(dy) == len(query), "dy and lists are [T, k]")
    require(sparse_indices.dtype == torch.int32, "lists are int32")
    contiguous(dy=dy, sparse_indices=sparse_indices)
    unlimited(pre_tokens, next_tokens)
    ends = [prefix_sums(actual_seq_lengths_query, len(query), torch.Tensor)]
    ends.append(prefix_sums(actual_seq_lengths_key, len(key), torch.Tensor))
    dq, dk, dweight = (torch.zeros_like(x, dtype=torch.float64) for x in (query, key.squeeze(1), weights))
    for rows, seen, mask in sparse_blocks(query, key, sparse_indices.unsqueeze(1), ends):
        given = sparse_indices[rows] >= 0
        dscore = torch.zeros(mask.shape, dtype=torch.float64)
        dscore.scatter_add_(1, sparse_indices[rows].clamp(min=0).long(), dy[rows].double().masked_fill(~given, 0))
        dq[rows], dkeys, dweight[rows] = score_gradients(query[rows], key[seen, 0], weights[rows], dscore)
        dk[seen] += dkeys
    return dq.to(query.dtype), dk.unsqueeze(1).to(key.dtype), dweight.to(weights.dtype)


def divergence(teacher, score, mask):
    """Sum over queries of KL(teacher / its sum || softmax of the scores), and its gradient to the scores."""
    p = teacher.masked_fill(~mask, 0)
    p = p / p.sum(-1, keepdim=True)
    log_student = score.masked_fill(~mask, -torch.inf).log_softmax(-1)
    loss = (torch.xlogy(p, p) - torch.where(mask, p * log_student, 0)).sum()
    return loss, log_student.exp() - p


def loss_limits(query_index, key_index, weights, layout, sparse_mode, ends, T, S) -> None:
    index_shapes(query_index, key_index, weights, (32, 64) if is_950() else (8, 16, 32, 64))
    require(layout == "TND" and sparse_mode == 3, "layouts other than TND are not played, modes other than 3 refused")
    require(1 <= len(ends[0]) <= (128 if is_950() else 256), f"{len(ends[0])} documents")
    require(1 <= T <= 8192, f"{T} queries")
    require(1 <= S <= 131_072, f"{S} keys")


@operator
def npu_sparse_lightning_indexer_grad_kl_loss(
    query,
    key,
    query_index,
    key_index,
    weights,
    sparse_indices,
    softmax_max,
    softmax_sum,
    scale_value,
    *,
    query_rope=None,
    key_rope=None,
    actual_seq_qlen=None,
    actual_seq_klen=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
    sinks=None,
):
    T, N, _ = query.shape
    ends = [prefix_sums(actual_seq_qlen, T, list), prefix_sums(actual_seq_klen, len(key), list)]
    latent_shapes(query, key, None, query_rope, key_rope, (32, 64, 128))
    loss_limits(query_index, key_index, weights, layout, sparse_mode, ends, T, len(key))
    require(sinks is None and query_index.dtype == query.dtype, "options")
    require(sparse_indices.shape[:2] == (T, 1) and sparse_indices.shape[2] in LOSS_KEYS, "sparse_indices")
    require(softmax_max.shape == softmax_sum.shape == (1, T, N), "softmax statistics are [1, T, N]")
    contiguous(sparse_indices=sparse_indices, softmax_max=softmax_max, softmax_sum=softmax_sum)
    q, k = joined(query, query_rope), joined(key, key_rope).squeeze(1)
    dq, dk, dweight = (torch.zeros_like(x, dtype=torch.float64) for x in (query_index, key_index.squeeze(1), weights))
    loss = torch.zeros(1, dtype=torch.float64)
    for rows, seen, mask in sparse_blocks(query, key, sparse_indices, ends):
        score = logits(q[rows], k[seen], scale_value, mask)
        share = score.sub_(softmax_max[0, rows].unsqueeze(-1)).exp_().div_(softmax_sum[0, rows].unsqueeze(-1))
        index = query_index[rows], key_index[seen, 0], weights[rows]
        term, dscore = divergence(share.double().sum(1), index_scores(*index), mask)
        loss += term
        dq[rows], dkeys, dweight[rows] = score_gradients(*index, dscore)
        dk[seen] += dkeys
    return dq.to(query.dtype), dk.unsqueeze(1).to(query.dtype), dweight.to(weights.dtype), loss.float()


@operator
def npu_dense_lightning_indexer_softmax_lse(
    query_index,
    key_index,
    weights,
    *,
    actual_seq_qlen=None,
    actual_seq_klen=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
):
    require(not is_950(), "not on Ascend 950")
    T = len(query_index)
    ends = [prefix_sums(actual_seq_qlen, T, list), prefix_sums(actual_seq_klen, len(key_index), list)]
    loss_limits(query_index, key_index, weights, layout, sparse_mode, ends, T, len(key_index))
    top, total = torch.empty(1, T), torch.empty(1, T)
    for rows, keys in documents(*ends):
        score = index_scores(query_index[rows], key_index[keys, 0], weights[rows])
        score = score.masked_fill(~causal(*score.shape), -torch.inf)
        top[0, rows] = score.amax(-1).float()
        total[0, rows] = (score - score.amax(-1, keepdim=True)).exp().sum(-1).float()
    return top, total


@operator
def npu_dense_lightning_indexer_grad_kl_loss(
    query,
    key,
    query_index,
    key_index,
    weights,
    softmax_max,
    softmax_sum,
    softmax_max_index,
    softmax_sum_index,
    scale_value,
    *,
    query_rope=None,
    key_rope=None,
    actual_seq_qlen=None,
    actual_seq_klen=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=2**63 - 1,
    next_tokens=2**63 - 1,
):
    require(not is_950(), "not on Ascend 950")
    T, N, _ = query.shape
    ends = [prefix_sums(actual_seq_qlen, T, list), prefix_sums(actual_seq_klen, len(key), list)]
    loss_limits(query_index, key_index, weights, layout, sparse_mode, ends, T, len(key))
    require(N in (32, 64, 128) and key.shape[1] == N, f"{N} and {key.shape[1]} heads")
    require(query.shape[2] == key.shape[2] == 128, f"heads are {query.shape[2]} wide")
    require(query_rope.shape == (T, N, 64) and key_rope.shape == (len(key), N, 64), "rotary shapes")
    require(all(x.dtype == query_index.dtype for x in (query, key, query_rope, key_rope)), "dtypes")
    require(softmax_max.shape == softmax_sum.shape == (N, T, 1), "softmax statistics are [N, T, 1]")
    require(softmax_max_index.shape == softmax_sum_index.shape == (1, T), "index statistics are [1, T]")
    tensors = {"query": query, "key": key, "query_rope": query_rope, "key_rope": key_rope}
    contiguous(**tensors, softmax_max=softmax_max, softmax_sum=softmax_sum)
    q, k = joined(query, query_rope).double(), joined(key, key_rope).double()
    dq, dk, dweight = (torch.zeros_like(x, dtype=torch.float64) for x in (query_index, key_index.squeeze(1), weights))
    loss = torch.zeros(1, dtype=torch.float64)
    for rows, keys in documents(*ends):
        mask = causal(rows.stop - rows.start, keys.stop - keys.start)
        score = torch.einsum("tnk,snk->nts", q[rows], k[keys]) * scale_value
        share = ((score - softmax_max[:, rows]).exp() / softmax_sum[:, rows]).masked_fill(~mask, 0)
        index = query_index[rows], key_index[keys, 0], weights[rows]
        scores = index_scores(*index)
        # They are what the indexer's softmax is taken with.
        student = (scores - softmax_max_index[0, rows, None]).exp() / softmax_sum_index[0, rows, None]
        term, dscore = divergence(share.sum(0), scores, mask)
        require(torch.allclose(student.masked_fill(~mask, 0).sum(-1), torch.ones(len(scores)).double()), "statistics")
        loss += term
        dq[rows], dkeys, dweight[rows] = score_gradients(*index, dscore)
        dk[keys] += dkeys
    return dq.to(query.dtype), dk.unsqueeze(1).to(query.dtype), dweight.to(weights.dtype), loss.float()


# Experts.


def plain_permute(tokens, indices, num_out_tokens=None, *_, **__):
    slots = indices.numel() // len(tokens)
    order = indices.flatten().argsort(stable=True)
    rows = num_out_tokens if num_out_tokens else len(order)
    return (tokens[order[:rows] // slots],)


@operator
def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    require(tokens.dim() == 2 and tokens.dtype in FLOATS, f"tokens {tokens.dtype} {tokens.shape}")
    require(indices.dtype in (torch.int32, torch.int64) and indices.dim() in (1, 2), "indices")
    require(indices.numel() < 16_777_215 and len(indices) == len(tokens), "indices")
    require(bool(((indices >= 0) & (indices < 16_777_215)).all()), "indices out of range")
    require(not padded_mode and (num_out_tokens is None or num_out_tokens <= indices.numel()), "num_out_tokens")
    order = indices.flatten().argsort(stable=True)
    return *plain_permute(tokens, indices, num_out_tokens), order.argsort().int()


def slot_sums(rows, place, tokens: int, slots: int):
    """[T, L]: rows [R, L] of every token added up in the order of its slots; slots without a row add nothing."""
    padded = torch.cat([rows.double(), rows.new_zeros(1, rows.shape[1]).double()])
    return padded[place.long().clamp(max=len(rows))].unflatten(0, (tokens, slots)).sum(1)


@operator
def npu_moe_token_permute_grad_v2(grad, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode=False):
    require(grad.dim() == 2 and sorted_indices.dtype == torch.int32 and sorted_indices.dim() == 1, "shapes")
    require(len(sorted_indices) == tokens_size_0 * num_topK and grad.dtype == tokens_dtype, "sizes")
    return slot_sums(grad, sorted_indices, tokens_size_0, num_topK).to(tokens_dtype)


def plain_unpermute(rows, place, probs=None, *_, **__):
    slots = 1 if probs is None else probs.shape[1]
    weighted = rows.double()[place.long()].unflatten(0, (-1, slots))
    return ((weighted if probs is None else weighted * probs.double().unsqueeze(-1)).sum(1).to(rows.dtype),)


@operator
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    require(permuted_tokens.dim() == 2 and permuted_tokens.dtype in FLOATS, "permuted_tokens")
    require(sorted_indices.dtype == torch.int32 and sorted_indices.shape == permuted_tokens.shape[:1], "sorted_indices")
    require(sorted_indices.unique().numel() == len(sorted_indices), "sorted_indices repeat")
    require(bool(((sorted_indices >= 0) & (sorted_indices < len(sorted_indices))).all()), "sorted_indices out of range")
    require(probs is None or (probs.dim() == 2 and probs.shape[1] <= 512 and probs.dtype in FLOATS), "probs")
    require(not padded_mode and restore_shape is None, "padded_mode")
    return plain_unpermute(permuted_tokens, sorted_indices, probs)[0]


@operator
def npu_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, **options):
    require(not any(value for value in options.values()), f"options that are not played: {options}")
    require(len(x) == len(weight) == 1 and split_item in (2, 3), "one tensor each, one output")
    (x,), (weight,) = x, weight
    require(x.dtype in FLOATS and x.dtype == weight.dtype, f"dtypes {x.dtype}, {weight.dtype}")
    require(group_list is not None and group_list.dtype == torch.int64 and group_list.dim() == 1, "group_list")
    require(len(group_list) <= 1024, f"{len(group_list)} groups")
    require(group_list_type in (0, 1) and not (group_list_type == 1 and len(group_list) == 1), "one number of rows")
    ends = (group_list if group_list_type == 0 else group_list.cumsum(0)).tolist()
    require(ends[0] >= 0 and all(a <= b for a, b in pairwise(ends)), f"group_list {ends}")
    starts = [0, *ends[:-1]]
    require(max(*x.shape, *weight.shape[-2:]) < 65_536, "axes")
    if group_type == 0:
        require(x.is_contiguous() and x.dim() == 2 and weight.dim() == 3, "shapes")
        require(
            weight.is_contiguous() or weight.transpose(1, 2).is_contiguous(), "weight is no whole or transposed stack"
        )
        require(len(weight) == len(ends) and x.shape[1] == weight.shape[1] and ends[-1] == len(x), f"{x.shape}, {ends}")
        # Rows of a group at a time.
        parts = [x[a:b].double() @ matrix.double() for a, b, matrix in zip(starts, ends, weight, strict=True)]
        return [torch.cat(parts).to(x.dtype)]
    require(group_type == 2, f"group_type {group_type}")
    require(x.T.is_contiguous() and weight.is_contiguous() and x.dim() == weight.dim() == 2, "x is transposed")
    require(x.shape[1] == len(weight) == ends[-1], f"{x.shape}, {weight.shape}, {ends}")
    # A group without rows is left as it was.
    found = torch.full((len(ends), x.shape[0], weight.shape[1]), torch.nan, dtype=torch.float64)
    for group, (a, b) in enumerate(zip(starts, ends, strict=True)):
        if a < b:
            found[group] = x[:, a:b].double() @ weight[a:b].double()
    return [found.to(x.dtype)]


# KDA.


@operator
def npu_recurrent_gated_delta_rule_functional(
    query,
    key,
    value,
    state,
    *,
    beta=None,
    scale=None,
    actual_seq_lengths=None,
    ssm_state_indices=None,
    num_accepted_tokens=None,
    g=None,
    gk=None,
):
    require(all(x.dtype == torch.bfloat16 for x in (query, key, value, state, beta)), "all but the decay is bf16")
    (T, Nk, Dk), (_, Nv, Dv) = key.shape, value.shape
    require(query.shape == key.shape and len(value) == len(beta) == T, "tokens")
    require(max(Nk, Nv, Dk, Dv) <= 256 and Nv % Nk == 0, "heads and widths")
    require(state.shape[1:] == (Nv, Dv, Dk) and len(state) >= T, "the state is [blocks, Nv, Dv, Dk]")
    require(beta.shape == (T, Nv) and scale is not None, "beta and scale are required")
    require(gk is not None and gk.dtype == torch.float32 and gk.shape == (T, Nv, Dk), "gk is fp32 [T, Nv, Dk]")
    require(g is None and num_accepted_tokens is None, "options that are not played")
    for x in (actual_seq_lengths, ssm_state_indices):
        require(x is not None and x.dtype == torch.int32, "lengths and places are int32")
    lengths = actual_seq_lengths.tolist()
    require(all(1 <= n <= 8 for n in lengths) and sum(lengths) == T == len(ssm_state_indices), "lengths")
    contiguous(query=query, key=key, value=value, state=state, beta=beta, gk=gk)
    require(max(lengths) == 1, "several tokens of a sequence are not played")
    out, new = torch.empty_like(value), state.clone()
    q, k, v, b = (x.double() for x in (query * 1, key, value, beta))
    for t, place in enumerate(ssm_state_indices.tolist()):
        S = state[place].double() * gk[t].double().exp().unsqueeze(1)
        read = torch.einsum("hvk,hk->hv", S, k[t])
        S = S + torch.einsum("hv,hk->hvk", b[t].unsqueeze(-1) * (v[t] - read), k[t])
        out[t] = torch.einsum("hvk,hk->hv", S, q[t] * scale).to(out.dtype)
        new[place] = S.to(state.dtype)
    return out, new


DIFFERENTIABLE.update(
    npu_rms_norm=plain_rms_norm,
    npu_cross_entropy_loss=plain_cross_entropy,
    npu_moe_gating_top_k=plain_gating,
    npu_fusion_attention=plain_attention,
    npu_moe_token_permute=plain_permute,
    npu_moe_token_unpermute=plain_unpermute,
)
