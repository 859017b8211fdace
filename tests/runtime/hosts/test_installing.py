"""What a hint says that brings pdctl into another interpreter."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

import pdctl
from pdctl import __version__
from pdctl.runtime.hosts.installing import install, origin

ROOT = Path(__file__).parents[3]


def installed(monkeypatch: pytest.MonkeyPatch, place: Path, url: str | None) -> None:
    """As if pdctl lay in an environment, with what pip wrote down about where it came from."""
    monkeypatch.setattr(pdctl, "__file__", str(place / "lib" / "pdctl" / "__init__.py"))
    folder = place / "pdctl.dist-info"
    folder.mkdir()
    if url is not None:
        (folder / "direct_url.json").write_text(f'{{"url": "{url}", "archive_info": {{}}}}')
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(folder))


def test_a_checkout_is_installed_as_it_lies_there() -> None:
    """A path that pip takes, here and beside a copy of it."""
    assert origin() == ROOT
    assert install("/v/python", host=None) == f"/v/python -m pip install {ROOT}"
    assert install("/v/python", host="gpu1", extra="mlx") == (
        f"copy {ROOT} to gpu1, and there: /v/python -m pip install './{ROOT.name}[mlx]'"
    )


def test_a_wheel_is_installed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where this one was installed from, as pip wrote it down."""
    wheel = tmp_path / "a b.whl"
    wheel.touch()
    installed(monkeypatch, tmp_path, wheel.as_uri())
    assert origin() == wheel
    assert install("python3", host=None) == f"python3 -m pip install '{wheel}'"


@pytest.mark.parametrize("url", [None, "file:///absent/pdctl.whl", "https://host/pdctl.whl"])
def test_no_source_is_made_up(
    url: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it came from is not known, or not here: the version is named, and no command."""
    installed(monkeypatch, tmp_path, url)
    assert origin() is None
    hint = install("python3", host="gpu1")
    assert hint == f"install pdctl {__version__} on gpu1, from what this one was installed from"


def test_an_engines_own_packages_are_left_alone() -> None:
    """In an engine's environment pdctl's command-line dependencies are not installed."""
    assert install("/v/python", host=None, alone=True) == (
        "/v/python -m pip install msgspec numpy xxhash && "
        f"/v/python -m pip install --no-deps {ROOT}"
    )
