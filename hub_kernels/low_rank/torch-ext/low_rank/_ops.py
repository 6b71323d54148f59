"""The namespace of this package's operators; packing puts a digest of the sources in place of the last word."""

NAMESPACE = "latentmoe_low_rank_source"


def op(name: str) -> str:
    return f"{NAMESPACE}::{name}"
