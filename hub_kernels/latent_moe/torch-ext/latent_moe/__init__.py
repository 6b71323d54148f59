"""Mixture of experts on packed MXFP4 weights: routing, sorting and the expert MLP, forward and backward, with LoRA.

On Ascend, the gated activations alone: the rest is written for the tensor cores of CUDA devices.
"""

from .ascend import ASCEND
from .glu import situ_glu, swiglu

__all__ = ["situ_glu", "swiglu"]

if not ASCEND:
    from . import layers
    from .balance import count_biases, score_shares
    from .experts import expert_mlp
    from .reference import ExpertMatrices, LowRank, expert_mlp_reference
    from .route import route
    from .route_reference import (
        Routing,
        Rows,
        count_biases_reference,
        route_reference,
        score_shares_reference,
        sort_slots_reference,
    )
    from .sorting import sort_slots

    __all__ += [
        "ExpertMatrices",
        "LowRank",
        "Routing",
        "Rows",
        "count_biases",
        "count_biases_reference",
        "expert_mlp",
        "expert_mlp_reference",
        "layers",
        "route",
        "route_reference",
        "score_shares",
        "score_shares_reference",
        "sort_slots",
        "sort_slots_reference",
    ]
