"""Train an adapter by transformers' Trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers


def check_loss_falls(model: Any, rows: Sequence[Any], folder: Path, **options: Any) -> None:
    """Train `model` on `rows`, of which the first four are evaluated, and check that their loss falls."""
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
