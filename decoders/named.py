"""Decoders by name: the labels that tables carry, and the short names of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.draft_then_verify import DraftThenVerify
from decoders.decoder import Decoder
from decoders.wavefront import Wavefront
from loopscope.errors import SettingError, closest

# short name -> (constructor, defaults, one line for help texts)
DECODERS: dict[str, tuple[Callable[..., Decoder], dict, str]] = {
    "ar": (Autoregressive, {}, "autoregressive: all T recurrences for each token; the reference"),
    "dtv": (DraftThenVerify, {"draft_depth": 1, "block": 8},
            "draft-then-verify: draft a block of tokens with a few recurrences each, then check the block at full depth"),
    "wfd": (Wavefront, {"draft_depth": 1},
            "wavefront: consecutive tokens run at once, each a few recurrences behind the one before it"),
    "das-wave": (DASWave, {"rounds": 12, "updates": 1},
                 "DAS-wave: refine a whole block of guesses together over some rounds, then check it at full depth"),
}
_ALIASES = {"autoregressive": "ar", "draft-then-verify": "dtv", "mature-spec": "dtv", "wavefront": "wfd", "das_wave": "das-wave",
            "daswave": "das-wave", "das": "das-wave"}
_SETTINGS = {"d": "draft_depth", "K": "block", "J": "rounds", "k": "updates", "gamma": "capacity", "W": "initial_width"}
_CARRY = {"on": True, "off": False}


def decoder(name: str, **settings) -> Decoder:
    """A decoder by short name ("wfd", with settings or its defaults) or by label ("DtV d=1 K=8 deep_kv").

    Settings that are None count as not given. Raises SettingError for an unknown name or setting.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    words = name.strip().split()
    key = words[0].lower() if words else ""
    key = _ALIASES.get(key, key)
    if key not in DECODERS:
        near = closest(key, DECODERS)
        raise SettingError(f"decoder {name!r} is unknown; use one of {', '.join(DECODERS)}" + (f" (did you mean {near}?)" if near else ""))
    build, defaults, _ = DECODERS[key]
    settings = _read_label(name, words[1:]) | settings
    try:
        return build(**(defaults | settings))
    except TypeError as error:
        allowed = ", ".join(defaults) or "no settings"
        raise SettingError(f"decoder {key!r} does not take {', '.join(sorted(settings))}; it takes {allowed}") from error


def _read_label(name: str, words: list[str]) -> dict:
    settings: dict = {}
    for word in words:
        match = re.fullmatch(r"(\w+)=(\w+)", word)
        if match and match[1] == "carry" and match[2] in _CARRY:
            settings["carry"] = _CARRY[match[2]]
        elif match and match[1] in _SETTINGS and re.fullmatch("[0-9]{1,9}", match[2]):
            settings[_SETTINGS[match[1]]] = int(match[2])
        elif match is None and word.isidentifier():
            settings["read"] = word
        else:
            raise SettingError(f"{word!r} in decoder {name!r} is not a setting; labels read like 'WFD d=1' or 'DtV d=1 K=8 deep_kv'")
    return settings
