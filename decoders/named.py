"""Decoders by name: the labels that tables carry, and the short names of the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from decoders.autoregressive import Autoregressive
from decoders.das_wave import DASWave
from decoders.decoder import Decoder
from decoders.draft_then_verify import DraftThenVerify
from decoders.loopspec import LoopSpec
from decoders.prompt_lookup import PromptLookup
from decoders.wavefront import Wavefront
from loopscope.errors import SettingError, closest

# short name -> (constructor, defaults where it has none, one line for help texts)
DECODERS: dict[str, tuple[Callable[..., Decoder], dict, str]] = {
    "ar": (Autoregressive, {}, "autoregressive: all T recurrences for each token; the reference"),
    "dtv": (DraftThenVerify, {"draft_depth": 1, "block": 8},
            "draft-then-verify: draft a block of tokens with a few recurrences each, then check the block at full depth"),
    "wfd": (Wavefront, {"draft_depth": 1},
            "wavefront: consecutive tokens run at once, each a few recurrences behind the one before it"),
    "loopspec": (LoopSpec, {"draft_depth": 1, "second_depth": 2},
                 "loopspec: a wavefront whose tokens may propose twice, on a tree of branches"),
    "das-wave": (DASWave, {"rounds": 12, "updates": 1},
                 "DAS-wave: refine a whole block of guesses together over some rounds, then check it at full depth"),
    "pld": (PromptLookup, {}, "prompt lookup: propose what followed the same tokens earlier in the text; needs no looped model"),
}
_ALIASES: dict[str, tuple[str, dict]] = {
    "autoregressive": ("ar", {}), "draft-then-verify": ("dtv", {}), "mature-spec": ("dtv", {"read": "deep_kv"}), "wavefront": ("wfd", {}),
    "das_wave": ("das-wave", {}), "daswave": ("das-wave", {}), "das": ("das-wave", {}), "prompt-lookup": ("pld", {}),
    "prompt_lookup": ("pld", {})}
# Words of labels: what they set, and how their value is written.
_WHOLE, _NUMBER, _SWITCH, _WORD = "[0-9]{1,9}", r"[0-9.e+-]{1,20}", "on|off", r"\S+"
_WORDS = {"d": ("draft_depth", _WHOLE), "d1": ("draft_depth", _WHOLE), "d2": ("second_depth", _WHOLE), "K": ("block", _WHOLE),
          "J": ("rounds", _WHOLE), "k": ("updates", _WHOLE), "gamma": ("capacity", _WHOLE), "W": ("initial_width", _WHOLE),
          "growth": ("growth", _WHOLE), "stable": ("stable", _WHOLE), "re": ("redraft", _WHOLE), "s": ("slots", _WHOLE),
          "lanes": ("lanes", _WHOLE), "n": ("ngram", _WHOLE), "gate": ("gate", _NUMBER), "carry": ("carry", _SWITCH),
          "bonus": ("bonus", _SWITCH), "exit": ("exit", _WORD)}
_FIDELITY = re.compile(r"\s*\((lossless|approximate|lossy)\)\s*$")


def decoder(name: str, **settings) -> Decoder:
    """A decoder by short name ("wfd", with settings or its defaults) or by label ("DtV d=1 K=8 deep_kv").

    Settings that are None count as not given. Raises SettingError for an unknown name or setting, for a setting given twice, and for
    a label that calls the decoder "(approximate)" or "(lossy)" where it is not.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    claimed = _FIDELITY.search(name)
    words = _FIDELITY.sub("", name).strip().split()
    key = words[0].lower() if words else ""
    key, implied = _ALIASES.get(key, (key, {}))
    if key not in DECODERS:
        near = closest(key, DECODERS)
        raise SettingError(f"decoder {name!r} is unknown; use one of {', '.join(DECODERS)}" + (f" (did you mean {near}?)" if near else ""))
    build, defaults, _ = DECODERS[key]
    written = implied | _read_label(name, words[1:])
    if key == "loopspec" and "draft_depth" in written:
        written.setdefault("second_depth", None)  # its label leaves out a second proposal that is not made
    for twice in written.keys() & settings.keys():
        raise SettingError(f"{twice} is given twice: {settings[twice]!r}, and {written[twice]!r} by the name {name!r}; give it once")
    given = written | settings
    takes = list(inspect.signature(build).parameters)
    if wrong := [setting for setting in given if setting not in takes]:
        raise SettingError(f"decoder {key!r} does not take {', '.join(sorted(wrong))}; it takes {', '.join(takes)}")
    made = build(**(defaults | given))
    if claimed and claimed[1] != made.fidelity:
        raise SettingError(f"{name!r} says {claimed[1]}, but {made.label!r} is {made.fidelity}; leave the word out, or give the setting")
    return made


def _read_label(name: str, words: list[str]) -> dict:
    settings: dict = {}
    for word in words:
        key, _, value = word.partition("=")
        setting, written = _WORDS.get(key, ("", ""))
        if setting in settings:
            raise SettingError(f"{setting} is given twice in decoder {name!r}")
        if setting and re.fullmatch(written, value):
            settings[setting] = {_WHOLE: int, _NUMBER: _number, _SWITCH: "on".__eq__, _WORD: str}[written](value)
        elif "=" not in word and word.isidentifier() and "read" not in settings:
            settings["read"] = word
        else:
            raise SettingError(f"{word!r} in decoder {name!r} is not a setting; labels read like 'WFD d=1' or 'DtV d=1 K=8 deep_kv'")
    return settings


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"{text!r} is not a number") from None
