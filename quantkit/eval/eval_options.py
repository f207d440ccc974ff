"""Options of an evaluation. Imports no torch, because the command line takes its defaults from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.eval.own_text import OwnText
    from quantkit.eval.tasks import Tasks


@dataclass(frozen=True)
class EvalOptions:
    """Texts and tasks to score checkpoints on, and how.

    against        checkpoint to compare with, a directory or hub id; without, only perplexity and accuracy
    budget_bytes   largest size of the logits of `against` in temporary files cache_dir      directory that
    keeps these logits for later runs instead dtype          dtype of activations; "auto" is float32 on a CPU,
    and on a GPU the dtype of the reference, or of
                   the first checkpoint
    window         tokens of a window; windows start `stride` tokens apart, by default `window`
    batch          windows that run at a time; at most `max_windows` of each text
    noise_floor    also compare the reference with itself in another dtype (`evaluate.CONTROL_DTYPES`)
    per_block      also run the reference with each block of a model, on a few windows of the first text
    own_text       number of texts that the reference generates to be scored too; the model generates as many
    written        texts that the reference generated, for `own_text`
    kv_cache       format of `runtime.cache.kv_formats.KV_FORMATS` for keys and values; not for the reference
    """

    texts: tuple[Path | str, ...] = ()
    tasks: "Tasks | None" = None
    against: Path | str | None = None
    window: int = 2048
    stride: int | None = None
    max_windows: int | None = None
    dtype: str = "auto"
    kv_cache: str | None = None
    device: str = "auto"
    batch: int = 1
    noise_floor: bool = False
    per_block: bool = False
    own_text: int = 0
    written: "OwnText | None" = None
    budget_bytes: int = 8 << 30
    cache_dir: Path | str | None = None
