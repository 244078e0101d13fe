"""Attention of rows at different depths in one launch: row tables, a plain reference, and a Triton kernel (docs/kernel.md).

Importing this package needs neither triton nor a GPU.
"""

from __future__ import annotations

from loopscope.kernels.tables import RowTables, group_rows, tables_of
from loopscope.kernels.twin import mixed_depth_attention_twin, write_rows

__all__ = ["RowTables", "group_rows", "mixed_depth_attention_twin", "tables_of", "write_rows"]
