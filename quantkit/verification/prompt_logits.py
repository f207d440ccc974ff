"""Logits for a fixed prompt: stored in the manifest by `quantize`, compared by `verify`.

Hashes prove that files are unchanged. Logits prove that they run to the same result on other machines,
kernels, and versions of torch and transformers. They are computed in float32, where kernels differ by
rounding only; a wrong scale or code differs by far more.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from quantkit.checkpoint.manifest import extend_manifest, read_manifest
from quantkit.checkpoint.model_record import ModelRecord, float32_bytes
from quantkit.checkpoint.output.lock import DirectoryLock, locked
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.kernels.registry import quietly
from quantkit.memory import enough_memory
from quantkit.model.hf_files import explained
from quantkit.model.parts import embeddings
from quantkit.runtime.load import load
from quantkit.runtime.packed_embedding import PackedEmbedding
from quantkit.runtime.saved_model import is_saved

KEY = "prompt_logits"
#: Tokens of the prompt, and number of largest logits stored per position.
PROMPT_TOKENS, TOP = 16, 8
#: Allowed difference of a logit, relative to the largest stored one; docs/cli.md shows differences between
#: kernels.
TOLERANCE = 1e-3
_LARGEST = torch.finfo(torch.float32).max
_AGAIN = "Download the checkpoint again, or quantize the model again."


@dataclass(frozen=True)
class PromptLogits:
    """Prompt of P tokens, and per position the TOP tokens with the largest logits, in descending order.

    A classifier has one position. A model without logits has hidden features in place of tokens.
    """

    prompt: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[float, ...], ...]

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "PromptLogits | None":
        """Read the entry of a manifest, None if missing; raise `CheckpointError` for a malformed one."""
        data = manifest.get(KEY)
        if data is None:
            return None
        try:
            prompt = tuple(data["prompt"])
            tokens = tuple(tuple(row) for row in data["tokens"])
            logits = tuple(tuple(row) for row in data["logits"])
            numbers = [*prompt, *(token for row in tokens for token in row)]
            sound = (
                prompt
                and all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
                and all(type(x) is float and abs(x) <= _LARGEST for row in logits for x in row)
                and [len(row) for row in tokens] == [len(row) for row in logits]
                and len(tokens) in (1, len(prompt))
                and len({len(row) for row in tokens}) == 1
                and tokens[0]
            )
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise CheckpointError(
                f"quantkit_manifest.json: {KEY!r} is not a prompt with tokens and finite logits of each "
                f"position. {_AGAIN}"
            )
        return cls(prompt, tokens, logits)


def bytes_to_run(directory: Path) -> int:
    """Return the approximate bytes of memory that `record` takes for the model in `directory`, in float32."""
    layers = ModelRecord.from_manifest(read_manifest(directory)).layers
    return float32_bytes(Checkpoint.open(directory).nbytes, layers)


def record(
    directory: Path, device: str | torch.device = "cpu", lock: DirectoryLock | None = None
) -> PromptLogits:
    """Run the finished checkpoint in `directory` and store its prompt logits in the manifest.

    Returns stored logits without a run. Holds the lock of `directory` from before loading until logits are
    stored; pass `lock` if the caller holds it. Raises `CheckpointError` if the model does not load or its
    logits are not finite, `OutputError` if another process writes there.
    """
    stored = PromptLogits.from_manifest(read_manifest(directory))
    if stored is not None:
        return stored
    if lock is None:
        with locked(directory) as own:
            return record(directory, device, own)
    logits = run_prompt(lambda: load(directory, device=device, dtype=torch.float32), directory)
    extend_manifest(directory, {KEY: asdict(logits)}, lock)
    return logits


def run_prompt(open_model: Callable[[], Any], directory: Path) -> PromptLogits:
    """Open the model of `directory` in float32, and return its logits for the prompt.

    Raises `CheckpointError` if they are not finite, `TakesNoText` if it does not run on tokens. Silences
    warnings about slow kernels, which do not matter for one short prompt, and messages of transformers.
    """
    with quietly(), _silent(), enough_memory(str(directory)), explained(directory):
        model = open_model()
        prompt = _prompt(model)
        logits = _logits(model, prompt, directory)
    values, tokens = logits.topk(min(TOP, logits.shape[1]))
    return PromptLogits(prompt, tuple(map(tuple, tokens.tolist())), tuple(map(tuple, values.tolist())))


@contextmanager
def _silent() -> Iterator[None]:
    """Context manager: hide progress bars and messages of transformers, except errors, in the process."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def compare(directory: Path, device: str | torch.device = "cpu") -> list[str]:
    """Load and run `directory`; return differences of its logits from the stored ones.

    Without stored logits, logits only have to be finite. Raises `CheckpointError` if the model does not load
    or run.
    """
    stored = None if is_saved(directory) else PromptLogits.from_manifest(read_manifest(directory))
    with quietly():
        model = load(directory, device=device, dtype=torch.float32)
        try:
            logits = _logits(model, _prompt(model) if stored is None else stored.prompt, directory)
        except TakesNoText:
            return []
    return [] if stored is None else differences(stored, logits)


