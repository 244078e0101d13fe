"""`python -m figures`: which figures there are, and how to draw one."""

from __future__ import annotations

from figures import modules


def main() -> None:
    """Print a line per figure file."""
    from importlib import import_module

    print("python -m figures.NAME RUN_DIR --out FILE draws one figure from a run's tables; --help on each says more. NAME is one of\n")
    for name in modules():
        print(f"  {name:22}{(import_module(f'figures.{name}').__doc__ or '').strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
