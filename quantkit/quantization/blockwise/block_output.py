"""Fill the work file of a block."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.checkpoint.output.work_files import WorkFile
from quantkit.progress import Advance
from quantkit.quantization.blockwise.block_tasks import BlockTasks
from quantkit.quantization.blockwise.layer_quantizer import Quantized, merged

#: Note for a linear whose method scales input features, if its features could not be scaled.
NOT_SCALED = (
    "its input features are not scaled: quantkit knows no operation of this model that only feeds linears "
    "of this method and could take the scales"
)
#: Note for a matrix whose method learns the rounding of blocks, if the method does not cover it.
NOT_LEARNED = "its rounding is not learned: that is for the linears of a block, not for experts or a head"

#: Note for a linear that has a method with data but does not run on tokens.
NOT_RUN = (
    "it does not run when the model is given the calibration text, so it is quantized without data, with the "
    "scales of mse; a rule keeps it dense"
)

#: Number of tokens that chose each expert, and a note if some got too few.
Coverage = tuple[list[int], str | None]


class BlockOutput:
    """Work file of a block while it is filled, and the manifest entries of its linears."""

    def __init__(self, file: WorkFile, todo: BlockTasks, report: Advance) -> None:
        self._file, self.todo, self._report = file, todo, report
        self._details: dict[str, dict[str, dict[str, Any]]] = {}

    def write(self, finished: Mapping[str, Quantized]) -> None:
        """Write the `finished` linears, by name, to the work file; report their progress."""
        for name, one in finished.items():
            task = self.todo.tasks[name]
            assert task.module is not None
            for part, spec in task.parts:
                found = one.part(part, task)
                self._file.write(spec.name, found.cpu().view(spec.torch_dtype))
            self._details.setdefault(task.module, {})[name] = one.detail
            matrix = task.source.name.removesuffix(".weight")
            self._report(task.source.nbytes, one.line(matrix if name in self.todo.parts else task.module))

    def close(self, covered: Mapping[str, Coverage]) -> None:
        """Write errors, notes and token counts of experts, by module, into the work file for the manifest."""
        notes = {module: [] if note is None else [note] for module, (_, note) in covered.items()}
        for module, text in _not_done(self.todo):
            if text not in notes.setdefault(module, []):
                notes[module].append(text)
        self._file.detail["layers"] = {
            module: merged(matrices, notes.get(module, ()), covered[module][0] if module in covered else None)
            for module, matrices in self._details.items()
        }


def _not_done(todo: BlockTasks) -> Iterator[tuple[str, str]]:
    """Yield (module, note) for methods of which a step was skipped for a matrix of the module."""
    scaled = {name for fold in todo.folds for name in fold.consumers}
    for name in todo.idle & todo.tasks.keys():
        module = todo.tasks[name].module
        assert module is not None
        yield module, NOT_RUN
    for name, task in todo.calibrated.items():
        assert task.module is not None and task.method is not None
        if task.method.input_scaling and name not in scaled:
            yield task.module, NOT_SCALED
        if task.method.refine and name not in todo.refined:
            yield task.module, NOT_LEARNED
