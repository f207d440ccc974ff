"""quantkit where little may be written: read-only files, no home, no cache, odd paths, other filesystems."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.source import Checkpoint

PACKAGE = Path(quantkit.__file__).parent
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_SHAPES = {
    "model.embed_tokens": (40, 32),
    "model.layers.0.input_layernorm": (32,),
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.k_proj": (16, 32),
    "model.layers.0.self_attn.v_proj": (16, 32),
    "model.layers.0.self_attn.o_proj": (32, 32),
    "model.layers.0.post_attention_layernorm": (32,),
    "model.layers.0.mlp.gate_proj": (48, 32),
    "model.layers.0.mlp.up_proj": (48, 32),
    "model.layers.0.mlp.down_proj": (32, 48),
    "model.norm": (32,),
    "lm_head": (40, 32),
}


def write_source(directory: Path) -> Path:
    """A llama of one block."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in _SHAPES.items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def tree(directory: Path) -> dict[str, str]:
    """Every file below a directory with the hash of its bytes."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def packed_bytes(directory: Path) -> str:
    """The hash of the tensors: the manifest has paths in it."""
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What quantizing gives where everything may be written."""
    place = tmp_path_factory.mktemp("plain")
    quantkit.quantize(write_source(place / "source"), place / "out", format="int4", device="cpu")
    return packed_bytes(place / "out")


# Odd paths


