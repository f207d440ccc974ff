"""Opening and reading checkpoint directories. The numbers are those of the list of bad inputs."""

import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.source import (
    CONFIG_NAME,
    HEADERS_ONLY_NAME,
    INDEX_NAME,
    MAX_CONFIG_BYTES,
    SINGLE_NAME,
    Checkpoint,
)
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.files import MAX_CONTAINERS

from ..support.compare import assert_equal

MODELS = Path(__file__).parents[2] / "../shared/models"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS_ONE = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
TENSORS_TWO = {"c": torch.arange(6, dtype=torch.int64), "s": torch.tensor(2.5)}
NBYTES = 48 + 4 + 48 + 4
INDEX_REMEDY = "Download the index and the shards again, of one revision."


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_index(directory: Path, weight_map: Any, total_size: Any = NBYTES) -> None:
    value = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(directory / INDEX_NAME, value)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    directory = tmp_path / "single"
    directory.mkdir()
    write_json(directory / CONFIG_NAME, {"model_type": "llama"})
    save_file(TENSORS_ONE | TENSORS_TWO, directory / SINGLE_NAME)
    return directory


WEIGHT_MAP = {"a": ONE, "b": ONE, "c": TWO, "s": TWO}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    write_json(directory / CONFIG_NAME, {"model_type": "llama"})
    save_file(TENSORS_ONE, directory / ONE)
    save_file(TENSORS_TWO, directory / TWO)
    write_index(directory, WEIGHT_MAP)
    return directory


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory, **options)
    text = str(caught.value)
    text.encode()
    return text


def test_opens_single_file(single: Path) -> None:
    checkpoint = Checkpoint.open(single, strict=True)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.tensors.keys() == WEIGHT_MAP.keys()
    assert checkpoint.shards == (single / SINGLE_NAME,)
    assert checkpoint.nbytes == NBYTES
    assert checkpoint.warnings == ()


def test_opens_shards_in_order(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded, strict=True)
    assert checkpoint.shards == (sharded / ONE, sharded / TWO)
    files = [tensor.file.name for tensor in checkpoint.tensors.values()]
    assert files == [ONE, ONE, TWO, TWO]
    assert checkpoint.warnings == ()


def test_relative_directory_survives_chdir(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single.parent)
    checkpoint = Checkpoint.open(Path("single"))
    monkeypatch.chdir("/")
    assert checkpoint.read("s").item() == 2.5


def test_bad_header_names_the_shard(sharded: Path) -> None:  # 3
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    assert refusal(sharded).startswith(f"{sharded / TWO}: the file is truncated: expected ")


@pytest.mark.fault(14)
def test_refuses_big_endian_host(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 14
    monkeypatch.setattr(sys, "byteorder", "big")
    expected = "this host is big-endian.*expected a little-endian host. Run quantkit on x86-64"
    with pytest.raises(EnvironmentProblem, match=expected):
        Checkpoint.open(single)


def test_lists_all_missing_shards(sharded: Path) -> None:  # 16
    (sharded / ONE).unlink()
    (sharded / TWO).unlink()
    assert refusal(sharded) == (
        f"{sharded}: 2 of the 2 shards in {INDEX_NAME} are missing: {ONE}, {TWO}. Download them."
    )


OUTSIDE = ["../x.safetensors", "/x.safetensors", r"\\host\x.safetensors", "a/b.safetensors", "C:x"]


@pytest.mark.parametrize("shard", [*OUTSIDE, "x.bin", "", "x.safetensors\n", "\0.safetensors", 1, None])
def test_refuses_shard_name(sharded: Path, shard: Any) -> None:  # 17, 22
    write_index(sharded, WEIGHT_MAP | {"a": shard})
    assert refusal(sharded) == (
        f"{sharded / INDEX_NAME}: the shard of tensor 'a' is {shard!r}; expected the name of a file "
        "beside the index: [A-Za-z0-9._-]+.safetensors. Download the index again."
    )


@pytest.mark.parametrize("name", [ONE, CONFIG_NAME, INDEX_NAME])
def test_refuses_link_out_of_the_directory(sharded: Path, name: str) -> None:  # 17
    outside = sharded.parent / f"outside-{name}"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    assert refusal(sharded) == (
        f"{sharded / name}: links to {outside}; expected a file inside the directory. Replace the "
        "link by the file."
    )


def test_skips_side_file_that_links_out_of_the_directory(single: Path) -> None:  # 17
    secret = single.parent / "secret.json"
    write_json(secret, {})
    (single / "tokenizer.json").symlink_to(secret)
    checkpoint = Checkpoint.open(single)
    assert checkpoint.side_files == ()
    assert checkpoint.warnings == (
        f"{single / 'tokenizer.json'}: ignored, because it links out of the directory",
    )


def hub_cache(source: Path, blobs: Path, snapshot: Path) -> None:
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))


