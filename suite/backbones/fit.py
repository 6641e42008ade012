"""Which attention variants and methods work on which backbone families.

The rules read plain attributes, so that `suite list` can ask them of what it reads from files
without running them.
"""

from __future__ import annotations

from typing import Any


def variant_refusal(variant: Any, family: Any) -> str | None:
    """Why an attention variant does not work on a family, as the end of a sentence.

    Args:
        variant: Has `families`, `kinds`, `families_why` and `keeps_projections` of `Variant`.
        family: Has `name`, `kind` and `fixed_attention` of `Family`.

    Returns:
        None where it works; "" where the variant gives no reason.
    """
    named = variant.families
    if named is not None and family.name not in named:
        return str(variant.families_why)
    if family.kind not in variant.kinds:
        return str(variant.families_why)
    if family.fixed_attention and not variant.keeps_projections:
        return str(family.fixed_attention)
    return None


def method_refusal(method: Any, family: Any) -> str | None:
    """Why a PETL method does not work on a family, as `variant_refusal`.

    Args:
        method: Has `name` and `families` of `Method`.
        family: Has `name` and `refused_methods` of `Family`.
    """
    named = method.families
    if named is not None and family.name not in named:
        return ""
    refused: str | None = family.refused_methods.get(method.name)
    return refused


def served_families(plug_in: Any, families: list[Any]) -> list[str]:
    """Names of the families that a variant or a method works on, sorted."""
    # only an attention variant says which kinds of stacks it is for
    refusal = variant_refusal if hasattr(plug_in, "kinds") else method_refusal
    return sorted(family.name for family in families if refusal(plug_in, family) is None)
