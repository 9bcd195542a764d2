"""What one worker may ask of another: the base classes, and the two questions that come with the package.

A question names the type of its answer, so that asking is typed and nothing needs to be registered:

    class CountReply(PeerReply, frozen=True, kw_only=True, tag="counted/1"):
        count: int

    class CountRequest(PeerRequest[CountReply], frozen=True, kw_only=True, tag="counts/1"):
        texts: npt.NDArray[np.uint8]

Its kind, by which edges allow it and statistics count it, is its tag without the version ("counts"). Arrays travel out of
band, as those of records do.

Shape legend: P prompts · C texts · N tokens of all texts, one after the other · K most likely tokens · S bytes of all texts.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from exchange.types import Message, Version

__all__ = ["PeerReply", "PeerRequest", "SampleReply", "SampleRequest", "ScoreReply", "ScoreRequest", "reply_type"]


class PeerReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An answer; give each kind a tag."""

    @property
    def tokens(self) -> int:
        """How many tokens this answer cost, for the pair's account."""
        return 0


R = TypeVar("R", bound=PeerReply)


class PeerRequest(msgspec.Struct, Generic[R], frozen=True, kw_only=True, tag_field="type"):
    """A question that is answered by an R; give each kind a tag."""

    @property
    def tokens(self) -> int:
        """How many tokens this question asks for at most, for the pair's account."""
        return 0


def reply_type(request: type[PeerRequest[Any]]) -> type[PeerReply]:
    """The type that answers a question. Raises TypeError for a question that names none."""
    for base in getattr(request, "__orig_bases__", ()):
        for answer in get_args(base):
            if isinstance(answer, type) and issubclass(answer, PeerReply):
                return answer
    raise TypeError(f"a question names its answer, got {request.__name__}: derive it from PeerRequest[YourReply]")


class ScoreReply(PeerReply, frozen=True, kw_only=True, tag="scored/1"):
    """What the scorer's policy thinks of each text, token by token of its own tokenizer.

    logprobs: float32 [N]. token_ends: int32 [N], byte offset behind each token within its text; token_counts: int32 [C].
    top_logprobs: float32 [N, K], falling; top_pieces: uint8, the bytes of those tokens, top_lengths: int32 [N, K] each.
    version: of the policy that scored. tokenizer: its fingerprint.
    """

    logprobs: npt.NDArray[np.float32]
    token_ends: npt.NDArray[np.int32]
    token_counts: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    top_lengths: npt.NDArray[np.int32]
    top_pieces: npt.NDArray[np.uint8]
    version: Version
    tokenizer: str

    def __post_init__(self) -> None:
        count = _total("token_counts", self.token_counts)
        _check_shape("logprobs", self.logprobs, (count,))
        _check_shape("token_ends", self.token_ends, (count,))
        _check_shape("top_logprobs", self.top_logprobs, (count, self.top_lengths.shape[-1]))
        _check_shape("top_lengths", self.top_lengths, self.top_logprobs.shape)
        _check_shape("top_pieces", self.top_pieces, (_total("top_lengths", self.top_lengths.reshape(-1)),))

    @property
    def tokens(self) -> int:
        return len(self.logprobs)


class ScoreRequest(PeerRequest[ScoreReply], frozen=True, kw_only=True, tag="scores/1"):
    """Score these continuations of one prompt. texts: uint8 [S]; text_lengths: int32 [C] in bytes. top_k: also the K most
    likely tokens at every place, 0 for none. Example: a learner asks a teacher about its own completions."""

    messages: tuple[Message, ...]
    texts: npt.NDArray[np.uint8]
    text_lengths: npt.NDArray[np.int32]
    top_k: int = 0

    def __post_init__(self) -> None:
        _check_shape("texts", self.texts, (_total("text_lengths", self.text_lengths),))
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"`top_k` must be 0 to {MAX_TOP_K}, got top_k={self.top_k}")


class SampleReply(PeerReply, frozen=True, kw_only=True, tag="sampled/1"):
    """n completions of each prompt, prompt by prompt: C = P x n.

    texts: uint8 [S]; text_lengths: int32 [C] in bytes. token_ends, logprobs: [N], as in RolloutGroup; token_counts: int32
    [C]. finished: bool [C], ended by its own end-of-sequence token.
    """

    texts: npt.NDArray[np.uint8]
    text_lengths: npt.NDArray[np.int32]
    token_ends: npt.NDArray[np.int32]
    token_counts: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finished: npt.NDArray[np.bool_]
    version: Version
    tokenizer: str

    def __post_init__(self) -> None:
        _check_shape("texts", self.texts, (_total("text_lengths", self.text_lengths),))
        for name in ("token_counts", "finished"):
            _check_shape(name, getattr(self, name), self.text_lengths.shape)
        for name in ("token_ends", "logprobs"):
            _check_shape(name, getattr(self, name), (_total("token_counts", self.token_counts),))

    @property
    def tokens(self) -> int:
        return len(self.logprobs)


class SampleRequest(PeerRequest[SampleReply], frozen=True, kw_only=True, tag="samples/1"):
    """Sample n completions of each prompt, of at most max_tokens tokens; the prompts may be known to the asker alone."""

    prompts: tuple[tuple[Message, ...], ...]
    n: int
    max_tokens: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1 or not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"`n` and `max_tokens` must be >= 1 and `temperature` >= 0, got n={self.n}, max_tokens={self.max_tokens}, "
                f"temperature={self.temperature}"
            )

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.n * self.max_tokens


MAX_TOP_K = 1024


def _total(name: str, lengths: npt.NDArray[np.int32]) -> int:
    if lengths.ndim != 1 or lengths.min(initial=0) < 0:
        raise ValueError(f"`{name}` must be one-dimensional and >= 0, got {lengths!r}")
    return int(lengths.sum(dtype=np.int64))


def _check_shape(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}, got shape={array.shape}")
