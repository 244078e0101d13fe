"""`loopscope convert`."""

from __future__ import annotations

from loopscope.errors import SettingError


def run_convert(source: str, out: str, *, dtype: str | None, revision: str | None, max_shard_size: str) -> str:
    """Convert, and say what came out."""
    from loopscope.models.convert import DTYPES, convert

    if dtype is not None and dtype not in DTYPES:
        raise SettingError(f"--dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}, or leave it out to keep what is stored")
    done = convert(source, out, DTYPES[dtype] if dtype else None, revision, max_shard_size)
    return f"{done.folder}: {done.tensors} tensors, {done.nbytes / 1e6:,.1f} MB, in {', '.join(done.files)}"
