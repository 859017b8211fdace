"""The token ids of a request's prompt, as its engines will compute it: through the template.

Keys of un-templated text meet no page that an engine holds (U24). What is read here only steers:
where a template, a message or a token is not understood, the engine is the one to say so.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pdctl.errors import UsageError
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS
from pdctl.topology.checkpoint import read_json
from pdctl.topology.tokenizer import chat_templates

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Of tokenizer_config.json: names that a template may use."""


class PromptReader:
    """Reads prompts in a thread, one at a time; a checkpoint's tokenizer is loaded once.

    Args:
        model_dir: a checkpoint on this machine.

    Raises:
        UsageError: its tokenizer or its template can't be read.
    """

    def __init__(self, model_dir: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer((model_dir / "tokenizer.json").read_bytes())
            templates, _ = chat_templates(model_dir)
            config = read_json(model_dir / "tokenizer_config.json")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the tokenizer of {model_dir}: {error}",
                hint="keep the whole checkpoint on the router's host, or take another policy",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = templates
        self._tokens = {name: _content(config.get(name)) for name in TOKENS}
        self._environment = _environment()
        self._turn = anyio.CapacityLimiter(1)

    async def read(self, endpoint: str, body: dict[str, Any]) -> list[int] | None:
        """The prompt's token ids; None where they can't be told. `body` is a checked one."""
        return await anyio.to_thread.run_sync(self.tokens, endpoint, body, limiter=self._turn)

    def tokens(self, endpoint: str, body: dict[str, Any]) -> list[int] | None:
        """As `read`; blocks while it encodes, some 2 ms for 1,000 tokens."""
        if endpoint != CHAT_COMPLETIONS:
            prompt = body["prompt"]
            return self._encoded(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        text = self._rendered(body)
        return None if text is None else self._encoded(text, special=False)

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        # `encode` would keep the interpreter, and with it every stream of the router, meanwhile
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(found.ids)

    def _rendered(self, body: dict[str, Any]) -> str | None:
        tools = body.get("tools")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            return None
        variables = {
            **self._tokens,
            "messages": [_flat(message) for message in body["messages"]],
            "tools": tools or None,
            "add_generation_prompt": body.get("add_generation_prompt", True),
            **body.get("chat_template_kwargs", {}),
        }
        try:
            return self._environment.from_string(template).render(variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
            return None


def _environment() -> ImmutableSandboxedEnvironment:
    """With what chat templates rely on beside Jinja itself, as transformers gives it to them."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Parts of text as the one string that templates for text models take."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(str(part.get("text", "")) for part in content)}


def _content(token: Any) -> str | None:
    """A special token's text, which stands alone or in an object."""
    return token.get("content") if isinstance(token, dict) else token
