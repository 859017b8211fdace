"""xoscar, imported without two libraries that it takes along.

It can send pandas' frames and SciPy's matrices, which pdctl never does; to import them is most of
what a short command, or an agent, would wait for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

__all__ = ["xoscar"]


class _Later(ModuleType):
    """Stands for the module of its name, and imports it when something of it is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _imported_as(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """In the block, these stand for modules that are not imported yet; with None, an import
    raises ImportError."""
    added = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(added)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


with _imported_as(
    {"pandas": _Later("pandas"), "pandas.core.internals": None, "scipy.sparse": None}
):
    import xoscar
