"""List the candidate formats of automatic bit allocation.

Each row is a format with the granularity that is worth its bits (docs/accuracy.md). A row that costs more and
loses more than another is never chosen, so a superfluous row costs only measuring time.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from quantkit.calibrate.methods import method_named
from quantkit.errors import FormatError, UsageError, unknown_name
from quantkit.packing.formats import FORMATS, FittedFormat
from quantkit.packing.presets import MENU_NAMES, PRESETS, SCHEMES, preset_named
from quantkit.recipes.recipe import Choice, parse_group_size

MENU: tuple[Choice, ...] = (
    Choice("ternary", 64, scale_dtype="e4m3", packing="radix"),
    *(Choice("int2", size, scale_dtype="e4m3") for size in (64, 32, 16)),
    *(Choice("int3", size, scale_dtype="e4m3") for size in (64, 32, 16)),
    Choice("int4"),
    Choice("int4", 32, scale_dtype="e4m3"),
    Choice("int4", 16, scale_dtype="e4m3"),
    Choice("mxfp4"),
    Choice("nvfp4"),
    Choice("book4", 64),
    Choice("book4"),
    Choice("book4", 16),
    Choice("int5"),
    Choice("int5", 32, scale_dtype="e4m3"),
    Choice("int6"),
    Choice("fp6"),
    Choice("mxfp6"),
    Choice("int7"),
    Choice("int8"),
    Choice("fp8"),
    Choice("mxfp8"),
)

#: The same of what is written as compressed-tensors. Groups are those for which engines have fast kernels.
MENU_OF_ENGINES: tuple[Choice, ...] = (
    Choice("int4", "channel"),
    *(Choice("int4", size) for size in (128, 64, 32)),
    Choice("mxfp4"),
    Choice("nvfp4"),
    Choice("int8"),
    Choice("fp8"),
    Choice("mxfp8"),
)

#: What engines read besides, by one kernel that was not run (`engines.SUPPORT`): chosen only by name.
NAMED_OF_ENGINES: tuple[Choice, ...] = (
    *(Choice("int2", size) for size in (64, 32)),
    *(Choice(f"int{bits}", size, packing="stream") for bits in (3, 5, 6, 7) for size in (128, 64, 32)),
)


#: Menus that a word of `--formats` names. `fast` leaves out fitted code books, which take longer than ints
#: of as many bits (docs/performance.md); rows of `engine` decode fast too, and other engines read them.
MENUS: Mapping[str, tuple[Choice, ...]] = dict(
    zip(
        MENU_NAMES,
        (
            MENU_OF_ENGINES,
            tuple(row for row in MENU if not isinstance(FORMATS[PRESETS[row.format].format], FittedFormat)),
            MENU,
        ),
        strict=True,
    )
)


def candidates(
    method: str,
    formats: tuple[str, ...] | None = None,
    menu: tuple[Choice, ...] = MENU,
    named: tuple[Choice, ...] = (),
) -> tuple[Choice, ...]:
    """Return the rows of `menu` that `method` supports, each with `method`.

    `formats` are names such as `int4`, for all rows of that format in `menu` and `named`, or the format's
    preset if it has no row. `FORMAT:GROUP` is one granularity, in the packing of those rows. A name of
    `SCHEMES`, such as `W8A8`, is that scheme, with the rounding of its inputs. A name of `MENUS` stands for
    the rows of that menu that `method` supports. Raises `UsageError` for unknown or unsupported formats.
    """
    if formats is None:
        rows = tuple(replace(row, method=method) for row in menu)
        return tuple(row for row in rows if _refusal(row) is None)
    found: dict[Choice, None] = {}
    for text in formats:
        if text in MENUS:
            found |= dict.fromkeys(candidates(method, menu=MENUS[text]))
            continue
        try:
            rows = _named(text, (*menu, *named))
        except UsageError as error:
            raise UsageError(f"--formats {text}: {error}") from error
        for row in rows:
            chosen = replace(row, method=method)
            if (refusal := _refusal(chosen)) is not None:
                raise UsageError(f"--formats {text}: {refusal}") from refusal
            found[chosen] = None
    if not found:
        raise UsageError("--formats is empty; name at least one.")
    return tuple(found)


def _named(text: str, menu: tuple[Choice, ...]) -> tuple[Choice, ...]:
    if text in SCHEMES:
        return (Choice(**SCHEMES[text].options),)
    name, separator, group = text.partition(":")
    if preset_named(name) is None:
        raise unknown_name("format", name, (*MENUS, *PRESETS, *SCHEMES))
    rows = tuple(row for row in menu if row.format == name) or (Choice(name),)
    return (Choice(name, parse_group_size(group), packing=rows[0].packing),) if separator else rows


def _refusal(choice: Choice) -> FormatError | UsageError | None:
    try:
        choice.check()
        # The loss of a format is that of the method itself.
        if (chosen := choice.scheme(torch.bfloat16)) is not None:
            method_named(choice.method).check(chosen)
    except (FormatError, UsageError) as error:
        return error
    return None
