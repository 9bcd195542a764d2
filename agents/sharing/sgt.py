"""`sgt`: Success-Gated Transfer. Imitate one verified peer success on each prompt where every own rollout failed.

    rescue(x) = 1[max R^n < tau  and  max R^m >= tau]
    L = L_GRPO + lambda * NLL_n(y* | x)          averaged over y*'s tokens

y* is drawn uniformly first over the peers that have a success, then within. Source: Mutual Reinforcement Learning
(arXiv 2605.07244), formula after a re-implementer's account.

Deviations of ours: a cut-off text is no success, own ones included. The receiver verifies y* with its own reward before it
learns from it; a success that it does not confirm or cannot hold is dropped and counted, and another is drawn. An own failure
stays open for `window` steps, so that a slower peer still rescues it. A verified success has no lag limit (it stays true),
only an age.
`gate = "off"` learns from a peer success on every own prompt, rescued or not: a control. `coin` leaves the success of some
rescued prompts undelivered, always the same prompts of a run, so that the others can be compared with them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agents.config import Objective
from agents.rows import Row, Stream, own_rows
from agents.sharing.config import SGT
from agents.sharing.isolated import own_advantages, rewards_of
from agents.sharing.rule import Forgetful, PeerExperience, Peers, Receiver, Rescue, Shared, Waiting
from agents.sharing.texts import unpack
from agents.types import Group
from exchange.types import AgentName, Kind, PromptId, VerifiedSuccesses
from tokenalign import TokenAlignError, Trace

Candidate = tuple[AgentName, Trace]


def draw_order(by_peer: Mapping[AgentName, Sequence[Trace]], rng: np.random.Generator) -> list[Candidate]:
    """The peers' texts in the order in which they are tried: a peer drawn uniformly, then one of its texts.

    The first entry is uniform over peers, then within; a peer that is drawn again offers its next text.
    """
    queues = {peer: [texts[index] for index in rng.permutation(len(texts))] for peer, texts in sorted(by_peer.items())}
    order: list[Candidate] = []
    while queues:
        peer = sorted(queues)[int(rng.integers(len(queues)))]
        if queues[peer]:
            order.append((peer, queues[peer].pop()))
        if not queues[peer]:
            del queues[peer]
    return order


def is_withheld(prompt_id: PromptId, *, coin: float, salt: str) -> bool:
    """Whether the coin keeps this prompt's rescue back: of all prompts a share `coin`, fixed by (salt, prompt_id) alone."""
    digest = hashlib.sha256(f"{salt}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < coin * 2**64


class SGTRule(Forgetful):
    """Needs only verified successes of its peers. Holds the own failures that still wait for one."""

    kinds: frozenset[Kind] = frozenset({"successes"})
    max_lag: int | None = None
    latest_only = False

    def __init__(self, config: SGT, objective: Objective, receiver: Receiver, *, salt: str = "") -> None:
        self._config = config
        self._salt = salt
        self._objective = objective
        self._receiver = receiver
        self.waiting: dict[PromptId, Waiting] = {}
        self.window = config.window
        self.max_age_s: float | None = config.max_age_s

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups if self._opens(group)]

    def recall(self, memory: object, waiting: Mapping[PromptId, Waiting]) -> None:
        self.waiting = dict(waiting)

    def weight(self, step: int, steps: int) -> float:
        """lambda at this step: constant, or linear from lambda at the first step to lambda_final at the last."""
        if self._config.lambda_final is None or steps < 2:
            return self._config.lambda_
        done = min(step / (steps - 1), 1.0)
        return (1 - done) * self._config.lambda_ + done * self._config.lambda_final

    def _opens(self, group: Group) -> bool:
        """Whether a peer's success on the group's prompt would be learned from: it was judged and failed throughout."""
        judged = not np.isnan(rewards_of(group)).all()
        return (judged and not self._solved(group)) or self._config.gate == "off"

    def _solved(self, group: Group) -> bool:
        """Whether an own completion is a success; one that was cut off is none, whatever its reward."""
        finished = np.array([completion.finished for completion in group.completions])
        return bool((finished & (rewards_of(group) >= self._config.threshold)).any())

    def _update_open(self, groups: Sequence[Group], step: int) -> int:
        """Open this step's failures, close what succeeded since or waited too long; return how many waited in vain."""
        for group in groups:
            if self._opens(group):
                self.waiting[group.prompt.id] = Waiting(prompt=group.prompt, prompt_ids=group.prompt_ids, since=step)
            elif self._solved(group):
                self.waiting.pop(group.prompt.id, None)
        expired = [key for key, waiting in self.waiting.items() if step - waiting.since > self._config.window]
        for key in expired:
            del self.waiting[key]
        return len(expired)

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        rows = own_rows(groups, own_advantages(groups, self._objective), self._objective)
        expired = self._update_open(groups, step)
        counters: Counter[str] = Counter({"rescues": 0, "rescues/late": 0, "rescues/expired": expired})
        orders = {key: draw_order(self._texts(peers[key]), rng) for key in self.waiting if peers.get(key)}
        rescues: list[Rescue] = []
        withheld: list[Rescue] = []
        while orders:
            drawn = {key: order.pop(0) for key, order in orders.items() if order}
            orders = {key: orders[key] for key in drawn}
            for key, rescue in (await self._try(drawn, counters)).items():
                waiting = self.waiting.pop(key)
                del orders[key]
                if is_withheld(key, coin=self._config.coin, salt=self._salt):
                    withheld.append(rescue)
                    continue
                counters["rescues"] += 1
                counters["rescues/late"] += waiting.since < step
                rescues.append(rescue)
                rows.append(
                    Row(
                        stream=Stream.RESCUE,
                        prompt_ids=waiting.prompt_ids,
                        ids=rescue.translation.ids,
                        weight=self.weight(step, steps),
                    )
                )
        counters["rescues/open"] = len(self.waiting)
        counters["rescues/withheld"] = len(withheld)
        return Shared(rows=rows, counters=dict(counters), rescues=rescues, withheld=withheld)

    def _texts(self, experience: Sequence[PeerExperience]) -> dict[AgentName, list[Trace]]:
        """What each peer offers for imitation."""
        by_peer: dict[AgentName, list[Trace]] = {}
        for record in experience:
            if isinstance(record, VerifiedSuccesses):
                by_peer.setdefault(record.agent, []).extend(unpack(record))
        return by_peer

    def _holds(self, reward: float) -> bool:
        """Whether the own reward of an offered text confirms it."""
        return reward >= self._config.threshold

    async def _try(self, drawn: dict[PromptId, Candidate], counters: Counter[str]) -> dict[PromptId, Rescue]:
        """Verify and translate one drawn success per prompt; return those that hold."""
        if not drawn:
            return {}
        prompts = [self.waiting[key].prompt for key in drawn]
        rewards = await self._receiver.verify(prompts, [source.text for _, source in drawn.values()])
        offered = zip(prompts, rewards, drawn.values(), strict=True)
        verified = [(prompt, *candidate) for prompt, reward, candidate in offered if self._holds(float(reward))]
        counters["rescues/unverified"] += len(drawn) - len(verified)
        translated = self._receiver.translate([source for _, _, source in verified])
        rescues: dict[PromptId, Rescue] = {}
        for index, (prompt, peer, source) in enumerate(verified):
            # A refusal is counted by the receiver; the next success is drawn.
            with contextlib.suppress(TokenAlignError):
                rescues[prompt.id] = Rescue(peer=peer, prompt=prompt, source=source, translation=translated[index])
        return rescues
