"""What is imported when: rooms and help cost nothing heavy, and decoding only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "transformer_lens", "matplotlib", "seaborn", "pandas", "scipy", "sklearn", "pyarrow", "numpy", "triton",
         "accelerate", "nnsight", "xarray", "submitit", "huggingface_hub")
ROOMS = ("loopscope", "probes", "interventions", "decoders", "figures")


def loaded_after(code: str, *, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of `heavy` are loaded in a fresh Python after `code`."""
    tail = f"import json, sys; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{tail}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_importing_all_rooms_and_listing_their_names_loads_nothing_heavy():
    assert loaded_after(f"import {', '.join(ROOMS)}\nfor room in ({', '.join(ROOMS)}): dir(room)", heavy=(*HEAVY, "typer")) == []


def test_building_every_commands_help_loads_nothing_heavy():
    code = ("import io, sys, typer.main\nfrom contextlib import redirect_stdout\nfrom loopscope.cli.app import app\n"
            "for words in ([], *([name] for name in typer.main.get_command(app).commands)):\n"
            "    with redirect_stdout(io.StringIO()) as page:\n"
            "        try: app([*words, '--help'], prog_name='loopscope')\n"
            "        except SystemExit: pass\n"
            "    assert 'Usage' in page.getvalue(), words")
    assert loaded_after(code) == []


def test_decoding_loads_no_compiler_and_no_library_that_it_does_not_use():
    unused = ("transformers", "transformer_lens", "torch._dynamo", "torch._inductor", "sympy", "triton", "matplotlib", "seaborn", "pandas",
              "scipy", "sklearn", "pyarrow", "accelerate", "huggingface_hub", "probes", "interventions", "figures")
    code = ("from loopscope.cli.app import app\n"
            "try: app(['decode', 'tiny-huginn', '2 + 3 =', '--max-new-tokens', '2'])\n"
            "except SystemExit as end: assert not end.code, end.code\n"
            "print()")
    assert loaded_after(code, heavy=("torch", *unused)) == ["torch"]


def test_every_public_name_of_every_room_is_listed_and_resolves():
    code = (f"import {', '.join(ROOMS)}\nfor room in ({', '.join(ROOMS)}):\n"
            "    names = getattr(room, '__all__', ())\n    assert set(names) <= set(dir(room)), set(names) - set(dir(room))\n"
            "    for name in names:\n        assert getattr(room, name) is vars(room)[name], name\n"
            "    try: room.no_such_name\n"
            "    except AttributeError as error: assert 'no_such_name' in str(error) and room.__name__ in str(error)\n"
            "    else: raise AssertionError('a name was made up')\n"
            "from decoders import *\nfrom decoders import wavefront\nassert Wavefront is wavefront.Wavefront and Sampling and Stream")
    loaded_after(code)
