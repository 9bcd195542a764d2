"""Range checks for config structs, with one error text for all of them."""

from __future__ import annotations

from collections.abc import Iterable

MANY = 10**9
"""More steps, prompts or the like than any run can have; larger numbers break what computes with them."""

LONG_S = 1e9
"""About thirty years: as good as for ever, and no timer overflows."""


def check_range(
    owner: object,
    *names: str,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> None:
    """Raise ValueError naming the field, the value got and the allowed range; fields that are None pass."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        ok = (
            (gt is None or value > gt)
            and (ge is None or value >= ge)
            and (lt is None or value < lt)
            and (le is None or value <= le)
        )
        if not ok:
            low = f"> {gt}" if gt is not None else f">= {ge}" if ge is not None else ""
            high = f"< {lt}" if lt is not None else f"<= {le}" if le is not None else ""
            raise ValueError(f"`{name}` must be {' and '.join(part for part in (low, high) if part)}, got {name}={value!r}")


def check_choice(owner: object, name: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless the field's value is one of `choices`."""
    value = getattr(owner, name)
    if value not in tuple(choices):
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {name}={value!r}")
