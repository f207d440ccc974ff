"""`generate` that asks for the end a step late gives what transformers' own loop gives."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from quantkit.runtime import async_sampling, host_copy
from quantkit.runtime.host_copy import HostCopy, _copies_of
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ..support.compare import assert_equal
from .graphed import DEVICE, SIZES, count_recordings, ids


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was generated so."""
    count_recordings(monkeypatch)
    made: list[torch.Tensor] = []
    sample = async_sampling.sample

    # transformers takes the arguments that are its loop's from the names.
    def spied(
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **inputs: Any,
    ) -> torch.Tensor:
        loop = (logits_processor, stopping_criteria, generation_config, streamer)
        made.append(sample(model, input_ids, *loop, **inputs))
        return made[-1]

    monkeypatch.setattr(async_sampling, "sample", spied)
    return made


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model, and the same one with graphs."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).to(DEVICE).eval()
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    graphed = copy.deepcopy(plain)
    graph_decoding(graphed)
    return plain, graphed


def both(models: tuple[Any, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of both, after which they have drawn as many random numbers."""
    prompt = ids(batch=3)
    found, states = [], []
    for model in models:
        torch.manual_seed(3)
        answer = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        found.append(answer if torch.is_tensor(answer) else answer.sequences)
        states.append(torch.rand(3, device=DEVICE))
    assert_equal(*states)
    return found[0], found[1]


MANY = list(range(3, 300))
FEW = [5, 100, 17]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 7},
        {"max_length": 14},
        {"max_new_tokens": 30, "eos_token_id": FEW, "pad_token_id": 0},
        {"max_new_tokens": 30, "eos_token_id": MANY, "pad_token_id": 1},
        {"max_new_tokens": 30, "eos_token_id": MANY},
        {"max_new_tokens": 30, "eos_token_id": list(range(512)), "pad_token_id": 0},
        {"max_new_tokens": 30, "do_sample": True, "temperature": 3.0, "top_k": 20, "eos_token_id": MANY},
        {"max_new_tokens": 30, "do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3},
        {"max_new_tokens": 9, "min_new_tokens": 9, "eos_token_id": MANY},
        {"generation_config": GenerationConfig(max_new_tokens=5, eos_token_id=MANY)},
        {"max_new_tokens": 30, "eos_token_id": torch.tensor(MANY)},
    ],
    ids="-".join,
)
def test_tokens_and_random_numbers_are_those_of_transformers(
    models: tuple[Any, Any], late: list[torch.Tensor], options: dict[str, Any]
) -> None:
    expected, found = both(models, **options)
    assert_equal(found, expected)
    assert len(late) == 1


def test_a_text_that_ends_with_its_last_token(models: tuple[Any, Any], late: list[torch.Tensor]) -> None:
    whole, _ = both(models, max_new_tokens=6)
    ends = whole[:, -1].tolist()
    for most in (5, 6, 7):
        expected, found = both(models, max_new_tokens=most, eos_token_id=ends, pad_token_id=0)
        assert_equal(found, expected)


class _Banned(LogitsProcessor):
    """Everything but a few tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 30:] = -torch.inf
        return scores


class _Even(StoppingCriteria):
    """A text of an even token has ended."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 2 == 0


def test_processors_and_criteria_of_the_caller(models: tuple[Any, Any], late: list[torch.Tensor]) -> None:
    for criteria in ([_Even()], [MaxLengthCriteria(12)], [_Even(), MaxLengthCriteria(12)]):
        expected, found = both(
            models,
            max_new_tokens=20,
            logits_processor=LogitsProcessorList([_Banned()]),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
        assert_equal(found, expected)
        assert int(found[:, 9:].max()) < 30
    assert len(late) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_only_what_changes_logits_gets_copies_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    compared: list[torch.Tensor] = []
    argmax_tokens = async_sampling.argmax_tokens
    monkeypatch.setattr(
        async_sampling, "argmax_tokens", lambda scores: argmax_tokens(compared.append(scores) or scores)
    )
    # Of the last two, which are equal in float32, and in 16 bits.
    logits = torch.tensor([[1.0] * 38 + [2.0, 2.0 + 1e-12]], dtype=dtype)
    before = logits.clone()
    for processors, token in (([], 38), ([_Banned()], 0)):
        found = async_sampling._next_tokens(ids(), logits, LogitsProcessorList(processors), False)
        assert found.tolist() == [token]
        assert_equal(logits, before)
    assert (compared[0] is logits) is (dtype != torch.float64)
    assert compared[1].dtype == torch.float32


class _Noise(LogitsProcessor):
    """Random numbers are added."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand_like(scores)


class _Strict(LogitsProcessor):
    """One that does not know what follows the end of all texts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 9 and all(token in MANY for token in input_ids[:, -1].tolist()):
            raise ValueError("nothing follows")
        return scores


def test_processors_see_nothing_of_the_step_that_is_left_out(models: tuple[Any, Any]) -> None:
    lengths = []
    for processor, sampled in ((_Noise(), False), (_Noise(), True), (_Strict(), True)):
        expected, found = both(
            models,
            max_new_tokens=30,
            do_sample=sampled,
            eos_token_id=MANY,
            logits_processor=LogitsProcessorList([processor]),
        )
        assert_equal(found, expected)
        lengths.append(found.shape[1])
    # Random numbers of a GPU are others, with which one text or another ends at once.
    assert any(10 < length < 39 for length in lengths)


def test_errors_of_processors_are_raised(models: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="nothing follows"):
        both(models, max_new_tokens=30, eos_token_id=-1, logits_processor=LogitsProcessorList([_Strict()]))


def test_the_cache_has_room_for_what_criteria_let_through(models: tuple[Any, Any]) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(260)])
    expected, found = both(models, max_new_tokens=5, stopping_criteria=criteria)
    assert_equal(found, expected)
    assert found.shape[1] == 260


def test_steps_run_with_the_experts_that_transformers_chooses_for_them(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[1]
    inside = False
    seen: list[bool] = []

    @contextmanager
    def chosen() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def step(**inputs: Any) -> Any:
        seen.append(inside)
        return model(**inputs)

    monkeypatch.setattr(model, "_optimize_model_for_decode", chosen)
    monkeypatch.setattr(model, "get_compiled_call", lambda *_: step)
    prompt = ids()
    model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4)
    assert seen == [True] * 3 and not inside


@pytest.mark.parametrize("tensor", [torch.arange(6).view(2, 3), torch.tensor(True)], ids=["whole", "one"])
def test_copies_are_of_what_was_there(tensor: torch.Tensor) -> None:
    tensor = tensor.to(DEVICE)
    for part in (tensor, tensor.mT if tensor.dim() == 2 else tensor):
        copy = HostCopy(part)
        found = copy.get()
        assert found.device.type == "cpu"
        assert_equal(found, part.cpu())
        part.logical_not_() if part.dtype == torch.bool else part.add_(1)
        assert not torch.equal(copy.get(), part.cpu())


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU has streams")
#: Some milliseconds and, for what must not end before the host looks, half a second, in cycles of a GPU.
SHORT, LONG = 10**7, 10**9


@on_a_gpu
def test_copies_wait_for_what_was_launched_before_and_nothing_waits_for_them() -> None:
    # What is first launched, and memory first pinned, may wait for all that runs.
    HostCopy(torch.ones(5, device=DEVICE)).get()
    number = torch.zeros(5, device=DEVICE)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            number.zero_()
            torch.cuda._sleep(SHORT)
            number.add_(1)
            copy = HostCopy(number)
            torch.cuda._sleep(LONG)
            assert copy.get().tolist() == [1.0] * 5
            assert not stream.query()
    torch.cuda.synchronize()
    with torch.cuda.stream(_copies_of(number.device)):
        torch.cuda._sleep(LONG)
    copy = HostCopy(number)
    torch.cuda.current_stream().synchronize()
    assert not copy._event.query()
    assert copy.get().tolist() == [1.0] * 5


@on_a_gpu
def test_memory_is_not_used_again_before_it_is_copied() -> None:
    torch.cuda.empty_cache()
    number = torch.full((1 << 20,), 7, device=DEVICE)
    # The host's memory is there then, which may wait for all that runs when it is pinned.
    HostCopy(number).get()
    with torch.cuda.stream(_copies_of(number.device)):
        torch.cuda._sleep(LONG)
    copy = HostCopy(number)
    del number
    other = torch.zeros(1 << 20, dtype=torch.int64, device=DEVICE)
    torch.cuda.current_stream().synchronize()
    assert copy.get().eq(7).all() and not other.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no other GPU")
def test_copies_are_of_the_device_of_the_tensor() -> None:
    with torch.cuda.device(1):
        torch.cuda._sleep(SHORT)
        number = torch.ones(5, device="cuda:1") + 1
    copy = HostCopy(number)
    assert torch.cuda.current_device() == 0 and _copies_of(number.device).device_index == 1
    assert copy.get().tolist() == [2.0] * 5


def test_copies_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the device of the tensor, after its current stream; without a GPU, by what is called."""
    called: list[Any] = []
    side = SimpleNamespace(
        wait_stream=lambda other: called.append(f"after {other}"),
        record_event=lambda: SimpleNamespace(synchronize=lambda: called.append("waited")),
    )
    copy = SimpleNamespace(copy_=lambda *_, **options: called.append(options))
    tensor = SimpleNamespace(
        is_cuda=True,
        device="cuda:1",
        shape=(),
        dtype=None,
        record_stream=called.append,
    )
    monkeypatch.setattr(host_copy, "_copies_of", lambda device: side if device == "cuda:1" else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: _Block(called) if stream is side else None)
    monkeypatch.setattr(torch, "empty", lambda *_, **options: called.append(options) or copy)
    found = HostCopy(cast(torch.Tensor, tensor))
    assert called == [
        {"dtype": None, "pin_memory": True},
        "after stream of cuda:1",
        *("begin", {"non_blocking": True}, "end"),
        side,
    ]
    assert found.get() is copy and called[-1] == "waited"


class _Block:
    """Says when it begins and ends."""

    def __init__(self, called: list[Any]) -> None:
        self._called = called

    def __enter__(self) -> None:
        self._called.append("begin")

    def __exit__(self, *_: Any) -> None:
        self._called.append("end")


class _Streamer(BaseStreamer):
    """What it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append((value.device.type, value.tolist()))

    def end(self) -> None:
        self.given.append("end")


@pytest.mark.parametrize("eos", [-1, MANY, list(range(512))], ids=["to the end", "some", "at once"])
def test_streamers_get_what_transformers_gives_them(
    models: tuple[Any, Any], late: list[torch.Tensor], eos: Any
) -> None:
    streamers = [_Streamer(), _Streamer()]
    for model, streamer in zip(models, streamers, strict=True):
        prompt = ids(batch=1)
        model.generate(
            input_ids=prompt, max_new_tokens=9, eos_token_id=eos, pad_token_id=0, streamer=streamer
        )
    assert streamers[0].given == streamers[1].given and streamers[0].given[-1] == "end"
    assert len(late) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 2, "do_sample": True},
        {"return_dict_in_generate": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
        {"use_cache": None},
        {"disable_compile": True},
        {"prompt_lookup_num_tokens": 2},
        {"synced_gpus": False},
    ],
    ids="-".join,
)
def test_what_asks_for_more_is_left_to_transformers(
    models: tuple[Any, Any], late: list[torch.Tensor], options: dict[str, Any]
) -> None:
    many = {} if "prompt_lookup_num_tokens" in options else {"attention_mask": torch.ones_like(ids(batch=3))}
    prompt = ids(batch=3 if many else 1)
    torch.manual_seed(3)
    expected = models[0].generate(input_ids=prompt, max_new_tokens=5, **many, **options)
    torch.manual_seed(3)
    found = models[1].generate(input_ids=prompt, max_new_tokens=5, **many, **options)
    sequences = [answer if torch.is_tensor(answer) else answer.sequences for answer in (expected, found)]
    assert_equal(*sequences)
    assert type(found) is type(expected)
    assert not late