@pytest.mark.fault(17)
def test_follows_links_of_its_own_hub_cache(sharded: Path, tmp_path: Path) -> None:  # 17
    write_json(sharded / "tokenizer.json", {})
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots/abc"
    hub_cache(sharded, repository / "blobs", snapshot)
    checkpoint = Checkpoint.open(snapshot)
    assert_equal(checkpoint.read("a"), TENSORS_ONE["a"])
    assert checkpoint.side_files == (snapshot / "tokenizer.json",)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert Checkpoint.open(link).nbytes == NBYTES


@pytest.mark.fault(17)
def test_refuses_links_of_another_hub_cache(sharded: Path, tmp_path: Path) -> None:  # 17
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    hub_cache(sharded, tmp_path / "models--org--other/blobs", snapshot)
    assert "links to" in refusal(snapshot)


def test_refuses_index_of_absent_tensor(sharded: Path) -> None:  # 18
    write_index(sharded, WEIGHT_MAP | {"lm_head.weight": TWO})
    assert refusal(sharded) == (
        f"{sharded / INDEX_NAME}: tensor 'lm_head.weight' should be in {TWO}, but no shard has it. "
        f"{INDEX_REMEDY}"
    )


def test_refuses_tensor_in_two_shards(sharded: Path) -> None:  # 19
    save_file(TENSORS_TWO | {"a": torch.zeros(1)}, sharded / TWO)
    assert refusal(sharded) == (
        f"{sharded / TWO}: tensor 'a' is also in {ONE}; expected it in one shard. Download the "
        "checkpoint again."
    )


def test_warns_of_tensor_outside_the_index(sharded: Path) -> None:  # 20
    write_index(sharded, {name: shard for name, shard in WEIGHT_MAP.items() if name != "b"})
    problem = (
        f"{sharded / INDEX_NAME}: 1 tensors are in shards but not in the index, the first is 'b' in {ONE}"
    )
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.warnings == (f"{problem}; they are used",)
    assert "b" in checkpoint.tensors
    assert refusal(sharded, strict=True) == f"{problem}; expected all in the index. {INDEX_REMEDY}"


def test_refuses_index_of_wrong_shard(sharded: Path) -> None:  # 21
    write_index(sharded, WEIGHT_MAP | {"a": TWO})
    assert refusal(sharded) == (
        f"{sharded / INDEX_NAME}: tensor 'a' should be in {TWO}, but is in {ONE}. {INDEX_REMEDY}"
    )


BAD_INDEXES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty; expected a JSON object. Download the file again."),
    "truncated": (b'{"weight_map": {"a":', "the file is invalid ("),
    "bad UTF-8": (b'{"\xff": 1}', "the file is invalid ("),
    "list": (b"[]", "the file is []; expected a JSON object. Download the file again."),
    "deep": (b'{"a":' * 100_000, "the file is nested too deeply; expected a few levels of JSON."),
    "no map": (b"{}", "weight_map is None; expected shard names by tensor. Download the index again."),
    "empty map": (b'{"weight_map": {}}', "weight_map is {}; expected shard names by tensor. Downl"),
    "map is a list": (b'{"weight_map": ["a"]}', "weight_map is ['a']; expected shard names by tensor"),
    "duplicate": (
        b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}',
        "key 'a' occurs twice in one JSON object; expected once.",
    ),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_refuses_bad_index(sharded: Path, case: str) -> None:  # 22
    content, expected = BAD_INDEXES[case]
    (sharded / INDEX_NAME).write_bytes(content)
    assert refusal(sharded).startswith(f"{sharded / INDEX_NAME}: {expected}")


def test_index_wins_over_single_file(sharded: Path) -> None:  # 23
    save_file({"a": torch.zeros(1)}, sharded / SINGLE_NAME)
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.tensors["a"].file.name == ONE
    assert checkpoint.warnings == (
        f"{sharded}: ignored {SINGLE_NAME}, because {INDEX_NAME} does not name them",
    )


