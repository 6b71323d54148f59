"""How good a choice of keys is: the share of dense attention that the chosen ones hold, and the loss with them.

Legend: B batch, T tokens, S keys, D model width, Q query latent, N heads, H head width, L width of a latent; M real
        tokens of all documents in order, k chosen keys, t queries and s keys of a block.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from modeling_latentmoe.documents import Documents
from modeling_latentmoe.sparse import Teacher, dense_probabilities, query_blocks
from modeling_latentmoe.training.data import Chat
from modeling_latentmoe.training.evaluate import held_out_batches
from modeling_latentmoe.training.loss import count_loss_tokens
from modeling_latentmoe.training.sums import summed


@contextmanager
def attention_of(model: Any, dense: bool) -> Iterator[None]:
    """Attention of indexed layers to all keys, or to those that their indexers choose."""
    config = model.config.get_text_config()
    before = config.dense_attention
    config.dense_attention = dense
    try:
        yield
    finally:
        config.dense_attention = before


class Mass:
    """How much of dense attention the keys that an indexer chooses get, beside others of the same number.

    A context in which the forward passes of `model`, in evaluation and with dense attention, are watched. `sums`:
    shares of the probability of all heads together, summed over queries and indexed layers: of the chosen keys, of the
    best ones, of the last ones and of as many keys at random; then the number of terms. Queries that see no more than
    index_topk keys, which are chosen anyway, do not count.
    """

    NAMES = ("chosen", "best", "last", "random")

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if getattr(m, "indexer_type", "none") != "none"]
        self.sums = torch.zeros(len(self.NAMES) + 1, dtype=torch.float64)

    def __enter__(self) -> "Mass":
        self.handles = [layer.register_forward_hook(self._look) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    @torch.no_grad()
    def _look(self, layer: nn.Module, args: tuple, output: object) -> None:
        x_BTD, documents = args[:2]
        c_BTQ, q_BTNH, latent_BTL = layer.project(x_BTD)
        if layer.indexer_type == "full":
            # of the shared layers behind it, too
            self.owner, self.index_Mk = layer.indexer, None
            if documents.longest > layer.indexer.topk:
                student = layer.indexer.student(x_BTD, c_BTQ, layer.indexer.keys(x_BTD), documents)
                self.index_Mk = layer.indexer.choose(student, documents).index_Mk
        if self.index_Mk is not None:
            teacher, _ = layer.absorb(q_BTNH, latent_BTL, documents)
            self.sums += attention_mass(teacher, self.index_Mk, documents, self.owner.topk).cpu()


def attention_mass(teacher: Teacher, index_Mk: Tensor, documents: Documents, topk: int) -> Tensor:
    """`Mass.sums` of one layer."""
    q_MNL, kv_SL, scale, sink_N = teacher
    sums = torch.zeros(len(Mass.NAMES) + 1, dtype=torch.float64, device=q_MNL.device)
    first_M, end_M = documents.key_ranges
    for rows in query_blocks(len(q_MNL), len(kv_SL) * (q_MNL.shape[1] + 4)):
        first, end, index = first_M[rows], end_M[rows], index_Mk[rows]
        p_ts, keys = dense_probabilities(q_MNL[rows], kv_SL, first, end, scale, sink_N)
        p_ts = p_ts.double() / p_ts.sum(-1, keepdim=True)
        counted_t = end - first > topk
        number_t = (index >= 0).sum(-1)
        place_s = torch.arange(keys.start, keys.stop, device=p_ts.device)
        chosen = p_ts.gather(1, (index.long() - keys.start).clamp(min=0)).masked_fill(index < 0, 0).sum(-1)
        # of the largest, as many as were chosen
        best = p_ts.sort(descending=True).values.cumsum(-1).gather(1, number_t[:, None] - 1).squeeze(1)
        last = (p_ts * (place_s >= (end - number_t)[:, None])).sum(-1)
        shares = torch.stack([chosen, best, last, number_t / (end - first), torch.ones_like(best)])
        sums += (shares * counted_t).sum(1)
    return sums


@torch.no_grad()
def evaluate_choice(
    accelerator: Accelerator, model: Any, processor: Any, chats: Iterable[Chat], *, batch_size: int, thinking: bool
) -> dict[str, float]:
    """Held-out loss with dense attention, and the shares of `Mass`, over the chats of all processes; no shares where no
    chat has more than index_topk tokens."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with attention_of(model, dense=True), Mass(model) as mass:
        for group, batch in held_out_batches(accelerator, model, processor, chats, batch_size, thinking):
            before = mass.sums.clone()
            loss = model(**batch, num_items_in_batch=1, return_logits=False).loss
            if group:
                totals += torch.tensor([loss.item(), count_loss_tokens(batch["labels"])], dtype=torch.float64)
            else:
                mass.sums = before
    model.train(was_training)
    loss, tokens, *shares, terms = summed(torch.cat([totals, mass.sums]), accelerator.device).tolist()
    result = {"eval_loss_dense": loss / tokens}
    if terms:
        result |= {f"eval_mass_{name}": share / terms for name, share in zip(Mass.NAMES, shares, strict=True)}
    return result


def describe(result: dict[str, float]) -> str:
    """A line about what `evaluate` and `evaluate_choice` found."""
    dense, change = result["eval_loss_dense"], result["eval_loss"] / result["eval_loss_dense"] - 1
    line = f"loss {result['eval_loss']:.4f} with chosen keys, {dense:.4f} with all ({change:+.2%})"
    if "eval_mass_chosen" not in result:
        return f"{line}; no held-out sample has more keys than are chosen"
    chosen, best, last, random = (result[f"eval_mass_{name}"] for name in Mass.NAMES)
    return (
        f"{line}; chosen keys hold {chosen:.2%} of dense attention (the best as many {best:.2%}, the last {last:.2%}, "
        f"random ones {random:.2%})"
    )
