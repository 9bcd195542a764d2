"""A hub that was restarted from its disk: epochs go on, and records that were on disk are known when they come again."""

from __future__ import annotations

from exchange.config import HubConfig
from exchange.hub import Hub
from exchange.members import Incarnation
from exchange.messages import Accepted, Hello, Publish, Refused, ToWorker, Welcome
from exchange.testing import FakeClock, HubDriver, rewards_of
from exchange.types import AgentName
from exchange.wire import encode_record

ALPHA = AgentName("alpha")


class Restarted(HubDriver):
    """A hub that found alpha's epoch 3 on its disk: records up to 5, and 8."""

    def __init__(self) -> None:
        super().__init__()
        known = {ALPHA: Incarnation(peer=b"alpha", epoch=3, mark=5, above=frozenset({8}))}
        self.hub = Hub(HubConfig(run_id="r"), clock=FakeClock(), known=known)

    def hello(self, peer: str, *, epoch: int | None, first_seq: int = 1) -> ToWorker:
        return self.ask(peer, Hello(name=ALPHA, run_id="r", epoch=epoch, first_seq=first_seq))

    def send(self, seq: int, *, epoch: int) -> ToWorker:
        record = encode_record(rewards_of("alpha", seq, "p", epoch=epoch))
        return self.ask("alpha", Publish(seq=seq, body=record.body), record.frames)


def test_the_same_incarnation_comes_back_and_what_it_sends_again_is_known() -> None:
    driver = Restarted()
    welcome = driver.hello("alpha", epoch=3, first_seq=4)
    assert isinstance(welcome, Welcome) and welcome.epoch == 3
    answers = {seq: driver.send(seq, epoch=3) for seq in (4, 5, 6, 8, 7)}
    again = {seq for seq, answer in answers.items() if isinstance(answer, Accepted) and answer.duplicate}
    assert again == {4, 5, 8}
    assert driver.hub.stats().stored == 2


def test_a_new_incarnation_comes_after_the_known_one() -> None:
    driver = Restarted()
    welcome = driver.hello("another", epoch=None)
    assert isinstance(welcome, Welcome) and welcome.epoch == 4


def test_an_incarnation_that_the_disk_has_not_met_keeps_the_epoch_that_it_was_given() -> None:
    driver = Restarted()
    welcome = driver.hello("another", epoch=6)
    assert isinstance(welcome, Welcome) and welcome.epoch == 6


def test_records_of_the_known_incarnation_are_fenced_once_a_new_one_is_there() -> None:
    driver = Restarted()
    driver.hello("another", epoch=None)
    record = encode_record(rewards_of("alpha", 6, "p", epoch=3))
    answer = driver.ask("another", Publish(seq=1, body=record.body), record.frames)
    assert isinstance(answer, Refused) and answer.reason == "fenced"
