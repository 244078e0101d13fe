"""What all fuzz tests share: only our own errors, and mutations of bytes and of JSON."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from loopscope.errors import LoopscopeError

# Drawn the same each time: a finding belongs into the explicit examples, not into one run of many.
FAST = {"deadline": None, "derandomize": True, "database": None, "phases": (Phase.explicit, Phase.generate),
        "suppress_health_check": list(HealthCheck)}
JUNK = (None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "0", "x",
        "\0", "../../etc/passwd", "é\u202e", "\ud800", "default", "yarn", [], [0], [None], ["full_attention"], [[]], {}, {"a": 1},
        {"rope_type": "linear"}, {"rope_type": "llama3", "factor": -1}, {"type": None})


def drawn(n: int) -> settings:
    """Settings of a fuzz test with n inputs."""
    return settings(max_examples=n, **FAST)


def ours(call: Callable[[], Any]) -> Any:
    """What `call` returns, or its LoopscopeError, which must say something; anything else it raises is a finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except LoopscopeError as error:
            assert len(str(error)) > 10, "an error that says nothing"
            return error


def spoiled_json(value: Any, seed: int, keys: tuple[str, ...] = (), times: int = 3) -> Any:
    """A copy with one to `times` places changed: removed, renamed, replaced by junk or by another place's value. keys: the places
    to prefer, where a mapping has them."""
    draw, value = random.Random(seed), copy.deepcopy(value)
    for _ in range(draw.randint(1, times)):
        where = value
        while isinstance(where, (dict, list)) and where:
            inner = [k for k, v in (where.items() if isinstance(where, dict) else enumerate(where)) if isinstance(v, (dict, list)) and v]
            if inner and draw.random() < 0.5:
                where = where[draw.choice(inner)]
                continue
            break
        if isinstance(where, list) and where:
            at = draw.randrange(len(where))
            where[at] = copy.deepcopy(draw.choice(JUNK) if draw.random() < 0.7 else where[draw.randrange(len(where))])
        elif isinstance(where, dict):
            preferred = [key for key in keys if key in where]
            key = draw.choice(preferred) if preferred and draw.random() < 0.9 else draw.choice([*where, "unheard_of"])
            kind = draw.random()
            if kind < 0.15:
                where.pop(key, None)
            elif kind < 0.3:
                where[key] = copy.deepcopy(where.get(draw.choice([*where, key])))
            else:
                where[key] = copy.deepcopy(draw.choice(JUNK))
        else:
            value = copy.deepcopy(draw.choice(JUNK))
    return value


def spoiled_bytes(raw: bytes, seed: int) -> bytes:
    """A copy that was cut, or has bytes changed, doubled, dropped or put in."""
    draw, out = random.Random(seed), bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        if not out:
            break
        at, kind = draw.randrange(len(out)), draw.random()
        if kind < 0.45:
            out[at] = draw.randrange(256)
        elif kind < 0.6:
            out[at] ^= 1 << draw.randrange(8)
        elif kind < 0.7:
            del out[at : at + draw.randint(1, 9)]
        elif kind < 0.8:
            out[at:at] = bytes(draw.choices(b'\x00\xff{}[]",:0x', k=draw.randint(1, 9)))
        elif kind < 0.9:
            out[at:at] = out[at : at + draw.randint(1, 40)]
        else:
            del out[at:]
    return bytes(out)
