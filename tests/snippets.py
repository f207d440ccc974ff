"""Code in pages for people, and the small world in which it runs as it stands.

A fenced block of `bash` or `python` is run. Words after the language say otherwise: `needs-…` names what a
machine for tests lacks, `fails` that the block ends in the error which the next block of `text` shows.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from .quantization.tiny import tiny_config
from .targets.small_tokenizers import byte_level, saved

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
#: Pages whose code runs.
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "formats.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")),
)
#: What a block may need that a machine for tests lacks.
NEEDS: Mapping[str, str] = {
    "needs-gpu": "an NVIDIA GPU",
    "needs-vllm": "vLLM",
    "needs-sglang": "SGLang",
    "needs-network": "the hub, a package index, or a server",
    "needs-peft": "a program around it that trains",
    "needs-tool": "another program, such as llama.cpp or git",
}
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Ids on the hub that pages name. In the small world each is a directory: with the bundled model, or with a
#: random one of the same class, which groups of 128 divide and whose tokenizer has a chat template.
LLAMAS = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct")
QWENS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")
LLAVAS = ("llava-hf/llava-1.5-7b-hf",)
SIZES = {
    **{
        "vocab_size": 272,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 32,
    },
    "max_position_embeddings": 512,
}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text and the line of its fence."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if word.startswith("needs-"))

    @property
    def is_code(self) -> bool:
        return self.language in ("bash", "python")


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page of Markdown, or the code cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        code = [(i, "".join(cell["source"])) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
        return [Block("python", (), source, number) for number, source in code]
    return [
        Block(found[1], tuple(found[2].split()), found[3], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """The commands of a block of bash, without comments; a backslash continues a line."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def make_world(place: Path) -> None:
    """Lay out the models and texts that pages name, in small."""
    for name in LLAMAS:
        shutil.copytree(EXAMPLES / "stories260K", place / name)
    for name in QWENS:
        write_model(place / name, "Qwen3MoeForCausalLM" if "A3B" in name else "Qwen3ForCausalLM")
    for name in LLAVAS:
        write_model(place / name, "LlavaForConditionalGeneration")
    stories = (EXAMPLES / "stories.txt").read_text(encoding="utf-8")
    (place / "examples").mkdir()
    (place / "examples" / "stories260K").symlink_to(EXAMPLES / "stories260K")
    (place / "examples" / "tasks").symlink_to(EXAMPLES / "tasks")
    (place / "examples" / "stories.txt").write_text(stories[:1200], encoding="utf-8")
    (place / "text.txt").write_text(stories[:1200], encoding="utf-8")
    rows = [{"text": story} for story in stories.split("\n\n") if story.strip()]
    asked = {"role": "user", "content": "Tell a story."}
    chats = [{"messages": [asked, {"role": "assistant", "content": row["text"]}]} for row in rows]
    write_lines(place / "texts.jsonl", rows)
    write_lines(place / "chats.jsonl", chats)
    question = {"question": "What did Lily play with?", "choices": ["a toy", "the moon"], "label": 0}
    write_lines(place / "arc_easy.jsonl", [question] * 4)


def write_model(directory: Path, name: str) -> None:
    """Write a random model of class `name`, with a token per byte and rows of whole groups of 128."""
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class, name)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            for field, value in SIZES.items():
                if hasattr(part, field):
                    setattr(part, field, value)
    torch.manual_seed(0)
    with torch.no_grad():
        model = cls(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    directory.mkdir(parents=True)
    saved(directory, byte_level("qwen2"), chat_template=CHAT, eos_token="<|end|>")
    model.save_pretrained(directory)


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def code_blocks() -> Iterator[tuple[Path, Block]]:
    """All blocks of code of all pages."""
    for page in PAGES:
        for block in blocks(page):
            if block.is_code:
                yield page, block
