"""What validation found: every problem, in the shape that `validate --json` prints."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from pdctl.errors import ContractError, HostError, PdctlError, TopologyError

FORMAT_VERSION = "1.0"


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """One problem.

    `code` is stable and dotted; its first word decides the exit code: `topology.*` 2,
    `contract.*` 3, `host.*` 4.
    """

    severity: Severity = Severity.ERROR
    code: str
    summary: str
    """One sentence that names replica and field; what `error: …` prints."""
    detail: str | None = None
    replica: str | None = None
    field: str | None = None
    hint: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that one validation found. `valid` is "no errors"; warnings do not count."""

    format_version: str = FORMAT_VERSION
    valid: bool
    error_count: int
    warning_count: int
    diagnostics: tuple[Diagnostic, ...] = ()

    @classmethod
    def of(cls, diagnostics: Iterable[Diagnostic]) -> Report:
        """Counts and orders: errors first, otherwise as found; duplicates dropped."""
        found = tuple(dict.fromkeys(diagnostics))
        errors = tuple(d for d in found if d.severity is Severity.ERROR)
        warnings = tuple(d for d in found if d.severity is not Severity.ERROR)
        return cls(
            valid=not errors,
            error_count=len(errors),
            warning_count=len(warnings),
            diagnostics=errors + warnings,
        )

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self.diagnostics if d.severity is Severity.ERROR)

    @property
    def exit_code(self) -> int:
        """0, or the code of the most basic kind of error: file, then contract, then host."""
        if self.valid:
            return 0
        kinds = {d.code.split(".", 1)[0] for d in self.errors}
        order: tuple[tuple[str, type[PdctlError]], ...] = (
            ("topology", TopologyError),
            ("contract", ContractError),
            ("host", HostError),
        )
        for kind, error in order:
            if kind in kinds:
                return error.exit_code
        return PdctlError.exit_code
