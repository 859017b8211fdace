"""`--help` of every verb, what a shell completes, the starters, and the README's list."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from runtime.clusters import written

from pdctl.cli.app import application, main
from pdctl.cli.init import starter_names
from pdctl.cli.manual import MANUAL
from pdctl.cli.verbs import ROWS, VERBS

ROOT = Path(__file__).parents[2]
PDCTL = Path(sys.executable).with_name("pdctl")


def command(verb: str) -> Any:
    return typer.main.get_command(application([verb])).commands[verb]  # type: ignore[attr-defined]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one command line in this process; (exit code, stdout, stderr)."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def command_line(*words: object) -> tuple[object, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return ended.value.code, *capsys.readouterr()

    return command_line


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_says_everything(verb: str) -> None:
    """A paragraph, every parameter with its meaning (and unit, where it is a number), exit
    codes, and two examples that the very command accepts."""
    found = command(verb)
    assert found.help
    for parameter in found.params:
        said = getattr(parameter, "help", None)
        assert said, f"{parameter.name} has no help"
        if "timeout" in parameter.name:
            assert "Seconds" in said
    manual = MANUAL[verb]
    assert 0 in manual.exits
    assert 2 in manual.exits
    assert len(manual.examples) >= 2
    for example in manual.examples:
        name, *words = shlex.split(example)
        assert name == verb
        found.make_context(name, words)


def test_the_help_shows_exit_codes_and_examples(run: Any) -> None:
    _, text, _ = run("drain", "--help")
    assert re.search(r"Exit codes\s+• 0 nothing runs on it any more", text)
    assert "pdctl drain studio p0 --undo" in text


def test_every_verb_has_its_manual() -> None:
    assert set(MANUAL) == {row.name for row in ROWS}


def test_the_readme_lists_the_commands_of_the_help(run: Any) -> None:
    """The same lines in the same order, so that neither can change alone."""
    rows = re.findall(r"^│ ([a-z-]+) {2,}(\S.*?) *│$", run("--help")[1], re.MULTILINE)
    helped = [(name, text) for name, text in rows if name in VERBS]
    assert len(helped) == len(VERBS)
    readme = (ROOT / "README.md").read_text()
    block = readme.split("<!-- commands -->")[1]
    listed = re.findall(r"^    pdctl ([a-z-]+) {2,}(\S.*)$", block, re.MULTILINE)
    assert [(name, text.replace("`", "")) for name, text in listed] == helped


@pytest.fixture
def completed(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What bash would offer at the end of a line, by the protocol of its script."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "xdg"))
    monkeypatch.setenv("_PDCTL_COMPLETE", "complete_bash")

    def offered(line: str) -> list[str]:
        at = len(line.split()) - (0 if line.endswith(" ") else 1)
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(at))
        _, out, err = run()
        assert err == ""
        return str(out).split()

    return offered


@pytest.fixture
def folder(run: Any, tmp_path: Path) -> Path:
    """With a topology file, another file, and a cluster that was launched here."""
    run("init", tmp_path / "studio.toml", "--from", "mlx-2p2d")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "xdg").mkdir()
    with written(tmp_path, name="lab", roles={"a0": "prefill", "b0": "decode"}):
        (tmp_path / "state").rename(tmp_path / "xdg" / "pdctl")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pdctl dr", ["drain"]),
        ("pdctl drain l", ["lab"]),
        ("pdctl drain s", ["studio.toml"]),
        ("pdctl drain n", []),
        ("pdctl drain lab ", ["a0", "b0"]),
        ("pdctl drain studio.toml ", ["p0", "p1", "d0", "d1", "o0"]),
        ("pdctl drain studio.toml d", ["d0", "d1"]),
        ("pdctl restart lab ", ["a0", "b0", "router"]),
        ("pdctl logs lab a0 ", ["b0", "router"]),
        ("pdctl up s", ["studio.toml"]),
        ("pdctl up l", []),
        ("pdctl drain absent.toml ", []),
        ("pdctl init x.toml --from mlx-2", ["mlx-2p2d"]),
        ("pdctl drain lab a0 --un", ["--undo"]),
    ],
)
def test_a_shell_is_offered_names(completed: Any, line: str, offered: list[str]) -> None:
    """Clusters that run here and TOML files; replicas of the cluster or file before it."""
    assert completed(line) == offered


def test_a_broken_file_completes_to_nothing(completed: Any, folder: Path) -> None:
    """And prints nothing: it would land in the user's command line."""
    (folder / "studio.toml").write_text("name = [")
    assert completed("pdctl drain studio.toml ") == []


def test_the_shells_own_script_reaches_it(folder: Path) -> None:
    """bash itself, with the script that `--show-completion` prints, offers the replicas."""
    script = f"""
PATH={PDCTL.parent}:$PATH
eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 pdctl --show-completion bash)"
COMP_WORDS=(pdctl drain studio.toml d) COMP_CWORD=3
_pdctl_completion pdctl d studio.toml
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["d0", "d1"]


@pytest.mark.parametrize("name", starter_names())
def test_a_starter_is_valid_as_it_is(name: str, run: Any, tmp_path: Path) -> None:
    """`init --from NAME`, then `validate --offline`: exit 0 and not a word of complaint."""
    path = tmp_path / f"{name}.toml"
    assert run("init", path, "--from", name)[:2] == (0, f"wrote {path}\n")
    code, out, err = run("validate", path, "--offline")
    assert (code, err) == (0, "")
    assert out.startswith(f"{path} is valid")


def test_an_unknown_starter_is_refused_with_the_known_ones(run: Any, tmp_path: Path) -> None:
    """Exit 2; the list is the packaged folder."""
    code, _, err = run("init", tmp_path / "x.toml", "--from", "tpu")
    assert code == 2
    assert {"mlx-to-mlx", "mlx-2p2d", "mlx-two-hosts", "vllm-to-mlx"} <= set(starter_names())
    assert all(name in err for name in starter_names())
    assert not (tmp_path / "x.toml").exists()
