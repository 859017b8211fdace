"""The guide: its links lead somewhere, and what it lists is what the code has."""

from __future__ import annotations

import ast
import enum
import re
import textwrap
import typing
from pathlib import Path

import msgspec
import pytest
from cases import read_cases

from pdctl import errors
from pdctl.errors import HANDOFF_CAUSES, HandoffError, PdctlError
from pdctl.runtime.router.advice import HINTS
from pdctl.runtime.router.failure import ENGINE_ERROR
from pdctl.topology import grammar, model
from pdctl.topology.load import load
from pdctl.topology.model import Replica

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TOPOLOGY = (ROOT / "docs" / "topology.md").read_text()
TABLES: dict[str, tuple[grammar.Table, type[msgspec.Struct]]] = {
    "": (grammar.TOP, model.Topology),
    "[model]": (grammar.MODEL, model.Model),
    "[handoff]": (grammar.HANDOFF, model.Handoff),
    "[sharing]": (grammar.SHARING, model.Sharing),
    "[router]": (grammar.ROUTER, model.Router),
    "[hosts.NAME]": (grammar.HOST, model.Host),
    "[[replicas]]": (grammar.REPLICA, model.Replica),
}
ERRORS = (ROOT / "docs" / "errors.md").read_text()
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROUTER = ROOT / "pdctl" / "runtime" / "router"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """Of errors.md."""
    return ERRORS.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `?([\w ]+?)`? \|", text, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def codes() -> set[str]:
    """Every one that the router's source gives to a failure, and a refusal's default."""
    found = {"invalid_value", ENGINE_ERROR}
    for path in ROUTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code":
                found |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
                found |= {
                    one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)
                }
    return {code for code in found if isinstance(code, str)}


def statuses() -> set[int]:
    """Every number in the router's source that is an error's status."""
    numbers = {
        node.value
        for path in ROUTER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int
    }
    return numbers & set(range(400, 600))


def keys_of_the_page() -> dict[str, dict[str, str]]:
    """Table of a topology file → key → its row in topology.md."""
    rows = TOPOLOGY.partition("| key | left away | |\n|---|---|---|\n")[2].partition("\n\n")[0]
    found: dict[str, dict[str, str]] = {"": {}}
    for row in rows.splitlines():
        first = row.split(" | ")[0]
        named = re.findall(r"`([^`]+)`", first)
        if "**" in first:
            found[named[0]] = {}
        else:
            found[list(found)[-1]] |= dict.fromkeys(named, row)
    return found


def topologies() -> list[str]:
    """Every whole one in the guide's pages."""
    blocks = (re.findall(r"^ *```toml\n(.*?)^ *```$", p.read_text(), re.M | re.S) for p in PAGES)
    return [block for found in blocks for block in found if "schema =" in block]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file that is there, every anchor a heading of it."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_of_the_guide_is_linked_from_the_readme() -> None:
    """Nobody has to guess what is in docs/."""
    linked = {Path(target).name for target in LINK.findall((ROOT / "README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").iterdir()} <= linked


def test_the_guide_has_every_exit_code() -> None:
    """Those of errors.py, and 0."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PdctlError)
    ]
    listed = [int(code) for code in first_cells(section("Exit codes")) if code.isdigit()]
    assert sorted(listed) == sorted({0} | {kind.exit_code for kind in kinds})


def test_the_guide_has_every_cause_of_a_handoff() -> None:
    """Each once, and no other; every class below HandoffError has one of its own."""
    listed = first_cells(section("Causes of a failed handoff"))[1:]
    assert sorted(listed) == sorted(HANDOFF_CAUSES)
    assert {kind.cause for kind in HandoffError.__subclasses__()} < set(listed)


def test_the_guide_has_every_code_of_the_router() -> None:
    """Each once, and no other; whatever `/status` has a hint for is among them."""
    listed = first_cells(section("Causes that the router names"))[1:]
    assert sorted(listed) == sorted(codes() - set(HANDOFF_CAUSES))
    assert set(HINTS) <= set(listed) | set(HANDOFF_CAUSES)


def test_the_guide_has_every_status_of_the_router() -> None:
    """What it answers itself; an engine's own 4xx passes."""
    listed = {int(cell) for cell in first_cells(section("HTTP statuses")) if cell.isdigit()}
    assert statuses() <= listed


def test_the_guide_has_every_symptom_that_users_report() -> None:
    """Each numbered case of the public trackers has one row, with what to do."""
    rows = re.findall(r"^\| \*\*(U\d+)\*\* \"[^|]+\" \| [^|]+ \| [^|]+ \|$", TROUBLE, re.MULTILINE)
    assert sorted(rows) == sorted(n for n in read_cases() if n.startswith("U"))


@pytest.mark.parametrize(
    "text", topologies(), ids=lambda text: re.findall(r"name = \"(\S+)\"", text)[0]
)
def test_a_topology_of_the_guide_is_valid(text: str, tmp_path: Path) -> None:
    """As it stands there, but for what lies on somebody's hosts."""
    file = tmp_path / "guide.toml"
    file.write_text(textwrap.dedent(text))
    topology, found = load(file)
    assert found == []
    assert topology is not None


def test_the_guide_has_every_key_of_a_topology() -> None:
    """Each in its table, and no other; what a table is read into has the same."""
    page = keys_of_the_page()
    assert list(page) == list(TABLES)
    for table, (known, struct) in TABLES.items():
        listed = set(page[table])
        if table == "":
            listed |= {re.findall(r"\w+", name)[0] for name in page if name}
        assert listed == set(known), table
        assert set(struct.__struct_fields__) - {"name"} == set(known) - {"name"}, table


def test_the_guide_has_every_value_of_a_choice() -> None:
    """In the row of its key."""
    for table, (_, struct) in TABLES.items():
        for field in msgspec.structs.fields(struct):
            kinds = {field.type, *typing.get_args(field.type)}
            for kind in (k for k in kinds if isinstance(k, type) and issubclass(k, enum.Enum)):
                row = keys_of_the_page()[table][field.name]
                assert [v.value for v in kind if f'"{v.value}"' not in row] == [], field.name


def test_the_guide_names_every_port_of_a_plan() -> None:
    """U30: whatever a cluster may listen on, in the table of who may connect."""
    table = (ROOT / "docs" / "ports-and-security.md").read_text().partition("## What must")[0]
    fields = {field for field in Replica.__struct_fields__ if field.endswith("_port")}
    for name in (fields - {"side_port"}) | {"router.bind", "agent", "`ssh`"}:
        assert name in table


def test_the_guide_has_every_mark_of_a_bench() -> None:
    """What makes a cell doubtful, in the table that says how to read one."""
    source = (ROOT / "pdctl" / "runtime" / "bench" / "marks.py").read_text()
    guide = (ROOT / "docs" / "choosing-roles.md").read_text().partition("| mark |")[2]
    table = guide.partition("\n\n")[0]
    assert sorted(first_cells(table)) == sorted(set(re.findall(r'kind="(\w+)"', source)))