def test_single_file_wins_over_others_without_index(single: Path) -> None:
    save_file({"a": torch.zeros(1)}, single / "consolidated.safetensors")
    checkpoint = Checkpoint.open(single)
    assert checkpoint.shards == (single / SINGLE_NAME,)
    assert checkpoint.warnings == (
        f"{single}: ignored consolidated.safetensors, because {SINGLE_NAME} is used",
    )


UNPICKLE = "quantkit never unpickles weights. Convert them with transformers: "


@pytest.mark.parametrize(
    ("files", "found", "remedy"),
    [
        ((), "no weights", "Download the weights as well."),
        (("pytorch_model.bin",), "pytorch_model.bin", UNPICKLE),
        (("model.pt", "model.gguf"), "model.gguf, model.pt", UNPICKLE),
        (("model.gguf",), "model.gguf", "Give the path of the GGUF file itself"),
        ((ONE, TWO), f"{ONE}, {TWO}", f"Download {INDEX_NAME} as well."),
    ],
)
def test_refuses_directory_without_usable_weights(  # 24
    tmp_path: Path, files: tuple[str, ...], found: str, remedy: str
) -> None:
    write_json(tmp_path / CONFIG_NAME, {})
    for name in files:
        (tmp_path / name).touch()
    expected = f"{tmp_path}: found {found}; expected {SINGLE_NAME} or {INDEX_NAME}. {remedy}"
    assert refusal(tmp_path).startswith(expected)


@pytest.mark.parametrize("total", [NBYTES + 1, -1, "many"])
def test_warns_of_wrong_total_size(sharded: Path, total: object) -> None:  # 25
    write_index(sharded, WEIGHT_MAP, total)
    assert Checkpoint.open(sharded, strict=True).warnings == (
        f"{sharded / INDEX_NAME}: total_size is {total!r}, but the tensors have {NBYTES} bytes",
    )


def test_refuses_names_that_differ_in_case(sharded: Path) -> None:  # 27
    write_json(sharded / "Tokenizer.json", {})
    write_json(sharded / "tokenizer.json", {})
    assert refusal(sharded) == (
        f"{sharded / 'tokenizer.json'}: its name differs from Tokenizer.json in case only; expected "
        "distinct names, also on macOS and Windows. Rename one of the two."
    )


