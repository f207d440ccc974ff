"""Options of an evaluation. Imports no torch, because the command line takes its defaults from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.eval.own_text import OwnText
    from quantkit.eval.tasks import Tasks


@dataclass(frozen=True)
class EvalOptions:
    """Texts and tasks to score checkpoints on, and how. The command line shows the lines of its options.

    texts          files of UTF-8 to score
    tasks          tasks of lm-eval (extra 'eval')
    against        the original, a directory or hub id: adds what was lost on each text and task
    window         tokens per window of a text
    stride         tokens between windows' starts
    max_windows    windows per text
    dtype          of the activations: float32, bfloat16, float16, or auto: float32 on a CPU, on a GPU that of
                   the original, or of the first model
    kv_cache       format of the KV cache: int8, fp8, int4; the original keeps the dtype
    batch          windows, or requests of a task, at a time
    noise_floor    also run the original in another dtype: a difference as small is none
    per_block      also run the original with each block of the model in turn, on a few windows of the first
                   text: where is the loss?
    own_text       also score so many texts that the original writes, and let the model write as many: how
                   long they are and how much they repeat; sampled, and in a second pass greedily
    written        what the original wrote, from own_text
    budget_bytes   disk for the original's logits at a time
    cache_dir      keep the original's logits there for later runs instead
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
