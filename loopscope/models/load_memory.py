"""How much memory loading takes: `python -m loopscope.models.load_memory`. The promise is 1.15x the tensors' own size.

Writes a synthetic Ouro checkpoint of several shards, loads it in a fresh process for every pair of dtypes, and compares the
process's peak resident memory, over what it held before, with the size of the tensors in the dtype that was asked for.
The checkpoint's tensors are as unequal as a released model's: an embedding, and packed projections of several files' parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMIT = 1.15
CASES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
_SHARDS = 4
_WIDTH, _MLP, _HEADS, _VOCAB = 1024, 2816, 8, 24576


@dataclass(frozen=True)
class LoadMemory:
    """One load. Sizes in bytes; growth: peak resident memory over what the process held before; seconds of the load."""

    stored: str
    loaded: str
    tensors: int
    growth: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.growth / self.tensors


def write_checkpoint(folder: Path, dtype: str, nbytes: int) -> None:
    """A random Ouro checkpoint of about nbytes in dtype, one tensor in memory at a time, in shards with an index."""
    import torch

    from loopscope.models.registry import config_from_dict, family_class
    from loopscope.models.saving import official_state, write_tensors
    from loopscope.models.unfilled import unfilled

    kind = getattr(torch, dtype)
    layer = 4 * _WIDTH**2 + 3 * _WIDTH * _MLP
    layers = max(1, (nbytes // kind.itemsize - 2 * _VOCAB * _WIDTH) // layer)
    raw = {"model_type": "ouro", "hidden_size": _WIDTH, "num_hidden_layers": layers, "num_attention_heads": _HEADS,
           "num_key_value_heads": _HEADS, "head_dim": _WIDTH // _HEADS, "intermediate_size": _MLP, "vocab_size": _VOCAB,
           "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "total_ut_steps": 4, "tie_word_embeddings": False}
    config = config_from_dict(raw)
    with unfilled():
        core = family_class(config.family)(config)
    shapes = {name: tuple(t.shape) for name, t in official_state(core).items()}
    sizes = {name: torch.Size(shape).numel() * kind.itemsize for name, shape in shapes.items()}
    # Zeros would do for memory, but sparse files and zero pages would not: every page must be read and written.
    write_tensors(folder, sizes, lambda name: torch.randn(shapes[name], dtype=kind), sum(sizes.values()) // _SHARDS)
    (folder / "config.json").write_text(json.dumps(raw))


def measure(folder: Path, stored: str, loaded: str) -> LoadMemory:
    """Load the checkpoint in a process of its own. Raises RuntimeError with what that process said if it fails."""
    done = subprocess.run([sys.executable, "-m", "loopscope.models.load_memory", "--child", str(folder), "--dtype", loaded],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return LoadMemory(stored, loaded, **json.loads(done.stdout))


def measure_all(nbytes: int, cases=CASES, folder: str | None = None) -> list[LoadMemory]:
    """Every case on a checkpoint of nbytes, written below `folder` (default: the system's own) and removed again."""
    out = []
    for stored in dict.fromkeys(stored for stored, _ in cases):
        with tempfile.TemporaryDirectory(dir=folder) as where:
            write_checkpoint(Path(where), stored, nbytes)
            out += [measure(Path(where), stored, loaded) for kept, loaded in cases if kept == stored]
    return out


def _status(field: str) -> int:
    """Bytes that /proc/self/status gives for a field: VmRSS is memory held now, VmHWM the most that ever was."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def _child(folder: str, dtype: str) -> None:
    from time import perf_counter

    import torch

    from loopscope.models.loading import load_core

    load_core("tiny-ouro")  # imports and allocators are paid for before anything is measured
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # importing torch peaks above what it keeps; this sets VmHWM back to VmRSS
    except OSError:  # where that is not allowed a small checkpoint hides below the old peak, a large one is measured all the same
        pass
    before, begin = _status("VmRSS"), perf_counter()
    core = load_core(folder, dtype=getattr(torch, dtype))
    seconds, growth = perf_counter() - begin, _status("VmHWM") - before
    print(json.dumps({"tensors": sum(p.nbytes for p in core.parameters()), "growth": growth, "seconds": seconds}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loopscope.models.load_memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.2, help="size of the checkpoint (default: 1.2)")
    parser.add_argument("--folder", help="where to write it; needs that much space (default: the system's temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _child(given.child, given.dtype)
        return 0
    rows = measure_all(int(given.gb * 1e9), folder=given.folder)
    print(f"{'stored':10}{'loaded':10}{'tensors':>12}{'growth':>12}{'ratio':>8}{'seconds':>9}")
    for row in rows:
        print(f"{row.stored:10}{row.loaded:10}{row.tensors / 1e6:>9.0f} MB{row.growth / 1e6:>9.0f} MB{row.ratio:>8.3f}{row.seconds:>9.1f}")
    worst = max(row.ratio for row in rows)
    print(f"the most: {worst:.3f}x the tensors' own size; the limit: {LIMIT}x")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
