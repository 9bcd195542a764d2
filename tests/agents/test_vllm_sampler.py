"""What the sampler asks of vLLM and believes of its answers, with a server in this process that the policy itself plays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agents.config import AgentConfig, Sampling, TinyPolicy
from agents.errors import PolicyError, SamplerError
from agents.policies.policy import Policy, build_policy
from agents.samplers.choose import build_sampler
from agents.samplers.config import VLLM, InProcess
from agents.samplers.decode import decode
from agents.samplers.hf import HFSampler
from agents.samplers.vllm import VLLMSampler
from agents.samplers.vllm_process import VLLMProcess
from agents.samplers.vllm_server import Generate, Generated, Load, Loaded, Ready, Row, Start, add_tensor
from agents.samplers.weights import anonymous_file, checkpoint_tensors, write_weights
from agents.sharing.config import Isolated
from agents.testing import make_prompt
from exchange.types import Version

VERSION = Version(3, 0)
PROMPTS = [make_prompt("a", text="reverse ab:"), make_prompt("b", text="sort dcba:")]


class PlayedServer(VLLMProcess):
    """Answers as a server with this policy would. spoil: what becomes of each answer."""

    def __init__(self, policy: Policy, spoil: Callable[[Any], Any] = lambda answer: answer) -> None:
        self._weights_fd = anonymous_file()
        self.asked: list[Any] = []
        self.closed = False
        self._policy = policy
        self._spoil = spoil

    @property
    def weights_fd(self) -> int:
        return self._weights_fd

    def since_start_s(self) -> float:
        return 0.0

    def tell(self, question: Any, *, timeout_s: float) -> None:
        self.asked.append(question)

    def hear(self, expected: Any, *, timeout_s: float) -> Any:
        return self._spoil(self._answer(self.asked[-1]))

    def close(self) -> None:
        self.closed = True

    def _answer(self, question: Any) -> Any:
        match question:
            case Start():
                return Ready()
            case Load():
                digest = blake3.blake3()
                for name, tensor in sorted(load_file(f"/dev/fd/{self.weights_fd}").items()):
                    add_tensor(digest, name, tensor)
                return Loaded(version=question.version, digest=digest.hexdigest())
            case Generate():
                return self._generate(question)

    def _generate(self, asked: Generate) -> Generated:
        def likeliest(logits: torch.Tensor, _rows: torch.Tensor, _position: int) -> tuple[torch.Tensor, torch.Tensor]:
            values, tokens = torch.log_softmax(logits, dim=-1).max(dim=-1)
            return tokens, values

        prompts = [np.array(prompt, dtype=np.int32) for prompt in asked.prompts]
        decoded = decode(
            self._policy, prompts, num_generations=asked.num_generations, max_tokens=asked.max_tokens, choose=likeliest
        )
        rows = list(enumerate(decoded.lengths.tolist()))
        return Generated(
            version="",
            ids=b"".join(decoded.ids[row, :length].tobytes() for row, length in rows),
            logprobs=b"".join(decoded.logprobs[row, :length].tobytes() for row, length in rows),
            lengths=decoded.lengths.tolist(),
            stopped=decoded.stopped.tolist(),
        )


def tiny(seed: int = 0) -> Policy:
    config = TinyPolicy(arch="gpt_neox", tokenizer="char", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    policy = build_policy(config, seed=seed, device="cpu", dtype="float32", threads=1)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(20)  # type: ignore[no-untyped-call]
    return policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny()


def sampler_on(server: PlayedServer, policy: Policy, **sampling: Any) -> VLLMSampler:
    """A sampler whose process the given server plays, started and not yet updated."""
    settings = Sampling(**({"max_completion_length": 6} | sampling))
    sampler = VLLMSampler(policy, settings, VLLM(), threads=1, log=Path("x.log"), process=lambda *_, **__: server)
    sampler.preflight(PROMPTS)
    return sampler


def test_a_config_names_its_sampler(policy: Policy, tmp_path: Path) -> None:
    table = {"policy": {"kind": "tiny"}, "sharing": {"rule": "isolated"}}
    assert msgspec.convert(table, AgentConfig).sampler == InProcess()
    vllm = msgspec.convert(table | {"sampler": {"kind": "vllm", "python": "p"}}, AgentConfig)
    assert vllm.sampler == VLLM(python="p")
    in_process = AgentConfig(policy=TinyPolicy(), sharing=Isolated())
    assert isinstance(build_sampler(in_process, policy, log=tmp_path / "log"), HFSampler)
    assert isinstance(build_sampler(vllm, policy, log=tmp_path / "log"), VLLMSampler)


def test_groups_are_those_that_the_server_gave(policy: Policy) -> None:
    server = PlayedServer(policy)
    sampler = sampler_on(server, policy, temperature=0.7, top_k=5, top_p=0.9, stop=("zz",))
    sampler.update(VERSION)
    groups = sampler.sample(PROMPTS, num_generations=3, step=4, version=VERSION, seed=1)
    expected = HFSampler(policy, Sampling(max_completion_length=6)).greedy(PROMPTS, 2)
    for group, prompt, likeliest in zip(groups, PROMPTS, expected, strict=True):
        assert (group.prompt, group.step, group.version, len(group.completions)) == (prompt, 4, VERSION, 3)
        for completion in group.completions:
            assert completion.ids.tolist() == likeliest.ids.tolist()
            assert (completion.text, completion.finished, completion.has_eos) == (
                likeliest.text,
                likeliest.finished,
                likeliest.has_eos,
            )
            np.testing.assert_allclose(completion.logprobs, likeliest.logprobs, atol=1e-5)
    start, *_, asked = server.asked
    assert (start.max_model_len, start.dtype, start.allowed_ids) == (
        max(len(g.prompt_ids) for g in groups) + 6,
        "float32",
        None,
    )
    assert (asked.temperature, asked.top_k, asked.top_p, asked.stops) == (0.7, 5, 0.9, [b"zz"])
    assert asked.end_ids == sorted(policy.tokenizer.eos_ids)
    assert b"".join(start.pieces[token] for token in asked.prompts[0]) == b"reverse ab:"


def test_every_row_of_every_step_has_a_seed_of_its_own(policy: Policy) -> None:
    server = PlayedServer(policy)
    sampler = sampler_on(server, policy)
    sampler.update(VERSION)
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        sampler.sample(PROMPTS, num_generations=4, step=step, version=VERSION, seed=seed)
    first, second, third, again = (asked.seeds for asked in server.asked[-4:])
    assert len({*first, *second, *third}) == 24
    assert first == again
    sampler.greedy(PROMPTS, 1)
    assert [(asked.seeds, len(asked.prompts)) for asked in server.asked[-2:]] == [(None, 1), (None, 1)]


def test_weights_that_did_not_arrive_are_an_error(policy: Policy) -> None:
    def another(answer: Any) -> Any:
        return msgspec.structs.replace(answer, digest="00" * 32) if isinstance(answer, Loaded) else answer

    sampler = sampler_on(PlayedServer(policy, another), policy)
    with pytest.raises(SamplerError, match=r"weights than version 3\.0: got digest=0{64} of version 3\.0, sent [0-9a-f]{64}"):
        sampler.update(VERSION)
    with pytest.raises(SamplerError, match="weights of version None, got"):
        sampler.sample(PROMPTS, num_generations=2, step=0, version=VERSION, seed=0)


def test_an_answer_about_an_earlier_version_is_an_error(policy: Policy) -> None:
    def late(answer: Any) -> Any:
        return msgspec.structs.replace(answer, version="2.9") if isinstance(answer, Loaded) else answer

    with pytest.raises(SamplerError, match=r"other weights than version 3\.0: got digest=[0-9a-f]{64} of version 2\.9"):
        sampler_on(PlayedServer(policy, late), policy).update(VERSION)


def test_a_server_that_computes_another_model_is_found_out_at_the_first_update(policy: Policy) -> None:
    server = PlayedServer(tiny(seed=1))
    with pytest.raises(SamplerError, match=r"another model than the policy: .* differ by \d\S* on average, allowed are 0\.02"):
        sampler_on(server, policy).update(VERSION)
    assert server.closed


def test_only_the_weights_of_the_last_update_are_drawn_from(policy: Policy) -> None:
    sampler = sampler_on(PlayedServer(policy), policy)
    sampler.update(VERSION)
    with pytest.raises(SamplerError, match=r"version Version\(epoch=3, step=0\), got version=Version\(epoch=3, step=1\)"):
        sampler.sample(PROMPTS, num_generations=2, step=1, version=Version(3, 1), seed=0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: msgspec.structs.replace(answer, lengths=[1, 0]),
        lambda answer: msgspec.structs.replace(answer, lengths=answer.lengths[:1], stopped=answer.stopped[:1]),
        lambda answer: msgspec.structs.replace(answer, logprobs=answer.logprobs[:-4]),
        lambda answer: msgspec.structs.replace(answer, ids=answer.ids + bytes(4), logprobs=answer.logprobs + bytes(4)),
    ],
)
def test_completions_of_other_shapes_than_asked_for_are_an_error(policy: Policy, spoil: Callable[[Any], Any]) -> None:
    server = PlayedServer(policy)
    sampler = sampler_on(server, policy)
    sampler.update(VERSION)
    server._spoil = spoil
    with pytest.raises(SamplerError, match="other completions than were asked for: got rows="):
        sampler.greedy(PROMPTS, 2)


def test_what_cannot_be_sampled_starts_no_engine(policy: Policy) -> None:
    def never(*_: object, **__: object) -> VLLMProcess:
        raise AssertionError("started")

    sampler = VLLMSampler(policy, Sampling(max_completion_length=60), VLLM(), threads=1, log=Path("x.log"), process=never)
    with pytest.raises(PolicyError, match="allowed are 1 to 4"):
        sampler.preflight(PROMPTS)
    with pytest.raises(SamplerError, match="has not been started; call preflight first"):
        sampler.update(VERSION)
    sampler.close()


def test_the_engine_gets_an_environment_of_its_own(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def note(command: list[str], **given: Any) -> VLLMProcess:
        started.update(given, command=command)
        return PlayedServer(policy)

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    VLLMSampler(policy, Sampling(), VLLM(python="some/python"), threads=3, log=Path("x.log"), process=note).preflight(PROMPTS)
    assert started["environment"]["OMP_NUM_THREADS"] == "3"
    assert started["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in started["environment"]
    python, *flags, script = started["command"]
    assert (Path(python), flags, Path(script).name) == (Path("some/python").absolute(), ["-I", "-u"], "vllm_server.py")


def test_weights_are_what_a_checkpoint_holds(policy: Policy, tmp_path: Path) -> None:
    for each in (policy, build_policy(TinyPolicy(), seed=0, device="cpu", dtype="bfloat16", threads=1)):
        each.save(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        fd = anonymous_file()
        digest, size = write_weights(fd, checkpoint_tensors(each))
        sent = load_file(f"/dev/fd/{fd}")
        assert size == os.fstat(fd).st_size
        os.close(fd)
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name]) and sent[name].dtype == saved[name].dtype for name in saved)
        other = anonymous_file()
        assert write_weights(other, checkpoint_tensors(tiny(seed=5)))[0] != digest
        os.close(other)


def test_a_row_ends_where_its_stop_string_does() -> None:
    pieces = [b"a", b"b", b"ab", b"c", b""]
    row = Row([b"bca", b"zz"], pieces)
    row.add([2, 3], [-1.0, -2.0], ended=False)
    assert not row.stopped
    row.add([4, 2, 3], [-3.0, -4.0, -5.0], ended=False)
    assert (row.ids, row.logprobs, row.stopped) == ([2, 3, 4, 2], [-1.0, -2.0, -3.0, -4.0], True)
    row.add([0], [0.0], ended=True)
    assert len(row.ids) == 4
    cut = Row([b"bca"], pieces)
    cut.add([1, 3, 3, 0], [0.0] * 4, ended=False)
    assert not cut.stopped
    ended = Row([], None)
    ended.add([7], [0.0], ended=True)
    assert ended.stopped
