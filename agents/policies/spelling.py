"""Whether a policy can read its prompts and write their answers: what a vocabulary lacks would be trained on as `<unk>`."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

from agents.errors import PolicyError
from agents.policies.tokenizer import PolicyTokenizer
from agents.types import Prompt


def check_spelling(tokenizer: PolicyTokenizer, prompts: Iterable[Prompt]) -> None:
    """Raise PolicyError, naming prompt and character, where a prompt or a text in its `answer` column cannot be spelled.

    Each different text is encoded once, and none where the vocabulary spells every text.
    """
    if tokenizer.table.lossless:
        return
    checked: set[str] = set()
    for prompt in prompts:
        for what, text in _texts(prompt):
            if text in checked:
                continue
            checked.add(text)
            if (lost := tokenizer.first_lost(text)) is not None:
                raise PolicyError(
                    f"the policy's vocabulary cannot spell {lost!r} in the {what} of prompt {prompt.id} of task "
                    f"{prompt.task!r}; take a tokenizer that can (byte_bpe spells everything) or leave the row out; the "
                    f"prompt begins {prompt.text[:60]!r}"
                )


def _texts(prompt: Prompt) -> Iterator[tuple[str, str]]:
    for message in prompt.messages:
        # A tokenizer that composes characters reads the same text; an answer must come out as it stands.
        yield "text", unicodedata.normalize("NFC", message.content)
    answer = prompt.columns.get(prompt.column_for("answer") or "answer")
    if isinstance(answer, str):
        yield "answer", answer