def differences(stored: PromptLogits, logits: torch.Tensor) -> list[str]:
    """List differences of `logits` [P, V] float32 from `stored`; empty if they agree.

    Compares by token, since stored tokens must keep their logits. Compares by rank too, since no other token
    may have a larger one.
    """
    tokens, expected = torch.tensor(stored.tokens), torch.tensor(stored.logits)
    if max(int(tokens.max()), tokens.shape[1] - 1) >= logits.shape[1]:
        what = f"token {int(tokens.max())}, one of {tokens.shape[1]} at each position,"
        return [f"{what} has a stored logit, and the model {logits.shape[1]} tokens"]
    allowed = TOLERANCE * float(expected.abs().max())
    by_token = (logits.gather(1, tokens) - expected).abs()
    by_rank = (logits.topk(expected.shape[1]).values - expected).abs()
    worst = torch.maximum(by_token, by_rank)
    if float(worst.max()) <= allowed:
        return []
    at, rank = divmod(int(worst.argmax()), worst.shape[1])
    token, actual = int(tokens[at, rank]), float(logits[at, tokens[at, rank]])
    agree = int((logits.argmax(1) == tokens[:, 0]).sum())
    return [
        f"position {at}, token {token}: logit {actual:.6g}, stored {expected[at, rank]:.6g}; differences up "
        f"to {float(worst.max()):.3g}, allowed {allowed:.3g}; the likeliest token is the stored one at "
        f"{agree} of {len(tokens)} positions"
    ]


class TakesNoText(CheckpointError):
    """The model does not run on tokens alone, so it has no prompt logits."""


def _prompt(model: Any) -> tuple[int, ...]:
    """Return the tokens of the prompt for `model`, at most `PROMPT_TOKENS`, spread over the vocabulary.

    Token i is 1 + 7919 i, modulo the vocabulary; 7919 is a prime. Raises `TakesNoText` for a model that takes
    no tokens.
    """
    table = embeddings(model, "input")
    if not isinstance(table, torch.nn.Embedding | PackedEmbedding) or model.main_input_name != "input_ids":
        raise TakesNoText(f"a {type(model).__name__} takes {model.main_input_name}, and the prompt is text")
    rows = table.num_embeddings
    try:
        config = model.config.get_text_config()
    except ValueError:  # For a model of several texts.
        config = model.config
    # None, or for XLNet -1, means no limit.
    positions = getattr(config, "max_position_embeddings", None) or 0
    length = min(PROMPT_TOKENS, positions) if positions > 0 else PROMPT_TOKENS
    return tuple((1 + 7919 * i) % rows for i in range(length))


@torch.inference_mode()
def _logits(model: Any, prompt: tuple[int, ...], directory: Path) -> torch.Tensor:
    """Return the logits [P, V] float32 on the CPU; without logits, the first tensor of the output."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    if max(prompt) >= rows:
        raise CheckpointError(
            f"{directory}: the stored prompt has token {max(prompt)}, the embedding {rows} rows. {_AGAIN}"
        )
    ids = torch.tensor(prompt, device=model.device)[None]
    try:
        first = _first_output(model, ids)
    except Exception as error:
        reason = _why_not_text(model, ids, error)
        if reason is None:
            raise
        raise TakesNoText(reason) from error
    logits = first[0].float().cpu()
    logits = logits[None] if logits.dim() == 1 else logits
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(f"{directory}: the logits are not finite. {_AGAIN}")
    return logits


def _first_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    takes = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids
    first: torch.Tensor = model(input_ids=ids, **inputs)[0]
    return first


def _refused_by_class(error: Exception) -> bool:
    """Return True if one of transformers' models raised an error that weights cannot cause.

    That is a ValueError, or an attribute that an output of the model lacks. Checks of transformers count as
    the model's. Modules raise in code of torch.
    """
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    below = list(takewhile(lambda name: not name.startswith("transformers.models."), reversed(frames)))
    raised = len(below) < len(frames) and (not below or below[-1].startswith("transformers."))
    own = isinstance(error, AttributeError) and not isinstance(error.obj, torch.Tensor)
    return raised and (own or isinstance(error, ValueError))


def _why_not_text(model: Any, ids: torch.Tensor, error: Exception) -> str | None:
    """Return why the class of `model` does not run on tokens; None if an unpacked model of it does."""
    cls = getattr(type(model), "class_before", type(model))
    try:
        with torch.device("meta"):
            _first_output(cls._from_config(model.config), ids.to("meta"))
    except Exception as other:
        # Other errors are due to the meta device: a mixture of experts cannot route without numbers. An error
        # that the class itself raises is not due to the weights.
        if (type(other) is type(error) and str(other) == str(error)) or _refused_by_class(error):
            return f"a {cls.__name__} does not run on text alone ({type(error).__name__}: {error})"
    return None
