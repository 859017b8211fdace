"""Why two replicas may not exchange KV: one diagnostic per field, naming what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pdctl.topology.contract import Contract, compare
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fingerprint import Fingerprint
from pdctl.topology.model import Role

_NAMED_PARTS = 3
_SHOWN_DIGITS = 12


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One replica with what it would serve."""

    replica: str
    role: Role
    host: str
    model_dir: str
    contract: Contract
    content: Fingerprint

    @property
    def described(self) -> str:
        kind = "ordinary" if self.role is Role.BOTH else str(self.role)
        return f'{kind} replica "{self.replica}"'


def compared_pairs(sides: Sequence[Side]) -> Iterator[tuple[Side, Side]]:
    """Who must agree: each prefill with each decode replica, and every ordinary replica with
    the first replica of the file, because all of them answer for one model."""
    for left in sides:
        for right in sides:
            if left.role is Role.PREFILL and right.role is Role.DECODE:
                yield left, right
    for right in sides[1:]:
        if Role.BOTH in (right.role, sides[0].role):
            yield sides[0], right


PLURAL = frozenset({"weights", "positions"})


def explain(left: Side, right: Side) -> list[Diagnostic]:
    """Every field in which `right` differs from `left`; empty when they may exchange KV."""
    found = []
    differing = {
        difference.field: difference for difference in compare(left.contract, right.contract)
    }
    for field, difference in differing.items():
        parts, hint = _parts(field, left, right)
        verb = "differ" if field in PLURAL else "differs"
        summary = f'replica "{right.replica}": {field} {verb} from {left.described}'
        found.append(
            Diagnostic(
                code=f"contract.{field}",
                summary=f"{summary} ({parts})" if parts else summary,
                detail=f'"{left.replica}": {_short(difference.left)}, '
                f'"{right.replica}": {_short(difference.right)}',
                replica=right.replica,
                field=field,
                hint=hint,
            )
        )
    if left.content.stored_dtype != right.content.stored_dtype:
        found.append(_stored_differently(left, right))
    return found


def _stored_differently(left: Side, right: Side) -> Diagnostic:
    """Copies in different dtypes: the weights differ, and this is why."""
    a, b = left.content.stored_dtype, right.content.stored_dtype
    return Diagnostic(
        code="contract.dtype",
        summary=f'replica "{right.replica}": dtype differs from {left.described} '
        f"(the checkpoint's tensors are {b}, there {a})",
        detail=f'"{left.replica}": {a}, "{right.replica}": {b}',
        replica=right.replica,
        field="dtype",
        hint=_copy("the weights", left, right),
    )


def _parts(field: str, left: Side, right: Side) -> tuple[str, str | None]:
    """(what within the field differs, the hint)."""
    if field == "weights":
        names = _differing(left.content.tensors, right.content.tensors)
        values = all(name.startswith("config.json:") for name in names)
        if values:
            return _listed(names, "value"), _copy("config.json", left, right)
        tensors = [name for name in names if not name.startswith("config.json:")]
        return _listed(tensors, "tensor"), _copy("the weights", left, right)
    if field == "tokenizer":
        names = _differing(left.content.files, right.content.files)
        lacking = [name for name in names if name not in right.content.files]
        extra = [name for name in names if name not in left.content.files]
        if names == extra:
            return _listed(names, None), f"remove {names[0]} from {_place(right)}"
        return _listed(names, None), _copy((lacking or names)[0], left, right)
    if field == "chat_template":
        name = left.content.template_file
        return name, _copy(name, left, right)
    if field in ("attention", "positions"):
        a = msgspec.to_builtins(getattr(left.contract, field))
        b = msgspec.to_builtins(getattr(right.contract, field))
        names = _differing(a, b)
        text = ", ".join(f"{name}: {a.get(name)} and {b.get(name)}" for name in names)
        return text, _copy("config.json", left, right)
    return "", None


def _differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[str]:
    return [n for n in sorted({*left, *right}) if left.get(n) != right.get(n)]


def _listed(names: Sequence[str], kind: str | None) -> str:
    shown = ", ".join(names[:_NAMED_PARTS])
    more = f" and {len(names) - _NAMED_PARTS} more" if len(names) > _NAMED_PARTS else ""
    word = f"{kind}{'s' if len(names) > 1 else ''} " if kind else ""
    return f"{word}{shown}{more}"


def _place(side: Side, name: str = "") -> str:
    path = f"{side.model_dir.rstrip('/')}/{name}" if name else side.model_dir
    return path if side.host == "local" else f"{side.host}:{path}"


def _copy(name: str, left: Side, right: Side) -> str:
    if name.startswith("the "):
        return f"copy {name} from {_place(left)} to {_place(right)}"
    return f"copy {name} from {_place(left, name)} to {_place(right, name)}"


def _short(value: str) -> str:
    is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
    return f"{value[:_SHOWN_DIGITS]}…" if is_digest else value


def explain_all(sides: Iterable[Side]) -> list[Diagnostic]:
    """`explain` for everybody who must agree."""
    return [d for left, right in compared_pairs(tuple(sides)) for d in explain(left, right)]
