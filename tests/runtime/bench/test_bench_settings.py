from __future__ import annotations

import pytest

from pdctl.errors import UsageError
from pdctl.runtime.bench.settings import Settings, check, default_input_lens, whole_numbers
from pdctl.runtime.bench.target import router_url


def test_a_list_keeps_its_order_and_may_have_spaces() -> None:
    assert whole_numbers("51, 184,2844", "--input-lens") == (51, 184, 2844)


@pytest.mark.parametrize("text", ["", "51,", "51,x", "-1", "1.5", "5 1", "²", "51;65", "9" * 12])
def test_a_bad_list_is_refused_with_the_option_named(text: str) -> None:
    with pytest.raises(UsageError, match="--input-lens") as caught:
        whole_numbers(text, "--input-lens")
    assert caught.value.exit_code == 2


def test_a_number_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        whole_numbers("51,51", "--concurrency")


def test_default_lengths_fit_the_context() -> None:
    assert default_input_lens(8192, 32) == (51, 184, 744, 2844)
    assert default_input_lens(2048, 32) == (51, 184, 744)
    with pytest.raises(UsageError, match="--input-lens 51 with --output-len 32"):
        check(Settings(input_lens=default_input_lens(64, 32)), context_length=64)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (Settings(input_lens=(51, 1000)), "--input-lens 1000 with --output-len 32"),
        (Settings(input_lens=(1,)), "--input-lens 1 is too short"),
        (Settings(input_lens=(51,), output_len=0), "--output-len"),
        (Settings(input_lens=(51,), num_prompts=0), "--num-prompts"),
        (Settings(input_lens=(51,), num_warmups=-1), "--num-warmups"),
        (Settings(input_lens=(51,), concurrency=(1, 0)), "--concurrency"),
    ],
)
def test_what_cannot_run_is_refused_by_name(settings: Settings, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        check(settings, context_length=1024)


def test_the_longest_prompt_that_fits_is_accepted() -> None:
    check(Settings(input_lens=(992,), output_len=32), context_length=1024)


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("[::]:8000", "http://[::1]:8000"),
        ("[::1]:80", "http://[::1]:80"),
        ("gpu1:8000", "http://gpu1:8000"),
    ],
)
def test_a_router_bound_everywhere_is_reached_on_loopback(bind: str, url: str) -> None:
    assert router_url(bind) == url
