"""Keep the passes of all micro-batches between two blocks, and store hidden states for resuming."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.checkpoint.output.work_files import WorkFiles
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import UsageError
from quantkit.model.distributed import Ranks, Record
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.hidden_states import Home

FORMAT = {"format": "pt"}

#: Tensor of the work file: for each earlier block, the length of the tuple it returns, 0 for a tensor.
LENGTHS = "lengths"


@dataclass(frozen=True, eq=False)
class States:
    """Passes of this rank's micro-batches, waiting before the same block; `runs` are their run numbers.

    A run are inputs whose Hessian is summed separately. `home` is where hidden states wait.
    `exact` are passes of the original model, for methods that need the input error; else None.
    """

    runs: tuple[int, ...]
    home: Home
    passes: list[ModelPass]
    exact: list[ModelPass] | None

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all micro-batches."""
        return sum(one.tokens.numel() for one in self.passes)

    @property
    def block(self) -> str | None:
        """Return the name of the block that the passes wait for; None at the end of the model."""
        names = {one.block for one in self.passes}
        if len(names) > 1:
            found = " and ".join(sorted(map(str, names)))
            raise UsageError(
                f"calibration samples run different blocks of the model: {found}. Give samples of one kind, "
                "such as one image each."
            )
        return self.passes[0].block

    @property
    def are_plain(self) -> bool:
        """Return True if a run can be resumed from hidden states alone."""
        return all(one.plain for one in (*self.passes, *(self.exact or ())))

    def write(self, output: WorkFiles, filename: str, count: int, ranks: Ranks) -> None:
        """Write the states of all ranks to a work file, `count` micro-batches; requires `are_plain`."""
        named = {"hidden": self.passes, **({} if self.exact is None else {"exact": self.exact})}
        dtypes = {torch.float32: "F32", torch.bfloat16: "BF16"}
        # A rank without samples is not rank 0 and writes nothing.
        first = self.passes[0].call.hidden if self.passes else torch.empty(1, 0)
        lengths = torch.tensor(self.passes[0].lengths if self.passes else [])
        specs = [
            TensorSpec(name, dtypes[first.dtype], (count * len(first), *first.shape[1:])) for name in named
        ]
        with output.shard(
            filename, [*specs, TensorSpec(LENGTHS, "I64", tuple(lengths.shape))], FORMAT
        ) as file:
            file.write(LENGTHS, lengths)
            for name, passes in named.items():
                records = [Record({name: one.call.hidden.detach()}) for one in passes]
                for at, record in enumerate(ranks.gather_records(records, self.home.device)):
                    tensor = record.tensors[name]
                    file.write(name, tensor, offset=at * tensor.numel())

    def read(self, output: WorkFiles, filename: str, share: Sequence[int]) -> None:
        """Advance passes from the first block to the states in a work file: micro-batches `share`."""
        files = Checkpoint.of_files([output.path / filename])
        lengths = files.read(LENGTHS).tolist()
        for name, passes in (("hidden", self.passes), ("exact", self.exact or ())):
            for at, one in zip(share, passes, strict=bool(passes)):
                rows = len(one.tokens)
                one.skip(lengths, files.read(name, at * rows, (at + 1) * rows))
