"""A randomised experiment inside one run: what did a rescue do to the prompt that it was delivered for?

With `sharing.coin` a share of the rescued prompts never gets its peer success, drawn by hash. Both arms were all-fail prompts
with a peer success at hand, so that they differ by the delivery alone; at the end of the run the policy answers all of
them greedily. Whatever one delivery teaches about *other* prompts lifts both arms and does not show here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agents.evaluate import TaskScore
from agents.sharing.rule import Shared
from agents.tasks.load import TaskData
from agents.types import Prompt
from exchange.types import PromptId


class CoinTrial:
    """The prompts of both arms, in the order in which they were first rescued or left."""

    def __init__(self) -> None:
        self._arms: dict[PromptId, tuple[Prompt, bool]] = {}

    def state(self) -> dict[PromptId, bool]:
        """Whether each prompt's rescue was delivered, in the order in which they came."""
        return {key: delivered for key, (_, delivered) in self._arms.items()}

    def restore(self, state: Mapping[PromptId, bool], prompts: Mapping[PromptId, Prompt]) -> None:
        """Go on from what `state` gave. prompts: where to find them."""
        self._arms = {key: (prompts[key], delivered) for key, delivered in state.items()}

    def take(self, shared: Shared) -> None:
        """Note a step's prompts; nothing is noted while no coin is thrown."""
        arms = [(rescue.prompt, True) for rescue in shared.rescues] + [(rescue.prompt, False) for rescue in shared.withheld]
        for prompt, delivered in arms:
            self._arms.setdefault(prompt.id, (prompt, delivered))

    def tasks(self) -> list[TaskData]:
        """The trial's prompts by task, to be evaluated as if they were held out."""
        by_task: dict[str, list[Prompt]] = {}
        for prompt, _ in self._arms.values():
            by_task.setdefault(prompt.task, []).append(prompt)
        return [TaskData(name=task, train=[], heldout=prompts) for task, prompts in sorted(by_task.items())]

    def lines(self, scores: Sequence[TaskScore]) -> Iterator[dict[str, object]]:
        """One line per prompt of these scores."""
        for score in scores:
            for prompt_id, correct in zip(score.prompt_ids, score.correct, strict=True):
                _, delivered = self._arms[prompt_id]
                yield {"task": score.task, "prompt_id": prompt_id, "delivered": delivered, "correct": bool(correct)}
