"""Names of models, files, tensors and tasks: whatever is written of one shows its text and nothing else."""

import ast
from pathlib import Path
from random import Random

import yaml

from quantkit import escaping
from quantkit.errors import QuantkitError
from quantkit.escaping import Code
from quantkit.report.document import Bullets, Command, Document, Section, Table, Text

from ..test_escaping import PAGE, PIECES, Page, line, only_text

NAMES = (
    b"meta-llama/Llama-3.1-8B",
    b"model.layers.0.mlp.down_proj",
    b"/data/my models/a_b.c",
    "modèle 字`x`".encode(),
)


def mutate_name(data: bytes, random: Random) -> bytes:
    """A few pieces of markup, control characters and bytes put into a name, or nothing but spaces."""
    if random.random() < 0.1:
        return b" " * random.randrange(5)
    for _ in range(random.randrange(1, 8)):
        at = random.randrange(len(data) + 1)
        piece = random.choice(PIECES).encode("utf-8", "surrogatepass")
        new = piece if random.random() < 0.8 else random.randbytes(random.randrange(1, 4))
        data = data[:at] + new * random.choice((1, 1, 1, 2, 9)) + data[at + random.choice((0, 0, 3)) :]
    return data


def check_name(case: bytes, directory: Path) -> None:
    name = case.decode("utf-8", "surrogateescape")
    shown = line(name)
    if not shown.strip():
        raise QuantkitError("a name of nothing but spaces cannot be seen")
    assert escaping.one_line(name) == shown
    parts = (("of ", Code(name), name), Text(name), Command(name))
    table = Table([name, "n"], [[name, "1"]], frozenset({name}))
    document = Document(name, [Section(name, [Text(parts[0]), parts[1], Bullets([name]), table, parts[2]])])
    texts = only_text(document.markdown())
    assert texts.count(shown) == 6 and f"of {shown}{shown}" in texts
    page = Page(document.html())
    assert set(page.tags) <= PAGE and page.lines.count(shown) >= 6
    document.markdown().encode()
    front = {"name": name, "tags": [name]}
    assert yaml.safe_load(escaping.yaml(front)) == front
    assert ast.literal_eval(escaping.python(name)) == name
    label = escaping.plot(name)
    assert label.isprintable() and not label.startswith("_") and label.count("$") == label.count(r"\$")
