"""Data sets of the hub: which files are meant, what is downloaded and said; by a stand-in hub and none."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibrate.data import datasets
from quantkit.calibrate.data.datasets import DataSetName, files_to_read
from quantkit.checkpoint.hub.answers import Listing
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError

SHARDS = [f"data/train-{i:05}-of-00002.parquet" for i in range(2)]
CONFIGS: list[dict[str, Any]] = [
    {
        "config_name": "raw",
        "data_files": [
            {"split": "test", "path": "raw/test-*"},
            {"split": "train", "path": ["raw/first-*", "raw/more-*"]},
        ],
    },
    {"config_name": "clean", "data_files": "clean/*.jsonl"},
    {"config_name": "probe", "data_files": [{"split": "test", "path": "probe/*"}]},
]
CARD = {"configs": CONFIGS}
IN_CARD = ["README.md", "raw/test-0.parquet", "raw/first-0.parquet", "raw/more-0.parquet", "clean/a.jsonl"]


@pytest.mark.parametrize(
    ("files", "part", "card", "expected"),
    [
        (["README.md", *SHARDS, "data/test-00000-of-00001.parquet"], None, {}, SHARDS),
        (["train.jsonl", "valid.jsonl"], None, {}, ["train.jsonl"]),
        (["training_set.json", "dataset_infos.json", ".gitattributes"], None, {}, ["training_set.json"]),
        (["LICENSE.txt", "README.txt", "requirements.txt", "book.txt"], None, {}, ["book.txt"]),
        (["a.jsonl", "a.parquet", "a.csv"], None, {}, ["a.parquet"]),
        (["contest.jsonl", "test.jsonl"], None, {}, ["contest.jsonl"]),
        (["en/c4-train.0.json.gz", "de/c4-train.0.json.gz"], "en", {}, ["en/c4-train.0.json.gz"]),
        (["en/c4-train.0.json.gz", "en/c4-validation.0.json.gz"], "en/c4-validation.0.json.gz", {},
         ["en/c4-validation.0.json.gz"]),
        (IN_CARD, "raw", CARD, ["raw/first-0.parquet", "raw/more-0.parquet"]),
        (IN_CARD, "clean", CARD, ["clean/a.jsonl"]),
        (IN_CARD, None, {"configs": [CONFIGS[0], {**CONFIGS[1], "default": True}]}, ["clean/a.jsonl"]),
        (IN_CARD, None, {"configs": [*CONFIGS, {**CONFIGS[1], "config_name": "default"}]}, ["clean/a.jsonl"]),
        (IN_CARD, None, {"configs": CONFIGS[:1]}, ["raw/first-0.parquet", "raw/more-0.parquet"]),
        (["train.jsonl"], None, {"configs": "broken"}, ["train.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_the_train_split(files: list[str], part: str | None, card: Any, expected: list[str]) -> None:
    assert files_to_read(DataSetName("a/b", part), files, card) == tuple(expected)


@pytest.mark.parametrize(
    ("files", "part", "card", "kind", "message"),
    [
        (IN_CARD, None, CARD, UsageError,
         "hf:a/b: has the configs ['raw', 'clean', 'probe']. Name one, as hf:a/b/raw."),
        (["en/a.jsonl"], "fr", {}, UsageError,
         "hf:a/b/fr: the data set has no config, folder or file 'fr'. It has the configs [] and the folders "
         "['en']."),
        ([*IN_CARD, "probe/x.jsonl"], "probe", CARD, UsageError,
         "hf:a/b/probe: has no train split, but ['test']. Name a file, as hf:a/b/FILE."),
        (["test.jsonl"], None, {}, UsageError,
         "has no train split, but ['test.jsonl']. Name a file, as hf:a/b/test.jsonl."),
        (["README.md"], "README.md", {}, UsageError,
         "README.md is not a .txt, .jsonl, .json or .parquet file"),
        (["b.py", "data.zip", "x.tar.gz"], None, {}, CheckpointError,
         "but ['.py', '.tar.gz', '.zip'] among 3 files. If the hub shows its rows, it has a copy in parquet: "
         "try hf:a/b@refs/convert/parquet."),
        ([], None, {}, CheckpointError,
         "has no .txt, .jsonl, .json or .parquet file to read, but [] among 0 files"),
    ],
)  # fmt: skip
def test_what_is_meant_has_to_be_clear(
    files: list[str], part: str | None, card: Any, kind: type[QuantkitError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        files_to_read(DataSetName("a/b", part), files, card)
    assert message in str(caught.value)


# In a process of its own: huggingface_hub reads its settings when it is imported.
SCRIPT = """
import json, sys
from pathlib import Path
from quantkit.calibrate.data import datasets
from quantkit.calibrate.data.texts import parse_sources, read_source
result = {}
for text, tokens in json.loads(sys.argv[1]):
    try:
        texts = read_source(parse_sources(text)[0], tokens)
        result[text] = [texts.name, len(texts.documents), texts.documents[0], texts.notes]
    except Exception as error:
        result[text] = [type(error).__name__, str(error)]
