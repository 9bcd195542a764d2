"""One policy's tokenizer: prompts in by the policy's own rendering, completions out as bytes.

A policy's own completions are never encoded: they stay the ids that were sampled. `encode` is for text from elsewhere.

Shape legend: Tp tokens of a prompt · T tokens of a completion · V vocabulary, with the model's padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from agents.errors import PolicyError
from exchange.types import Message
from tokenalign.encoder import Encoder
from tokenalign.errors import TextError
from tokenalign.table import TokenKind, TokenTable

RENDERED_PROMPTS = 8192
"""Prompts kept rendered; they come again every epoch."""

_SLOT = "\ue000{index}\ue001"
_SLOTS = re.compile("\ue000(\\d+)\ue001")


class PolicyTokenizer:
    """A Hugging Face tokenizer together with what training needs to know of it.

    eos_id: the end token to train, the one that the chat template puts behind an answer. eos_ids: all that end a
    completion. pad_id: only ever under a mask. table, fingerprint: tokenalign's view of the vocabulary.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        prompt_format: str = "auto",
        more_eos_ids: Iterable[int] = (),
    ) -> None:
        """vocab_size: V, width of the model's logits. more_eos_ids: end tokens that the model's configuration names.

        Raises PolicyError when the tokenizer is not a fast one or has no end token.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PolicyError(f"a policy needs a fast tokenizer, got {type(tokenizer).__name__}")
        self.hf = tokenizer
        self._backend = backend
        self._prompt_format = prompt_format
        self.table = TokenTable.from_tokenizer(backend, vocab_size=vocab_size)
        self.encoder = Encoder(backend, table=self.table)
        self.fingerprint = self.table.fingerprint
        self._control_tokens = tuple(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        self._adds_bos = self._puts_bos_before_text()
        own_eos = tokenizer.eos_token_id
        ends = {int(token_id) for token_id in more_eos_ids} | ({own_eos} if own_eos is not None else set())
        template_eos = self._end_of_answer()
        if template_eos is None and not ends:
            raise PolicyError(f"a policy needs an end-of-sequence token, got eos_token=None in {type(tokenizer).__name__}")
        first = template_eos if template_eos is not None else own_eos if own_eos is not None else min(ends)
        self.eos_id: int = first
        self.eos_ids: frozenset[int] = frozenset(ends | {first})
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first
        self.render = lru_cache(maxsize=RENDERED_PROMPTS)(self._render)

    def encode(self, text: bytes) -> npt.NDArray[np.int32]:
        """Ids [T] of a text as the continuation of a prompt; control tokens spelled in it stay text."""
        return self.encoder.encode(text)

    def ends(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Byte offset behind each token [T]; end tokens are zero-width."""
        return self.table.ends(ids).astype(np.int32)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """What the content tokens of ids [T] spell; control tokens spell nothing."""
        return self.table.bytes_of(ids)

    def first_lost(self, text: str) -> str | None:
        """The first character that the vocabulary cannot spell; None when the ids of the text spell all of it.

        The whole text where each of its characters can be spelled, but not all of them together.
        """
        if self._spells(text):
            return None
        return next((character for character in text if not self._spells(character)), text)

    def _spells(self, text: str) -> bool:
        try:
            return self.decode_bytes(self.encode(text.encode())) == text.encode()
        except TextError:
            return False

    def _render(self, messages: tuple[Message, ...]) -> npt.NDArray[np.int32]:
        """Prompt ids [Tp], read-only, up to the place where the answer begins; cached as `render`.

        The chat template or the prompt format decides; without either, the contents one under the other. At most one
        beginning-of-sequence token. A control token spelled in a message's content stays text. Policies whose template
        knows no system role get the system message at the head of the first user message.
        """
        contents = [message.content for message in messages]
        if any(token in content for token in self._control_tokens for content in contents):
            ids = self._encode_around(messages)
        else:
            ids = self._backend.encode(self._as_text(messages), add_special_tokens=False).ids
        bos = self.hf.bos_token_id
        if self._adds_bos or ids[:1] == [bos]:
            while ids[:1] == [bos]:
                ids = ids[1:]
            ids = [bos, *ids]
        rendered = np.asarray(ids, dtype=np.int32)
        rendered.setflags(write=False)
        return rendered

    def _encode_around(self, messages: Sequence[Message]) -> list[int]:
        """Render with a mark in each content's place, then encode marks as text and the rest with control tokens."""
        marked = [Message(role=m.role, content=_SLOT.format(index=index)) for index, m in enumerate(messages)]
        ids: list[int] = []
        for index, part in enumerate(_SLOTS.split(self._as_text(marked))):
            if index % 2:
                ids += self.encode(messages[int(part)].content.encode()).tolist()
            else:
                ids += self._backend.encode(part, add_special_tokens=False).ids
        return ids

    def _as_text(self, messages: Sequence[Message]) -> str:
        if self._prompt_format != "auto":
            return self._prompt_format.replace("{prompt}", "\n".join(message.content for message in messages))
        if not self.hf.chat_template:
            return "\n".join(message.content for message in messages)
        try:
            return self._apply_template(messages, add_generation_prompt=True)
        except TemplateError:
            folded = _fold_system(messages)
            if folded is None:
                raise
            return self._apply_template(folded, add_generation_prompt=True)

    def _apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        conversation: Any = [{"role": message.role, "content": message.content} for message in messages]
        return str(self.hf.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt))

    def _puts_bos_before_text(self) -> bool:
        """Whether the tokenizer itself begins a plain text so; a chat template writes what it wants."""
        bos = self.hf.bos_token_id
        if bos is None or (self._prompt_format == "auto" and self.hf.chat_template):
            return False
        return bool(self.hf("x")["input_ids"][:1] == [bos])

    def _end_of_answer(self) -> int | None:
        """The control token that the chat template puts right behind an assistant's answer, if it puts one."""
        if self._prompt_format != "auto" or not self.hf.chat_template:
            return None
        answer = _SLOT.format(index=1)
        turns = [Message(role="user", content="x"), Message(role="assistant", content=answer)]
        behind = self._apply_template(turns, add_generation_prompt=False).rpartition(answer)[2].lstrip()
        ids = self._backend.encode(behind, add_special_tokens=False).ids
        return ids[0] if ids and self.table.kind(ids[0]) is TokenKind.SPECIAL else None


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with a leading system message moved into the first user message; None when there is none to move."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    first = Message(role="user", content=f"{messages[0].content}\n\n{messages[1].content}")
    return [first, *messages[2:]]
