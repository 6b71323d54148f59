"""The namespace that this repository's operators are registered in."""

NAMESPACE = "latentmoe_linear_cross_entropy_source"


def op(name: str) -> str:
    return f"{NAMESPACE}::{name}"