@pytest.mark.parametrize("name", ["with several  spaces", "ünï-çødé 日本語", 'quote\'s "and" $HOME;*', "-rf"])
def test_paths_with_spaces_and_letters_of_any_script(name: str, tmp_path: Path, expected: str) -> None:
    source, out = write_source(tmp_path / name / "source"), tmp_path / name / "packed"
    quantkit.quantize(source, out, format="int4", device="cpu")
    assert packed_bytes(out) == expected
    assert Checkpoint.open(out, strict=True).warnings == ()
    logits = quantkit.load(out, device="cpu")(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()


def test_a_relative_output_from_another_working_directory(
    tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(tmp_path / "models" / "source")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    quantkit.quantize("../models/source", "out", format="int4", device="cpu")
    assert packed_bytes(elsewhere / "out") == expected
    assert [path.name for path in elsewhere.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["source"]


def _other_filesystem(path: Path) -> Path | None:
    """A directory that can be written and is on another filesystem than `path`."""
    for other in map(Path, ("/dev/shm", "/run/shm", f"/run/user/{os.getuid()}", "/var/tmp", Path.home())):
        if other.is_dir() and os.access(other, os.W_OK) and other.stat().st_dev != path.stat().st_dev:
            return other
    return None


def test_an_output_on_another_filesystem(tmp_path: Path, expected: str) -> None:
    other = _other_filesystem(tmp_path)
    if other is None:
        pytest.skip("no second filesystem that can be written")
    source, out = write_source(tmp_path / "source"), other / f"quantkit-test-{os.getpid()}"
    try:
        quantkit.quantize(source, out, format="int4", device="cpu")
        assert out.stat().st_dev != source.stat().st_dev
        assert packed_bytes(out) == expected
        assert not list(out.glob(".*"))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            quantkit.quantize(source, tmp_path / f"{mode:o}", format="int4", device="cpu")
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / f"{mode:o}").iterdir()}
        assert set(modes.values()) == {mode}, modes


# Where nothing may be written but the output

#: Runs in a mount namespace of its own, in which mounts say what is read-only, whoever the user is. Each
#: restriction is shown to be one before quantkit runs; a mount that cannot be made ends it with 77.
_SHUT_IN = r"""
import errno, os, subprocess, sys
root, package, empty = sys.argv[1:4]

def mount(*arguments):
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"77 mount {' '.join(arguments)}: {done.stderr.strip()}")

def refuses(action):
    try:
        action()
    except OSError as error:
        assert error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOTDIR), error
    else:
        sys.exit("1 what should be read-only was written")

source, out, cache, work = (f"{root}/{name}" for name in ("source", "out", "cache", "work"))
for path in (source, package, cache, work):
    mount("--bind", path, path)
    mount("-o", "remount,bind,ro", path)
for path in ("/tmp", "/var/tmp", "/dev/shm"):
    if os.path.isdir(path) and not root.startswith(os.path.realpath(path) + "/"):
        mount("--bind", cache, path)
        mount("-o", "remount,bind,ro", path)
# Without them nobody has a home directory: some name services know that of root by heart.
for path in ("/etc/passwd", "/etc/nsswitch.conf"):
    if os.path.exists(path):
        mount("--bind", empty, path)
for path in (source, package, cache, work):
    refuses(lambda: open(f"{path}/new", "w"))
refuses(lambda: open(f"{source}/config.json", "a"))
refuses(lambda: open(f"{package}/__init__.py", "a"))
os.chdir(work)
try:
    from pathlib import Path
    home = Path.home()
except RuntimeError:
    pass
else:
    sys.exit(f"1 there is a home directory: {home}")

def audit(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        print("network", event, arguments, file=sys.stderr, flush=True)
        os._exit(1)
sys.addaudithook(audit)

import json, torch, quantkit
from quantkit.kernels.tuning.store import stored_tables, user_path
from quantkit.verification.verify import verify
from quantkit.recipes.recipe import Recipe
assert quantkit.__file__.startswith(package)
result = quantkit.quantize(source, out, format="int4", method="mse", device="cpu")
model = quantkit.load(out, device="cpu")
finite = bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())
problems = [problem for check in verify(Path(out), reload=False) for problem in check.problems]
print(json.dumps({"finite": finite, "problems": problems, "work": os.listdir(work)}))
"""


@pytest.fixture(scope="module")
def shut_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of quantkit said that could write to its output only, and what was there before."""
    place = tmp_path_factory.mktemp("shut-in")
    source = write_source(place / "source")
    for name in ("out", "cache", "work"):
        (place / name).mkdir()
    (place / "empty").touch()
    before = tree(source), tree(PACKAGE)
    keep = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    environment = {
        **keep,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE.parent), *sys.path))),
        "XDG_CACHE_HOME": str(place / "cache"),
        "TMPDIR": str(place / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare to make mounts of one's own with")
    as_root = [] if os.getuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        [
            *(unshare, "--mount", *as_root, sys.executable, "-W", "ignore", "-c", _SHUT_IN),
            *(str(place), str(PACKAGE), str(place / "empty")),
        ],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "unshare failed" in done.stderr or done.stderr.startswith("77 "):
        pytest.skip(f"mounts cannot be made here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "place": place, "before": before, "stderr": done.stderr}


def test_a_read_only_source_is_quantized_and_left_as_it_was(shut_in: dict[str, Any], expected: str) -> None:
    assert packed_bytes(shut_in["place"] / "out") == expected
    assert tree(shut_in["place"] / "source") == shut_in["before"][0]


def test_a_read_only_package_directory(shut_in: dict[str, Any]) -> None:
    assert shut_in["finite"] and shut_in["problems"] == []
    assert tree(PACKAGE) == shut_in["before"][1]


def test_no_home_directory(shut_in: dict[str, Any]) -> None:
    """Nothing is called `~` in the working directory either."""
    assert shut_in["work"] == [] and list((shut_in["place"] / "work").iterdir()) == []


def test_no_cache_and_no_temporary_directory_that_can_be_written(shut_in: dict[str, Any]) -> None:
    assert list((shut_in["place"] / "cache").iterdir()) == []


def test_the_run_asks_for_no_network_address(shut_in: dict[str, Any]) -> None:
    """The run ends at the first socket that asks for an address."""
    assert "network" not in shut_in["stderr"]


@pytest.mark.parametrize(
    "ask", [lambda: quantkit.load("~/model"), lambda: quantkit.quantize("~/model", "out")]
)
def test_a_path_in_a_home_directory_that_there_is_not(
    ask: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    with pytest.raises(quantkit.QuantkitError, match="home directory"):
        ask()
