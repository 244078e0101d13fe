"""The Triton source of mixed-depth attention. Imports triton, so only loopscope/kernels/mixed_depth.py imports it, when it runs.

The functions are plain Python here: mixed_depth.py compiles them for CUDA, or hands them to Triton's interpreter. For the
interpreter's sake, whatever order modules were imported in, only builtins of triton.language are called, never its standard
library, whose functions are bound to one of the two when triton is imported; as combiners of `tl.reduce` both know them.
Flash decoding: Dao et al., "Flash-Decoding for long-context inference" (2023); the running maximum and sum: Milakov and
Gimelshein (arXiv 1805.02867).
"""

import triton.language as tl


def attend_split(q, k, v, z, partial_max, partial_sum, partial_z,
                 sequence, prefix_start, prefix_end, k_slots, v_slots, ancestors, cells, groups,
                 scale, active, heads, first_split,
                 q_row, q_head, k_batch, k_slot, k_head, k_cell, v_batch, v_slot, v_head, v_cell, z_row, z_head,
                 ACTIVE: tl.constexpr, HAS_CELLS: tl.constexpr, DIRECT: tl.constexpr, PRECISE: tl.constexpr, WIDEN: tl.constexpr,
                 TOTAL: tl.constexpr, SPAN: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
                 D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Program (group of rows, key head, split): softmax over one stretch of keys for all rows of the group and all query heads
    of the key head. A lane is one query: rows of the group, and within a row the SHARED query heads of its key head.

    Splits are stretches of SPAN cells, wherever a row's keys begin and end, so a row's numbers do not depend on how long its
    neighbours are. ACTIVE: the keys are the active columns, in one split. DIRECT: there is one split, which writes z.
    PRECISE: weights are not rounded before they meet the values. WIDEN: products are made in fp32 of the same numbers, since
    the interpreter multiplies no bfloat16.
    """
    group = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    leader = tl.load(groups + group * ROWS)
    if leader < 0:
        return
    lane = tl.arange(0, LANES)
    of = lane // SHARED
    row = tl.load(groups + group * ROWS + of, mask=of < ROWS, other=-1)
    live = row >= 0
    row = tl.where(live, row, 0).to(tl.int64)
    head = kv_head * SHARED + lane % SHARED
    column = tl.arange(0, BLOCK_D)
    wide = column < D

    # A split of a long cache is further from its beginning than 32 bits can count.
    batch = tl.load(sequence + leader).to(tl.int64)
    k_base = k + batch * k_batch + tl.load(k_slots + leader).to(tl.int64) * k_slot + kv_head.to(tl.int64) * k_head
    v_base = v + batch * v_batch + tl.load(v_slots + leader).to(tl.int64) * v_slot + kv_head.to(tl.int64) * v_head
    if ACTIVE:
        low = 0
        high = active
    else:
        start = tl.load(prefix_start + row, mask=live, other=2147483647)
        end = tl.load(prefix_end + row, mask=live, other=0)
        low = tl.maximum(tl.reduce(start, 0, tl.standard._elementwise_min), split * SPAN) // BLOCK * BLOCK
        high = tl.minimum(tl.reduce(end, 0, tl.standard._elementwise_max), (split + 1) * SPAN)

    query = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + column[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.full((LANES,), 0.0, tl.float32)
    out = tl.full((LANES, BLOCK_D), 0.0, tl.float32)
    for at in range(low, high, BLOCK):
        cell = at + tl.arange(0, BLOCK)
        inside = cell < high
        if ACTIVE:
            seen = tl.load(ancestors + row[:, None] * active + cell[None, :], mask=live[:, None] & inside[None, :], other=0) != 0
            if HAS_CELLS:
                cell = tl.load(cells + cell, mask=inside, other=0)
        else:
            seen = (cell[None, :] >= start[:, None]) & (cell[None, :] < end[:, None])
        place = cell.to(tl.int64)
        key = tl.load(k_base + place[:, None] * k_cell + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        value = tl.load(v_base + place[:, None] * v_cell + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        if WIDEN:
            score = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")
        else:
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(seen, score * (scale * 1.4426950408889634), float("-inf"))  # exp2 is what the hardware has
        new_top = tl.maximum(top, tl.reduce(score, 1, tl.standard._elementwise_max))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing read yet: -inf minus -inf is no number
        weight = tl.exp2(score - safe[:, None])
        keep = tl.exp2(top - safe)
        total = total * keep + tl.reduce(weight, 1, tl.standard._sum_combine)
        rounded = weight if PRECISE else weight.to(value.dtype)
        if WIDEN:
            new = tl.dot(rounded.to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            new = tl.dot(rounded, value, input_precision="ieee")
        out = out * keep[:, None] + new
        top = new_top

    if DIRECT:
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(z + row[:, None] * z_row + head[:, None] * z_head + column[None, :], out.to(z.dtype.element_ty),
                 mask=live[:, None] & wide[None, :])
    elif low < high:  # the others are known from prefix_start and prefix_end, and are not looked at
        cell_of = (row * heads + head) * TOTAL + first_split + split
        tl.store(partial_max + cell_of, top, mask=live)
        tl.store(partial_sum + cell_of, total, mask=live)
        tl.store(partial_z + cell_of[:, None] * D + column[None, :], out, mask=live[:, None] & wide[None, :])


def attend_split_alone(q, k, v, z, partial_max, partial_sum, partial_z,
                       sequence, prefix_start, prefix_end, k_slots, v_slots, ancestors, cells, groups,
                       scale, active, heads, first_split,
                       q_row, q_head, k_batch, k_slot, k_head, k_cell, v_batch, v_slot, v_head, v_cell, z_row, z_head,
                       ACTIVE: tl.constexpr, HAS_CELLS: tl.constexpr, DIRECT: tl.constexpr,
                       TOTAL: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """`attend_split` for groups of one row and one head: a wave of a model without shared key heads. No tensor cores.

    Each of the BLOCK places of a block keeps a softmax of its own, and they meet at the end: in the loop nothing but the
    scores is added up across threads.
    """
    row = tl.load(groups + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    head = tl.program_id(1)
    split = tl.program_id(2)
    column = tl.arange(0, BLOCK_D)
    wide = column < D
    batch = tl.load(sequence + row).to(tl.int64)
    k_base = k + batch * k_batch + tl.load(k_slots + row).to(tl.int64) * k_slot + head.to(tl.int64) * k_head
    v_base = v + batch * v_batch + tl.load(v_slots + row).to(tl.int64) * v_slot + head.to(tl.int64) * v_head
    if ACTIVE:
        first = 0
        low = 0
        high = active
    else:
        first = tl.maximum(tl.load(prefix_start + row), split * SPAN)
        low = first // BLOCK * BLOCK
        high = tl.minimum(tl.load(prefix_end + row), (split + 1) * SPAN)

    query = tl.load(q + row * q_row + head * q_head + column, mask=wide, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    out = tl.full((BLOCK, BLOCK_D), 0.0, tl.float32)
    for at in range(low, high, BLOCK):
        cell = at + tl.arange(0, BLOCK)
        seen = (cell >= first) & (cell < high)
        if ACTIVE:
            seen = seen & (tl.load(ancestors + row * active + cell, mask=seen, other=0) != 0)
            if HAS_CELLS:
                cell = tl.load(cells + cell, mask=seen, other=0)
        place = cell.to(tl.int64)
        both = seen[:, None] & wide[None, :]
        key = tl.load(k_base + place[:, None] * k_cell + column[None, :], mask=both, other=0.0)
        value = tl.load(v_base + place[:, None] * v_cell + column[None, :], mask=both, other=0.0)
        score = tl.reduce(query[None, :] * key.to(tl.float32), 1, tl.standard._sum_combine)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, score)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - safe)
        keep = tl.exp2(top - safe)
        total = total * keep + weight
        out = out * keep[:, None] + weight[:, None] * value.to(tl.float32)
        top = new_top

    highest = tl.reduce(top, 0, tl.standard._elementwise_max)
    rescale = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    norm = tl.reduce(total * rescale, 0, tl.standard._sum_combine)
    summed = tl.reduce(out * rescale[:, None], 0, tl.standard._sum_combine)
    if DIRECT:
        summed = summed / tl.where(norm == 0.0, 1.0, norm)
        tl.store(z + row * z_row + head * z_head + column, summed.to(z.dtype.element_ty), mask=wide)
    elif low < high:
        cell_of = (row * heads + head) * TOTAL + first_split + split
        tl.store(partial_max + cell_of, highest)
        tl.store(partial_sum + cell_of, norm)
        tl.store(partial_z + cell_of * D + column, summed, mask=wide)


def merge_splits(z, partial_max, partial_sum, partial_z, prefix_start, prefix_end, heads, splits, z_row, z_head,
                 TOTAL: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Program (row, head): the splits' partial softmaxes, scaled to their common maximum, added and divided."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start = tl.load(prefix_start + row)
    end = tl.load(prefix_end + row)
    end = tl.where(start < end, end, 0)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_D)
    of_prefix = (split < splits) & (split * SPAN < end) & ((split + 1) * SPAN > start)
    written = of_prefix | ((split >= splits) & (split < TOTAL))
    cell = (row * heads + head) * TOTAL + split
    top = tl.load(partial_max + cell, mask=written, other=float("-inf"))
    total = tl.load(partial_sum + cell, mask=written, other=0.0)
    both = written[:, None] & (column < D)[None, :]
    part = tl.load(partial_z + cell[:, None] * D + column[None, :], mask=both, other=0.0)
    highest = tl.reduce(top, 0, tl.standard._elementwise_max)
    rescale = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    norm = tl.reduce(total * rescale, 0, tl.standard._sum_combine)
    out = tl.reduce(part * rescale[:, None], 0, tl.standard._sum_combine) / tl.where(norm == 0.0, 1.0, norm)
    tl.store(z + row * z_row + head * z_head + column, out.to(z.dtype.element_ty), mask=column < D)


def place_rows(keys, values, k, v, sequence, k_slots, v_slots, cells,
               k_batch, k_slot, k_head, k_cell, v_batch, v_slot, v_head, v_cell, new_k_row, new_k_head, new_v_row, new_v_head,
               D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (row, key head): the row's own K/V into their cells."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    wide = column < D
    batch = tl.load(sequence + row).to(tl.int64)
    cell = tl.load(cells + row).to(tl.int64)
    k_to = keys + batch * k_batch + tl.load(k_slots + row).to(tl.int64) * k_slot + kv_head * k_head + cell * k_cell
    v_to = values + batch * v_batch + tl.load(v_slots + row).to(tl.int64) * v_slot + kv_head * v_head + cell * v_cell
    own_k = tl.load(k + row * new_k_row + kv_head * new_k_head + column, mask=wide)
    own_v = tl.load(v + row * new_v_row + kv_head * new_v_head + column, mask=wide)
    tl.store(k_to + column, own_k, mask=wide)
    tl.store(v_to + column, own_v, mask=wide)
