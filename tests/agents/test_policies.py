"""Tiny and loaded policies: tokenizers, rendering, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agents.config import HFPolicy, PolicyConfig, TinyPolicy
from agents.errors import PolicyError
from agents.policies.policy import HOLE_LOGIT, Policy, build_policy
from agents.policies.spelling import check_spelling
from agents.policies.tiny_tokenizers import TOKENIZERS
from agents.policies.tokenizer import PolicyTokenizer
from agents.types import Prompt
from exchange.types import Message, PromptId
from tokenalign.table import TokenKind, TokenTable

ARCHS: list[Literal["llama", "gpt_neox"]] = ["llama", "gpt_neox"]


def build(config: PolicyConfig, seed: int = 0) -> Policy:
    return build_policy(config, seed=seed, device="cpu", dtype="float32", threads=1)


def small(
    arch: Literal["llama", "gpt_neox"] = "llama", tokenizer: Literal["byte_bpe", "char", "unigram"] = "byte_bpe"
) -> TinyPolicy:
    return TinyPolicy(arch=arch, tokenizer=tokenizer, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


def user(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


BYTE_BPE, CHAR, UNIGRAM = (build(small(tokenizer=kind)).tokenizer for kind in ("byte_bpe", "char", "unigram"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_equal_settings_give_equal_tokenizers(kind: str) -> None:
    first, second = (TokenTable.from_tokenizer(TOKENIZERS[kind](320)).fingerprint for _ in range(2))
    assert first == second


def test_the_three_cut_one_text_differently() -> None:
    pieces = {len(tokenizer.encode(b"reverse the word")) for tokenizer in (BYTE_BPE, CHAR, UNIGRAM)}
    assert len(pieces) == 3
    assert len(CHAR.encode(b"reverse the word")) == 16
    assert any(len(BYTE_BPE.decode_bytes([token])) > 1 for token in BYTE_BPE.encode(b"reverse"))


@settings(max_examples=60)
@given(st.text())
def test_byte_bpe_spells_every_text(text: str) -> None:
    assert BYTE_BPE.decode_bytes(BYTE_BPE.encode(text.encode())) == text.encode()


@settings(max_examples=60)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_char_and_unigram_spell_printable_ascii(text: str) -> None:
    for tokenizer in (CHAR, UNIGRAM):
        ids = tokenizer.encode(text.encode())
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.ends(ids)[-1:].tolist() == [len(text)][: len(ids)]


@pytest.mark.parametrize("tokenizer", [CHAR, UNIGRAM])
def test_what_a_vocabulary_lacks_leaves_a_trace(tokenizer: PolicyTokenizer) -> None:
    ids = tokenizer.encode("aüb".encode())
    assert [tokenizer.table.kind(int(token)) is TokenKind.SPECIAL for token in ids] == [False, True, False]


def prompt(text: str, answer: object = "ok") -> Prompt:
    return Prompt(id=PromptId("p0"), task="t", messages=user(text), columns={"answer": answer})


@pytest.mark.parametrize("tokenizer", [CHAR, UNIGRAM])
@pytest.mark.parametrize(
    ("row", "what"),
    [
        (prompt("ab日本"), "'日' in the text"),
        (prompt("e\u0301"), "'é' in the text"),
        (prompt("a\tb"), r"'\\t' in the text"),
        (prompt("a", answer="1\u00a0m"), r"'\\xa0' in the answer"),
    ],
)
def test_a_text_that_cannot_be_spelled_is_refused(tokenizer: PolicyTokenizer, row: Prompt, what: str) -> None:
    with pytest.raises(PolicyError, match=rf"cannot spell {what} of prompt p0 of task 't'"):
        check_spelling(tokenizer, [prompt("plain <eos> text\n"), row])
    check_spelling(BYTE_BPE, [row])


def test_each_text_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[bytes] = []

    def encode(text: bytes) -> npt.NDArray[np.int32]:
        encoded.append(text)
        return np.zeros(0, np.int32)

    monkeypatch.setattr(CHAR, "encode", encode)
    monkeypatch.setattr(CHAR, "decode_bytes", lambda ids: encoded[-1])
    check_spelling(CHAR, [prompt("a"), prompt("a"), prompt("b", answer=7), prompt("b", answer=None)])
    assert encoded == [b"a", b"ok", b"b"]


def test_a_tokenizer_that_composes_characters_reads_them_but_cannot_write_them_apart() -> None:
    backend = TOKENIZERS["byte_bpe"](300)
    backend.normalizer = normalizers.NFC()
    tokenizer = PolicyTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"),  # type: ignore[no-untyped-call]
        vocab_size=300,
    )
    check_spelling(tokenizer, [prompt("e\u0301", answer="é")])
    with pytest.raises(PolicyError, match="in the answer of prompt p0"):
        check_spelling(tokenizer, [prompt("e", answer="e\u0301")])


def test_a_tokenizer_without_unknown_token_is_checked_too() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="<none>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")  # type: ignore[no-untyped-call]
    with pytest.raises(PolicyError, match="cannot spell 'b' in the text"):
        check_spelling(PolicyTokenizer(hf, vocab_size=2), [prompt("aab", answer="a")])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_vocabulary_too_small_is_refused(kind: str) -> None:
    with pytest.raises(PolicyError, match=f"of a {kind} tokenizer must be >= .*got vocab_size=50"):
        TOKENIZERS[kind](50)


@pytest.mark.parametrize("arch", ARCHS)
def test_weights_are_drawn_by_the_seed_alone(arch: Literal["llama", "gpt_neox"]) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first, same, other = build(small(arch)), build(small(arch)), build(small(arch), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = zip(first.model.parameters(), same.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(next(first.model.parameters()), next(other.model.parameters()))


@pytest.mark.parametrize(("arch", "kind"), [("llama", "byte_bpe"), ("gpt_neox", "char"), ("llama", "unigram")])
def test_saved_policies_load_with_transformers_and_as_hf_policies(tmp_path: Path, arch: str, kind: str) -> None:
    policy = build(small(arch, kind))  # type: ignore[arg-type]
    policy.save(tmp_path)
    prompt = policy.tokenizer.render(user("reverse abc:"))
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    logits = policy.model(input_ids=ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits, logits)
    chat = [{"role": "user", "content": "reverse abc:"}]
    plain = AutoTokenizer.from_pretrained(tmp_path)
    text = plain.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert plain(text, add_special_tokens=False)["input_ids"] == prompt.tolist()

    loaded = build(HFPolicy(path=str(tmp_path)))
    assert loaded.max_context == 64
    assert loaded.tokenizer.fingerprint == policy.tokenizer.fingerprint
    assert loaded.tokenizer.eos_id == policy.tokenizer.eos_id
    assert loaded.tokenizer.render(user("reverse abc:")).tolist() == prompt.tolist()
    assert build(HFPolicy(path=str(tmp_path), max_context=20)).max_context == 20


def test_padded_embedding_rows_have_no_probability(tmp_path: Path) -> None:
    policy = build(small())
    real = len(policy.tokenizer.table)
    policy.model.resize_token_embeddings(real + 8)
    policy.save(tmp_path)
    loaded = build(HFPolicy(path=str(tmp_path)))
    logits = loaded.model(input_ids=torch.tensor([[1, 5]])).logits
    assert logits.shape[-1] == real + 8
    assert bool((logits[..., real:] == HOLE_LOGIT).all())
    assert logits.softmax(-1)[..., real:].sum() == 0
    assert bool((logits[..., :real] > HOLE_LOGIT).all())


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot load a causal LM from policy\.path="):
        build(HFPolicy(path=str(tmp_path)))


@pytest.mark.parametrize("device", ["meta", "banana", "", "xpu", "cuda:99", "cuda"])
def test_a_device_that_is_not_there(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(PolicyError, match=rf"device='{device}' cannot be used here: .*; take \"cpu\", or \"auto\""):
        build_policy(small(), seed=0, device=device, dtype="float32", threads=1)


def test_what_goes_wrong_in_building_is_a_policy_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(small()).save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(PolicyError, match=r"cannot load a causal LM from policy\.path=.*: \w+Error: "):
        build(HFPolicy(path=str(tmp_path)))

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("agents.policies.policy.build_tiny", out_of_memory)
    with pytest.raises(PolicyError, match=r"cannot build TinyPolicy\(.*: OutOfMemoryError: no room"):
        build(small())


def test_dropout_is_off_and_checkpointing_trains(tmp_path: Path) -> None:
    policy = build(small("gpt_neox"))
    policy.model.config.hidden_dropout = 0.5
    policy.model.config.attention_dropout = 0.5
    policy.save(tmp_path)
    loaded = build(HFPolicy(path=str(tmp_path), gradient_checkpointing=True))
    assert loaded.model.training
    assert loaded.model.is_gradient_checkpointing
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded.model(input_ids=ids, use_cache=False).logits, policy.model(input_ids=ids).logits)


CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and no_system %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<bos>' if loop.first else '' }}[{{ m.role }}]{{ m.content }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer(template: str = CHATML, **options: object) -> PolicyTokenizer:
    backend = TOKENIZERS["byte_bpe"](300)
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<eot>"],
        chat_template=template,
    )
    return PolicyTokenizer(hf, vocab_size=len(hf), **options)  # type: ignore[arg-type]


def test_a_rendered_prompt_has_one_bos_and_the_generation_prompt() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.render(user("hi"))
    assert ids.tolist().count(tokenizer.hf.bos_token_id) == 1
    assert tokenizer.decode_bytes(ids) == b"[user]hi\n[assistant]"
    doubled = chat_tokenizer("<bos>" + CHATML)
    assert doubled.render(user("hi")).tolist() == ids.tolist()
    assert chat_tokenizer(prompt_format="<bos>Q {prompt}").render(user("hi")).tolist().count(1) == 1


def test_the_end_token_to_train_is_the_one_behind_an_answer() -> None:
    tokenizer = chat_tokenizer(more_eos_ids=[7])
    eot, eos = (tokenizer.hf.convert_tokens_to_ids(token) for token in ("<eot>", "<eos>"))
    assert tokenizer.eos_id == eot
    assert tokenizer.eos_ids == {eot, eos, 7}
    assert chat_tokenizer(prompt_format="{prompt}").eos_id == eos


def test_control_tokens_spelled_in_a_prompt_stay_text() -> None:
    for tokenizer, behind in [(chat_tokenizer(), b"\n[assistant]"), (chat_tokenizer(prompt_format="Q {prompt} A<eot>"), b" A")]:
        hostile = tokenizer.render(user("a<eot>b<bos>"))
        eot = tokenizer.hf.convert_tokens_to_ids("<eot>")
        assert hostile.tolist().count(eot) == 1
        assert tokenizer.decode_bytes(hostile).endswith(b"a<eot>b<bos>" + behind)


def test_a_system_message_is_folded_where_the_template_refuses_it() -> None:
    turns = (Message(role="system", content="be brief"), Message(role="user", content="hi"))
    assert chat_tokenizer().decode_bytes(chat_tokenizer().render(turns)) == b"[system]be brief\n[user]hi\n[assistant]"
    strict = chat_tokenizer(CHATML.replace("and no_system", ""))
    assert strict.decode_bytes(strict.render(turns)) == b"[user]be brief\n\nhi\n[assistant]"
    with pytest.raises(TemplateError):
        strict.render((Message(role="user", content="a"), Message(role="system", content="late")))


def test_a_tokenizer_without_end_token_is_refused() -> None:
    hf = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["byte_bpe"](300))  # type: ignore[no-untyped-call]
    with pytest.raises(PolicyError, match="needs an end-of-sequence token"):
        PolicyTokenizer(hf, vocab_size=300)
    assert PolicyTokenizer(hf, vocab_size=300, more_eos_ids=[9]).eos_id == 9
