"""The namespace that this repository's operators are registered in."""

NAMESPACE = "latentmoe_sparse_attention_source"


def op(name: str) -> str:
    return f"{NAMESPACE}::{name}"
