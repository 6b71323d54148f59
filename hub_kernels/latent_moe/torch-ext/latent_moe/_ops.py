"""The namespace that this repository's operators are registered in."""

NAMESPACE = "latentmoe_latent_moe_source"


def op(name: str) -> str:
    return f"{NAMESPACE}::{name}"