CONFIG_REMEDY = "Check that it exists and its permissions."
BAD_CONFIGS: dict[str, tuple[bytes | None, str]] = {
    "missing": (
        None,
        f"cannot be read (No such file or directory); expected a readable JSON file. {CONFIG_REMEDY}",
    ),
    "invalid": (b"{", "the file is invalid ("),
    "no object": (b'"llama"', "the file is 'llama'; expected a JSON object. Download the file again."),
    "deep": (b"[" * 100_000, "the file is nested too deeply; expected a few levels of JSON."),
    "too large": (
        b" " * (MAX_CONFIG_BYTES + 1),
        f"the file is too large; allowed are {MAX_CONFIG_BYTES} bytes. Download the file again.",
    ),
    "too many": (
        b'{"a": [' + b"[]," * MAX_CONTAINERS + b"1]}",
        f"the file has more objects and lists than expected; allowed are {MAX_CONTAINERS}. Download the file",
    ),
    "auto_map": (
        b'{"auto_map": {"AutoModel": "modeling.Model"}}',
        "auto_map is {'AutoModel': 'modeling.Model'}, so the model needs code of its repository, "
        "which quantkit never runs; expected an architecture of transformers. Remove auto_map, or "
        "use --allow-auto-map to ignore it, if transformers has the model; if not, quantize it with "
        "--model-free.",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_refuses_bad_config(single: Path, case: str) -> None:  # 28, 30
    content, expected = BAD_CONFIGS[case]
    path = single / CONFIG_NAME
    path.unlink() if content is None else path.write_bytes(content)
    assert refusal(single).startswith(f"{path}: {expected}")


def test_auto_map_is_ignored_on_request(single: Path) -> None:  # 30
    write_json(single / CONFIG_NAME, {"model_type": "llama", "auto_map": {"AutoModel": "m.M"}})
    (single / "m.py").write_text("raise SystemExit('was run')")
    checkpoint = Checkpoint.open(single, allow_auto_map=True)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.warnings == (
        f"{single / CONFIG_NAME}: auto_map is ignored; the code that it names is not run",
    )
    assert checkpoint.side_files == ()


def test_refuses_what_is_no_directory(single: Path) -> None:
    for path, reason in ((single / "no", "No such file or directory"), (single / SINGLE_NAME, "Not a")):
        text = refusal(path)
        assert text.startswith(f"{path}: cannot be listed ({reason}")
        assert text.endswith("; expected a directory with a checkpoint. Check the path.")


def test_side_files_are_carried_and_code_is_left(single: Path) -> None:
    carried = [
        "LICENSE", "README.md", "chat_template.jinja", "generation_config.json", "merges.txt",
        "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    left = [
        ".hidden.json", "evil.py", "pytorch_model.bin", "pytorch_model.bin.index.json", "a.pt",
        "a.pth", "a.gguf", "picture.png",
    ]  # fmt: skip
    for name in carried + left:
        (single / name).touch()
    (single / "folder.json").mkdir()
    assert [path.name for path in Checkpoint.open(single).side_files] == carried


def test_slices_equal_those_of_safetensors(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    with safe_open(single / SINGLE_NAME, "pt") as file:
        for name, stored in checkpoint.tensors.items():
            whole = file.get_tensor(name)
            assert checkpoint.read(name).dtype == whole.dtype
            assert_equal(checkpoint.read(name), whole)
            rows = stored.shape[0] if stored.shape else 0
            for start in range(rows):
                assert_equal(checkpoint.read(name, start), whole[start:])
                for stop in range(start, rows + 1):
                    assert_equal(checkpoint.read(name, start, stop), whole[start:stop])


def test_reads_are_fresh_and_writable(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    checkpoint.read("a").zero_()
    assert_equal(checkpoint.read("a"), TENSORS_ONE["a"])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 5), (3, 2), (5, None)])
def test_refuses_rows_outside_the_tensor(single: Path, start: int, stop: int | None) -> None:
    with pytest.raises(IndexError, match=r"tensor 'a' has 4 rows, not \["):
        Checkpoint.open(single).read("a", start, stop)


def test_refuses_unknown_tensor(single: Path) -> None:
    expected = f"{single}: there is no tensor 'z' among its 4 tensors. Check the name, or the"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        Checkpoint.open(single).read("z")


def test_refuses_booleans_that_are_none(single: Path) -> None:
    save_file({"mask": torch.tensor([True, False])}, single / SINGLE_NAME)
    assert Checkpoint.open(single).read("mask").tolist() == [True, False]
    path = single / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    expected = r"tensor 'mask' has dtype BOOL and the byte 7; expected 0 or 1\. Write the file again"
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(single).read("mask")


def test_pieces_are_the_tensor_in_order(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    for name, tensor in (TENSORS_ONE | TENSORS_TWO).items():
        for nbytes in (1, 24, 30, 1 << 20):
            found = list(checkpoint.pieces(name, nbytes))
            sizes = [data.numel() for data, _ in found]
            assert [first for _, first in found] == [sum(sizes[:at]) for at in range(len(sizes))]
            assert_equal(torch.cat([data.flatten() for data, _ in found]), tensor.flatten())
            assert all(data.nbytes <= max(nbytes, tensor.nbytes // max(1, len(sizes))) for data, _ in found)
    assert [data.shape[0] for data, _ in checkpoint.pieces("a", 30)] == [2, 2]


def test_refuses_to_read_where_only_headers_are(single: Path) -> None:
    (single / HEADERS_ONLY_NAME).touch()
    checkpoint = Checkpoint.open(single)
    assert checkpoint.nbytes == NBYTES
    expected = "only the header was downloaded; expected the data of 'a' as well. Download the whole"
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.read("a")


def test_threads_read_at_once(sharded: Path) -> None:
    big = torch.randint(-1000, 1000, (512, 257), dtype=torch.int16)
    save_file(TENSORS_TWO | {"big": big}, sharded / TWO)
    write_index(sharded, WEIGHT_MAP | {"big": TWO}, NBYTES + big.nbytes)
    checkpoint = Checkpoint.open(sharded, strict=True)
    starts = [(7 * step) % 500 for step in range(400)]
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.is_dir() else None
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda start: checkpoint.read("big", start, start + 12), starts))
    assert_equal(parts, [big[start : start + 12] for start in starts])
    if before is not None:
        assert len(list(descriptors.iterdir())) <= before


def test_reads_in_several_system_calls(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: pread(fd, [parts[0][:5]], at))
    assert_equal(Checkpoint.open(single).read("a"), TENSORS_ONE["a"])


def io_error(*_: object) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.fault(61)
@pytest.mark.parametrize(
    ("preadv", "expected"),
    [
        (lambda *_: 0, r"expected 48 bytes of tensor 'a', got 0: the file was truncated\. Download"),
        (io_error, r"cannot be read \(Input/output error\); expected 48 bytes from byte \d+\. Check"),
    ],
)
def test_short_read_and_disk_error(  # 61
    single: Path, monkeypatch: pytest.MonkeyPatch, preadv: Callable[..., int], expected: str
) -> None:
    checkpoint = Checkpoint.open(single)
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {expected}"):
        checkpoint.read("a")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


@pytest.mark.fault(68)
@pytest.mark.parametrize("change", [truncate, touch])
@pytest.mark.parametrize("name", [ONE, CONFIG_NAME, INDEX_NAME])
def test_notices_a_changed_file(sharded: Path, name: str, change: Callable[[Path], None]) -> None:  # 68
    checkpoint = Checkpoint.open(sharded)
    checkpoint.check_unchanged()
    change(sharded / name)
    expected = (
        rf"{re.escape(str(sharded / name))}: the file has changed since it was opened: expected \d+ "
        r"bytes of mtime \d+ ns, got \d+ bytes of mtime \d+ ns\. Leave the source alone"
    )
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.check_unchanged()
    if name == ONE:
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.read("a")


@pytest.mark.fault(68)
def test_notices_a_removed_file(sharded: Path) -> None:  # 68
    checkpoint = Checkpoint.open(sharded)
    (sharded / ONE).unlink()
    with pytest.raises(CheckpointError, match=rf"{ONE}: it cannot be read any more \(No such file"):
        checkpoint.check_unchanged()
    with pytest.raises(CheckpointError, match=rf"{ONE}: cannot be read \(No such file"):
        checkpoint.read("a")


def test_fingerprint_changes_with_any_file(sharded: Path) -> None:
    first = Checkpoint.open(sharded).fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert Checkpoint.open(sharded).fingerprint() == first
    seen = {first}
    for name in (ONE, TWO, CONFIG_NAME):
        touch(sharded / name)
        seen.add(Checkpoint.open(sharded).fingerprint())
    assert len(seen) == 4


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(ONE),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "weight_map", "metadata", "total_size"]), children)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON_VALUES, name=st.sampled_from([INDEX_NAME, CONFIG_NAME]))
def test_any_json_is_valid_or_an_error(sharded: Path, value: object, name: str) -> None:
    original = (sharded / name).read_bytes()
    write_json(sharded / name, value)
    try:
        dequantized(Checkpoint.open(sharded))
    except CheckpointError as error:
        str(error).encode()
    finally:
        (sharded / name).write_bytes(original)


