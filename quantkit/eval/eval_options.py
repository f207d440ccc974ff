"""Options of an evaluation. Imports no torch: the command line takes its defaults from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.eval.tasks import Tasks


@dataclass(frozen=True)
class EvalOptions:
    """The texts and tasks to score checkpoints on, how, and the checkpoint to compare with.

    Without `against` there are only perplexity and accuracy. `against` is the checkpoint to compare with, a
    directory or hub id. Its logits are kept in at most `budget_bytes` of temporary files, or in `cache_dir`
    for the next run.

    `dtype` is that of activations; "auto" is float32 on a CPU, and on a GPU that of the reference, or of the
    first checkpoint. Windows of `window` tokens start `stride` tokens apart, by default `window`; `batch` of
    them run at a time, and at most `max_windows` of each text.

    With `noise_floor` the reference also runs in another dtype (`evaluate.CONTROL_DTYPES`), and is compared
    with itself on texts and tasks. With `per_block` it runs with each block of a model in turn, on a few
    windows of the first text. With `kv_cache`, a format of `runtime.cache.kv_formats.KV_FORMATS`, tokens
    attend to keys and values in that format; those of the reference and of single blocks do not.
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
    budget_bytes: int = 8 << 30
    cache_dir: Path | str | None = None
