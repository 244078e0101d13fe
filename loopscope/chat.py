"""Chat templates: a program in Jinja's language that came with a checkpoint, so it runs in Jinja's sandbox.

Found and run as transformers does it (transformers.utils.chat_template_utils), so that a template gives the same text here:
blocks trimmed, `{% break %}` and `{% continue %}`, `{% generation %}` (which marks and changes nothing), raise_exception,
strftime_now, and a tojson that leaves letters as they are. The sandbox has no attribute that begins with an underscore and
nothing that changes what it was given; here messages are plain JSON data besides, repetition and results beyond OUTPUT
characters are refused, and the process may take no more than MEMORY meanwhile. It cannot reach anything of ours; it can still be slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from loopscope.errors import CheckpointError, PromptError

TEMPLATE = 2**20  # characters of a template
OUTPUT = 2**24  # characters of a conversation
MEMORY = 2**30  # bytes that running a template may take


def templates_of(jinja: str | None, chat_json: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, "default" first: of chat_template.jinja, chat_template.json and tokenizer_config.json, in this order.

    Raises CheckpointError for a chat_template that is neither text nor a list of named texts.
    """
    found: dict[str, str] = {}
    for value in (settings.get("chat_template"), chat_json.get("chat_template"), jinja):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list) and all(isinstance(v, Mapping) and isinstance(v.get("name"), str)
                                             and isinstance(v.get("template"), str) for v in value):
            found |= {v["name"]: v["template"] for v in value}
        elif value is not None:
            raise CheckpointError("chat_template of the tokenizer's files should be text, or a list of objects with name and template, "
                                  f"found {type(value).__name__}")
    return dict(sorted(found.items(), key=lambda item: item[0] != "default"))


def render(template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
    """The conversation as text. Raises PromptError where messages are no list of role and content, or the template fails."""
    import jinja2

    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages \
            or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise PromptError("messages are a list of objects with role and content, such as [{'role': 'user', 'content': 'Hello'}], got "
                          f"{repr(messages)[:80]}")
    if len(template) > TEMPLATE:
        raise PromptError(f"the chat template has {len(template):,} characters; at most {TEMPLATE:,} are run")
    try:
        plain = json.loads(json.dumps([dict(m) for m in messages]))  # data only: nothing of ours is reachable through it
    except (TypeError, ValueError) as error:
        raise PromptError(f"messages must be plain data (text, numbers, lists, objects): {error}") from error
    given = {"tools": None, "documents": None, **variables, "messages": plain, "add_generation_prompt": add_generation_prompt}
    said, size = [], 0
    try:
        with _bounded_memory():
            for piece in _compiled(template).generate(given):
                size += len(piece)
                if size > OUTPUT:
                    raise PromptError(f"the chat template writes more than {OUTPUT:,} characters")
                said.append(piece)
    except PromptError:
        raise
    except jinja2.exceptions.SecurityError as error:
        raise PromptError(f"the chat template of this checkpoint is not safe to run: {error}") from error
    except jinja2.exceptions.TemplateError as error:
        raise PromptError(f"the chat template refuses this conversation, or is broken: {error}") from error
    except MemoryError as error:
        raise PromptError(f"the chat template asks for more than {MEMORY / 2**30:g} GiB of memory; it is not one to run") from error
    except Exception as error:  # what a template computes can fail in any way
        raise PromptError(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from error
    return "".join(said)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let the process take at most MEMORY more for the time of a template: there are too many ways to make a long text to guard each.

    Only where the system has such a limit (Linux); elsewhere repetition alone is guarded.
    """
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MEMORY if before[1] == resource.RLIM_INFINITY else min(used + MEMORY, before[1])
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@lru_cache(maxsize=8)
def _compiled(template: str):
    import jinja2.ext
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: what an assistant says, marked for training."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context, operator, left, right):
            sizes = [len(x) if isinstance(x, (str, list, tuple)) else x for x in (left, right)]
            if operator == "*" and any(isinstance(x, (str, list, tuple)) for x in (left, right)) and abs(sizes[0] * sizes[1]) > OUTPUT:
                raise SecurityError(f"a repetition of more than {OUTPUT:,} characters")
            if operator == "**" and abs(right) > 1024:
                raise SecurityError(f"a power of {right}")
            if operator == "%" and isinstance(left, str):
                raise SecurityError("text formatting with %")
            return super().call_binop(context, operator, left, right)

    class Names(jinja2.utils.Namespace):
        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace attribute that begins with an underscore, {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    env.globals["namespace"] = Names
    env.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # not the class, with all that hangs on it
    for name in ("lipsum", "cycler", "joiner"):  # no template needs them
        env.globals.pop(name, None)
    return env.from_string(template)
