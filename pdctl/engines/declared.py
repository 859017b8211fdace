"""What a checkpoint's configuration says, as transformers' configuration objects hold it."""

from __future__ import annotations

from typing import Any

from pdctl.topology.checkpoint import canonical_scaling


def declared_positions(config: Any) -> dict[str, Any]:
    """`Positions` as a dict, as vLLM's and SGLang's models read it (`rope_parameters`, into
    which transformers 5 also moves a top-level `rope_theta`)."""
    table = dict(getattr(config, "rope_parameters", None) or {})
    theta = table.get("rope_theta", getattr(config, "rope_theta", None))
    return {
        "rope_theta": None if theta is None else float(theta),
        "scaling": canonical_scaling(table),
        "max_positions": getattr(config, "max_position_embeddings", None),
    }


def known_positions(config: Any) -> dict[str, Any]:
    """The same without what the object does not say, as a probe answers."""
    known = declared_positions(config).items()
    return {name: value for name, value in known if value is not None or name == "scaling"}
