"""Short ways to speak to a hub and to read its answers."""

from __future__ import annotations

import msgspec

from exchange.config import HubConfig
from exchange.messages import (
    Accepted,
    Gather,
    Hello,
    Refused,
    Rows,
)
from exchange.testing import HubDriver
from exchange.types import AgentName


def hello(name: str, **changes: object) -> Hello:
    return msgspec.structs.replace(Hello(name=AgentName(name), run_id="r"), **changes)


def gather(*kinds: str, **filters: object) -> Gather:
    return msgspec.convert({"kinds": kinds or ("rewards",)} | filters, Gather)


def rows(answer: object) -> list[int]:
    assert isinstance(answer, Rows), answer
    return [row.cursor for row in answer.rows]


def refusal(answer: object) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


def accepted(answer: object) -> Accepted:
    assert isinstance(answer, Accepted), answer
    return answer


def two(**config: object) -> HubDriver:
    driver = HubDriver(HubConfig(run_id="r", **config))  # type: ignore[arg-type]
    driver.join("alpha", "beta")
    return driver
