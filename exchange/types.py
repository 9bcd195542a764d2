"""The kinds of experience that cross the exchange.

Every kind is a tagged struct, map-encoded, so that fields can be added later; readers ignore fields they do not know. A tag
is the kind's name and its schema version. A project adds kinds of its own (exchange/kinds.py):

    class Critique(PromptExperience, frozen=True, kw_only=True, tag="critiques/1"):
        text: str

Arrays are numpy and travel out of band (exchange/arrays.py). Text crosses as UTF-8 bytes and is what a receiver with
another tokenizer reads; token ids are only of use to a receiver with the same tokenizer fingerprint.

Shape legend: G completions of one prompt · N tokens of all G completions, one after the other · S bytes of all G texts.
"""

from __future__ import annotations

from typing import Annotated, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

AgentName = NewType("AgentName", str)
PromptId = NewType("PromptId", str)
Cursor = NewType("Cursor", int)
START = Cursor(0)
# A kind's name: its tag without the schema version.
Kind: TypeAlias = str
BLOB_ID_CHARS = frozenset("0123456789abcdef")

Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy version; ordered by epoch (a restarted trainer's count) first, then by optimizer steps."""

    epoch: int
    step: int


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names a blob by its content, in any experience. id: hex BLAKE3 of its bytes; nbytes: how many there are.

    Example: BlobRef(id="af1349b9…", nbytes=134217728).
    """

    id: str
    nbytes: int

    def __post_init__(self) -> None:
        check_blob_id(self.id)
        if self.nbytes < 0:
            raise ValueError(f"`nbytes` must be >= 0, got nbytes={self.nbytes}")


def check_blob_id(id: str) -> None:
    """Raise ValueError for what is no blob's id; ids become names of files."""
    if len(id) != 64 or not BLOB_ID_CHARS.issuperset(id):
        raise ValueError(f"a blob's id is 64 lower-case hex digits, got id={id[:80]!r}")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message of a prompt."""

    role: str
    content: Text


class Experience(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every kind carries. agent: the producer, by its own name. step: the producer's step at sampling, from 0.
    version: of the policy that sampled, fixed before generation began; its epoch is the client's."""

    agent: AgentName
    step: int
    version: Version


class StepPrompts(Experience, frozen=True, kw_only=True, tag="prompts/1"):
    """Producer to all, once per step, after everything else of that step: these prompts were sampled and judged.

    It is what makes "the peer tried and failed" different from "the peer has not come here yet", lets an agent that is
    behind follow, and closes a step in lockstep. Without prompts it only says that the producer is there.
    Example: StepPrompts(agent="alpha", step=3, version=Version(0, 3),
    prompt_ids=("4f0c…",)).
    """

    prompt_ids: tuple[PromptId, ...]


class PromptExperience(Experience, frozen=True, kw_only=True):
    """Experience on one prompt. prompt_id: hash of task and prompt, equal for all agents."""

    prompt_id: PromptId
    task: str


class GroupRewards(PromptExperience, frozen=True, kw_only=True, tag="rewards/1"):
    """Producer to learners by XGRPO: the rewards [G] of one group and nothing else.

    rewards: float32 [G], NaN where every reward function abstained. reward_fingerprint: equal only for equal reward
    functions and weights; a receiver pools only equals.
    """

    rewards: npt.NDArray[np.float32]
    reward_fingerprint: str

    def __post_init__(self) -> None:
        _check_lengths(self, ("rewards",), len(self.rewards))


class VerifiedSuccesses(PromptExperience, frozen=True, kw_only=True, tag="successes/1"):
    """Producer to learners by SGT: the texts of a group's verified, naturally ended successes (C of them).

    texts: uint8 [S]; text_lengths: int32 [C] in bytes. token_ends: int32 [M], byte offset behind every content token of
    the source's own tokenization, counted from 0 within each text (the end-of-sequence token is left out);
    token_counts: int32 [C]. rewards: float32 [C], the source's. tokenizer: fingerprint of the source.
    """

    texts: npt.NDArray[np.uint8]
    text_lengths: npt.NDArray[np.int32]
    token_ends: npt.NDArray[np.int32]
    token_counts: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]
    tokenizer: str

    def __post_init__(self) -> None:
        _check_lengths(self, ("text_lengths", "rewards"), len(self.token_counts))
        _check_texts(self)


class RolloutGroup(PromptExperience, frozen=True, kw_only=True, tag="rollouts/1"):
    """Producer to learners by PRP: one whole group, all G rollouts.

    messages: the prompt, rendered by each receiver in its own format. texts, text_lengths [G], token_ends, token_counts
    [G]: as in VerifiedSuccesses; token_ends is [N] and an end-of-sequence token has the end of the token before it.
    ids: int32 [N] as sampled, end-of-sequence token included. logprobs: float32 [N], of the sampled tokens under the
    sampling distribution at `temperature`. finished: bool [G], ended by its own end-of-sequence token (not truncated).
    rewards: float32 [G], NaN where abstained. reward_fingerprint, tokenizer: as above.
    """

    messages: tuple[Message, ...]
    texts: npt.NDArray[np.uint8]
    text_lengths: npt.NDArray[np.int32]
    token_ends: npt.NDArray[np.int32]
    token_counts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finished: npt.NDArray[np.bool_]
    rewards: npt.NDArray[np.float32]
    reward_fingerprint: str
    tokenizer: str
    temperature: float

    def __post_init__(self) -> None:
        _check_lengths(self, ("text_lengths", "finished", "rewards"), len(self.token_counts))
        _check_texts(self)
        _check_lengths(self, ("ids", "logprobs"), len(self.token_ends))


AnyExperience = StepPrompts | GroupRewards | VerifiedSuccesses | RolloutGroup


def kind_of_tag(tag: str) -> Kind:
    """The short name of a kind: its tag without the schema version."""
    return tag.partition("/")[0]


def kind_of(experience: Experience) -> Kind:
    """The short name of an experience's kind."""
    return kind_of_tag(str(experience.__struct_config__.tag))


def prompt_ids_of(experience: msgspec.Struct) -> tuple[PromptId, ...]:
    """The prompts that an experience is about: its field `prompt_id`, else `prompt_ids`, else none."""
    prompt_id: PromptId | None = getattr(experience, "prompt_id", None)
    return getattr(experience, "prompt_ids", ()) if prompt_id is None else (prompt_id,)


def _check_lengths(owner: Experience, names: tuple[str, ...], length: int) -> None:
    for name in names:
        array = getattr(owner, name)
        if array.shape != (length,):
            raise ValueError(f"`{name}` must be one-dimensional with {length} entries, got shape={array.shape}")


def _check_texts(owner: VerifiedSuccesses | RolloutGroup) -> None:
    """Texts, their tokens and the tokens' ends must describe the same bytes."""
    for what, name in (("texts", "text_lengths"), ("token_ends", "token_counts")):
        lengths = getattr(owner, name)
        # As a list: a group is small, and for small arrays Python's own loops are the fastest.
        listed = lengths.tolist()
        if lengths.ndim != 1 or min(listed, default=0) < 0:
            raise ValueError(f"`{name}` must be one-dimensional and >= 0, got {lengths!r}")
        _check_lengths(owner, (what,), sum(listed))
    # Seen as unsigned, an end before its text is one far behind it.
    last_byte = _unsigned(owner.text_lengths).repeat(owner.token_counts)
    if np.greater(_unsigned(owner.token_ends), last_byte).any():
        raise ValueError("`token_ends` must lie within their own text, got an end outside of it")


def _unsigned(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    return numbers.view(np.uint32) if numbers.dtype == np.int32 else numbers.astype(np.uint32)
