"""What the checks of a GPU box found, and whether that is well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_answers import Comparison, Owns, bound_of
from gpu_report import grid

Verdicts = dict[str, tuple[bool, str]]
"""By pair and step: whether all is well, and in few words what was seen."""


class Found:
    def __init__(self) -> None:
        self.owns: list[Owns] = []
        self.texts: list[Comparison] = []
        self.bytes: dict[str, list[str]] = {}
        """By pair: what was not moved as it must be."""
        self.bits: list[dict[str, Any]] = []
        self.leavers: dict[str, dict[str, Any]] = {}
        self.killed: dict[str, Any] = {}
        self.held: dict[str, dict[str, int]] = {}
        """By pair: what requests hold that have ended."""

    @property
    def bound_nats(self) -> float:
        return bound_of(self.owns)

    def verdicts(self) -> Verdicts:
        found: Verdicts = {}
        for path in dict.fromkeys(each.path for each in self.texts):
            found[f"{path}, text"] = self._said([c for c in self.texts if c.path == path])
        for path, wrong in self.bytes.items():
            found[f"{path}, bytes"] = not wrong, wrong[0] if wrong else "as due"
        found |= self._of_bits()
        found |= {f"{path}, leavers": self._left(each) for path, each in self.leavers.items()}
        if self.killed:
            answers, back_s = self.killed["answers"], self.killed["back_s"]
            whole = all(each == "whole" for each in answers.values())
            good = whole and back_s is not None and self.killed["decode_lives"]
            seen = f"back after {back_s} s; answers {answers}; one more {self.killed['meanwhile']}"
            found["prefill killed"] = good, seen
        for path, held in self.held.items():
            found[f"{path}, at the end"] = False, f"held {held}"
        return found

    def written(self) -> dict[str, Any]:
        return {
            "bound_nats": self.bound_nats,
            "verdicts": {
                name: {"good": good, "seen": seen} for name, (good, seen) in self.verdicts().items()
            },
            "texts": [each._asdict() for each in self.texts],
            "bytes": self.bytes,
            "bits": self.bits,
            "leavers": {
                path: {**given, "compared": [each._asdict() for each in given["compared"]]}
                for path, given in self.leavers.items()
            },
            "killed": self.killed,
            "held": self.held,
        }

    def table(self, shape: str) -> list[str]:
        title = f"{shape} shape; differences of text may be led by {self.bound_nats} nats."
        rows = {
            name: ["yes" if good else "NO", seen.replace("|", "/")]
            for name, (good, seen) in self.verdicts().items()
        }
        made = [*self.texts, *(c for each in self.leavers.values() for c in each["compared"])]
        parted = [
            f"- {c.path}, {c.tokens} tokens, {c.way}: {c.own!r} → {c.text!r}, {c.lead_nats} nats"
            for c in made
            if c.lead_nats
        ]
        return [title, "", *grid("what", ["good", "seen"], rows), "", *parted]

    # -- inside

    def _said(self, made: Sequence[Comparison]) -> tuple[bool, str]:
        bound = self.bound_nats
        wrong = [each for each in made if not each.holds(bound)]
        failed = [each for each in made if each.error]
        parted = [each for each in made if each.lead_nats and not each.error]
        seen = f"{len(made) - len(parted) - len(failed)} of {len(made)} equal"
        if parted:
            seen += f", leads to {max(each.lead_nats for each in parted):.4f} nats"
        if failed:
            first = failed[0]
            seen += f"; {len(failed)} failed: {first.tokens} tokens, {first.way}: {first.error}"
        return bool(made) and not wrong, seen

    def _of_bits(self) -> Verdicts:
        found: Verdicts = {}
        for path in dict.fromkeys(each["path"] for each in self.bits):
            mine = [each for each in self.bits if each["path"] == path]
            wrong = [
                f"{each['tokens']} tokens: {each['wrong'][0]}" for each in mine if each["wrong"]
            ]
            seen = f"{len(mine) - len(wrong)} of {len(mine)} equal, and nothing else touched"
            found[f"{path}, bits"] = not wrong, "; ".join([seen, *wrong[:1]])
        return found

    def _left(self, given: dict[str, Any]) -> tuple[bool, str]:
        good, text = self._said(given["compared"])
        well = not given["held"] and not given["handoffs_failed"] and given["same_processes"]
        held = given["held"] or "nothing"
        seen = f"{given['left_early']} of {given['requests']} left early; {text}; held {held}"
        return good and well, f"{seen}; {given['handoffs_failed']} handoffs failed"