cached = Path(sys.argv[2]).rglob("snapshots/*/**/*")
print(json.dumps([result, sorted(path.name for path in cached if path.is_file())]))
"""
COMMIT = "1" * 40


def in_process(
    home: Path, calls: list[Any], endpoint: str, **environment: str
) -> tuple[dict[str, Any], list[str]]:
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    variables = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": endpoint, **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls), str(home)],
        check=False,
        env={**inherited, **variables},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result, cached = json.loads(done.stdout)
    return result, cached


def lines(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({column: text}) + "\n" for text in texts).encode()


def test_only_as_many_files_as_needed_are_downloaded_and_used_again_offline(
    tmp_path: Path, hub_of: Callable[..., str]
) -> None:
    files = {
        "README.md": b"---\nconfigs:\n- config_name: big\n  data_files: big/*\n- config_name: odd\n"
        b"  data_files: odd/*\n---\n# A data set\n",
        **{f"big/{i}.jsonl.gz": gzip.compress(lines([f"{i}" * 500] * 4)) for i in (10, 9, 8)},
        "odd/a.jsonl": lines(["a"], "sentence"),
        "gated/a.jsonl": lines(["a"]),
        "load.py": b"raise SystemExit",
    }
    endpoint = hub_of("org/name", files, "dataset", gated=["gated/a.jsonl"])
    calls = [
        ("hf:org/name/big", 60),
        ("hf:org/name", 60),
        ("hf:org/name/odd", 9),
        ("hf:org/name/gated", 9),
        ("hf:org/name@v9", 9),
        ("hf:org/no", 9),
    ]
    result, cached = in_process(tmp_path, calls, endpoint)
    # 48 characters for each of the 60 tokens: all of a file of 2000, and of the next two of four lines.
    assert result["hf:org/name/big"] == [f"hf:org/name/big@{COMMIT}", 6, "8" * 500, []]
    assert cached == ["8.jsonl.gz", "9.jsonl.gz", "README.md", "a.jsonl"]
    assert result["hf:org/name"][0] == "UsageError"
    assert "has the configs ['big', 'odd']" in result["hf:org/name"][1]
    kind, text = result["hf:org/name/odd"]
    assert kind == "UsageError" and text.startswith(f"hf:org/name/odd@{COMMIT}: ")
    assert "a.jsonl: line 1 has the keys ['sentence']; expected text, content, messages" in text
    kind, text = result["hf:org/name/gated"]
    assert kind == "CheckpointError" and "hf:org/name/gated: access to the repository is gated" in text
    assert text.endswith("Ask for access on its page, then `hf auth login`.")
    assert result["hf:org/name@v9"][0] == "CheckpointError"
    assert "hf:org/name@v9: the repository has no such revision" in result["hf:org/name@v9"][1]
    assert result["hf:org/no"][0] == "CheckpointError"
    assert (
        "the hub has no such data set, or it is private; no such local file either" in result["hf:org/no"][1]
    )

    calls = [("hf:org/name/big", 60), ("hf:org/no", 9)]
    offline, _ = in_process(tmp_path, calls, endpoint, HF_HUB_OFFLINE="1")
    note = "hf:org/name/big: the hub was not reached; only what the local cache has of it was read"
    assert offline["hf:org/name/big"] == [f"hf:org/name/big@{COMMIT}", 6, "8" * 500, [note]]
    assert offline["hf:org/no"][0] == "EnvironmentProblem"
    assert (
        "HF_HUB_OFFLINE is set and the data set is not complete in the local cache" in offline["hf:org/no"][1]
    )
    assert offline["hf:org/no"][1].endswith("Unset HF_HUB_OFFLINE, or give a local file.")


def test_parquet_is_not_downloaded_where_it_cannot_be_read_nor_files_without_bound(
    tmp_path: Path, hub_of: Callable[..., str]
) -> None:
    endpoint = hub_of("org/name", {"train.parquet": b"PAR1", "b/train.jsonl": lines(["a" * 99])}, "dataset")
    without = tmp_path / "without"
    without.mkdir()
    (without / "pyarrow.py").write_text("raise ImportError(\"No module named 'pyarrow'\")")
    (without / "sitecustomize.py").write_text(
        "from quantkit.calibrate.data import datasets\ndatasets.MAX_FILE_BYTES = 99\n"
    )
    path = os.pathsep.join(filter(None, [str(without), os.environ.get("PYTHONPATH", ".")]))
    calls = [("hf:org/name/train.parquet", 9), ("hf:org/name/b", 9)]
    result, cached = in_process(tmp_path, calls, endpoint, PYTHONPATH=path)
    kind, text = result["hf:org/name/train.parquet"]
    assert kind == "EnvironmentProblem" and "pip install 'pyarrow>=17'" in text
    kind, text = result["hf:org/name/b"]
    assert (
        kind == "UsageError" and "b/train.jsonl has 112 bytes, more than the 99 that are downloaded" in text
    )
    assert cached == []


def test_a_file_of_which_hardly_a_byte_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event()
    listing = Listing("1" * 40, {"a.txt": 1000})
    monkeypatch.setattr(datasets, "read_listing", lambda *_, **__: listing)
    monkeypatch.setattr(datasets, "download_large", lambda *_: wait.wait(20))
    monkeypatch.setattr(datasets, "FILE_SECONDS", 0.1)
    data_set = datasets.open_data_set(datasets.parse_data_set("hf:org/texts"))
    with pytest.raises(EnvironmentProblem, match=r"hf:org/texts: .*no answer within 0\.2\d* seconds"):
        data_set.download("a.txt")
    wait.set()
