"""HTML and SVG as text, escaped by construction."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is markup already. Every other string is escaped where it is put in."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Html:
    """One element. `class_` is `class`, `stroke_width` is `stroke-width`; children that are no
    Html, and all attributes, are text from outside."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{words}>{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """Children side by side, without an element around them."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(child, quote=False) for child in children
        )
    )