@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
@pytest.mark.parametrize("model", ["stories260K", "tinystories-656k", "books-28m"])
def test_reads_real_models(model: str) -> None:
    checkpoint = Checkpoint.open(MODELS / model, strict=True)
    assert dequantized(checkpoint) is checkpoint
    assert checkpoint.warnings == ()
    for shard in checkpoint.shards:
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored = checkpoint.tensors[name]
                part = file.get_slice(name)[1:3]
                assert_equal(checkpoint.read(name, 1, min(3, stored.shape[0])), part)


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"text_config": {"_attn_implementation": "somebody/code@main:attention"}},
        {"_experts_implementation_internal": {"": "somebody/code"}},
    ],
)
def test_refuses_kernels_of_the_hub(single: Path, config: dict[str, Any]) -> None:
    write_json(single / CONFIG_NAME, {"model_type": "llama", **config})
    text = refusal(single)
    assert "would run code of that repository, which quantkit never does" in text
    assert (
        f"Remove {next(key for key in json.dumps(config).split(chr(34)) if '_implementation' in key)}."
        in text
    )


def test_implementations_of_transformers_are_no_code(single: Path) -> None:
    write_json(single / CONFIG_NAME, {"model_type": "llama", "_attn_implementation": "sdpa"})
    assert Checkpoint.open(single).config["_attn_implementation"] == "sdpa"


def test_refuses_an_adapter(single: Path) -> None:
    write_json(single / "adapter_config.json", {"base_model_name_or_path": "somebody/else"})
    assert refusal(single) == (
        f"{single / 'adapter_config.json'}: the directory is an adapter to another model; expected a model "
        "of its own. Merge the adapter into its model, or remove adapter_config.json."
    )
