"""What a sweep that goes on says of the run before it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from runtime.bench.bench_points import RUN, good

from pdctl.errors import UsageError
from pdctl.runtime.bench.folder import save_points
from pdctl.runtime.bench.resume import earlier
from pdctl.runtime.bench.settings import Settings

SETTINGS = Settings(input_lens=(66,), output_len=3, concurrency=(1,), num_prompts=2, num_warmups=0)


@pytest.mark.parametrize(
    ("was", "asked", "words"),
    [
        ({"goodput": ""}, {"goodput": "ttft:400"}, "goodput was nothing, not ttft:400"),
        ({"num_warmups": 2}, {"num_warmups": 0}, "num_warmups was 2, not 0"),
        ({"topology": "x"}, {"topology": "y"}, "topology differs"),
    ],
)
def test_what_differs_is_said_in_words(
    was: dict[str, object], asked: dict[str, object], words: str, tmp_path: Path
) -> None:
    """Also what was not asked for then, or is not now."""
    save_points(tmp_path, RUN, [msgspec.structs.replace(p, pd_setting=was) for p in good()])
    with pytest.raises(UsageError) as caught:
        earlier(tmp_path, asked, SETTINGS, ("d0", "p0>d0"))
    assert caught.value.message.endswith(words)
