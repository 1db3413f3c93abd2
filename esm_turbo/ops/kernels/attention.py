"""Triton kernel that reads packed contexts. Imported only where it runs; docs/notes/kernels.md explains the algorithm.

`attend_context` maps the queries into the space of the stored keys and reads the contexts, whose blocks are distributed
evenly over programs of one warp. `merge` combines the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from esm_turbo.ops.kernels.operands import (
    field_unit,
    is_spread,
    key_operand,
    load_key_slab,
    load_keys,
    load_packed_table,
    load_value_slab,
    load_values,
    prefetch,
    slab_of,
    tile_start,
    value_operand,
)
from esm_turbo.ops.kernels.products import as_lhs, dot_fields, pairs_to_quads, slab_zeros
from esm_turbo.ops.kernels.queries import (
    floor_power_of_two,
    load_field_biases,
    load_mean,
    load_query_maps,
    load_scaled_queries,
    map_queries,
    read_tile,
    row_and_token,
    split_in_two,
)

# The maximum of no scores: finite, and below all others.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Tiles between a prefetch and the tile that needs it.
_PREFETCH_DISTANCE: tl.constexpr = tl.constexpr(2)
# A small number whose inverse is finite.
_TINY: tl.constexpr = tl.constexpr(1.0e-30)


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _inside_branch(x, ASM: tl.constexpr):
    """x, keeping the compiler from computing what depends on it ahead of the branch that contains it."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def _score_tile(
    queries,
    key_words,
    slab_ptrs,
    table_ptr,
    table,
    slab_row,
    next_start,
    opaque_one,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Products of mapped queries with the keys of a tile, [ROWS, BLOCK_N], and the key words of the next tile.

    The next words are loaded here, so that memory has the time of one tile to answer.
    """
    scores = tl.zeros((ROWS, BLOCK_N), tl.float32)
    next_words = ()
    for i in tl.static_range(len(KEYS)):
        keys = key_operand(
            key_words[i], table_ptr, table, BLOCK_N, ROWS, slab_of(KEYS, i), is_spread(KEYS, i, ROWS), DTYPE, ASM
        )  # [size, BLOCK_N]
        slab = load_key_slab(
            slab_ptrs[i], slab_row, next_start, opaque_one, BLOCK_N, slab_of(KEYS, i), is_spread(KEYS, i, ROWS)
        )
        next_words = next_words + (slab,)
        scores = dot_fields(queries[i], keys, scores, slab_of(KEYS, i).table, PRECISION)
    return (scores,) + next_words


@triton.jit
def _accumulate_tile(
    weights,
    own_rows,
    acc,
    value_words,
    slab_ptrs,
    table_ptr,
    table,
    slab_row,
    next_start,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Adds the weighted values of a tile to acc, [ROWS, size] for every slab, and loads the words of the next tile.

    Only the rows in `own_rows` [ROWS, 1] are added to; None for all.
    """
    new_acc = ()
    next_words = ()
    for i in tl.static_range(len(VALUES)):
        values = value_operand(
            value_words[i], table_ptr, table, BLOCK_N, slab_of(VALUES, i), DTYPE, ASM
        )  # [BLOCK_N, size]
        slab = load_value_slab(slab_ptrs[i], slab_row, next_start, BLOCK_N, slab_of(VALUES, i))
        next_words = next_words + (slab,)
        if own_rows is None and tl.float16 == DTYPE:
            new_acc = new_acc + (dot_fields(weights, values, acc[i], slab_of(VALUES, i).table, PRECISION),)
        else:
            # Tensor cores truncate what they accumulate; over many tiles float32 would show it.
            zeros = slab_zeros(slab_of(VALUES, i), ROWS)
            summed = dot_fields(weights, values, zeros, slab_of(VALUES, i).table, PRECISION)
            summed = acc[i] + summed
            new_acc = new_acc + (summed if own_rows is None else tl.where(own_rows, summed, acc[i]),)
    return new_acc + next_words


@triton.jit(do_not_specialize_on_alignment=["tile_ptr", "length_ptr", "protected_ptr", "mask_ptr", "part_total_ptr"])
def attend_context(
    query_ptr,
    map_ptr,
    map_scale_ptr,
    field_bias_ptr,
    mean_ptr,
    key_residual_ptr,
    angle_ptr,
    key_slab_ptrs,
    value_slab_ptrs,
    key_table_ptr,
    value_table_ptr,
    tile_ptr,
    length_ptr,
    protected_ptr,
    mask_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_total_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    slab_columns,
    num_columns,
    num_tokens,
    num_rows,
    num_row_tiles,
    num_heads,
    num_items,
    num_slots,
    num_blocks,
    blocks_per_program,
    max_parts,
    has_tiles,
    has_mask,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROTATED: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of queries to parts of packed contexts: accumulators, maxima and totals, to be combined by `merge`.

    For a query q, and columns c of blocks that begin at b, with fields k_c and v_c as they are stored:

        s_c   = log2(e) (T^-T R(-b) q . (k_c + field bias) + R(-b) q . (mean + residual))
        max   = max_c s_c
        total = sum_c 2^(s_c - max)
        acc   = sum_c 2^(s_c - max) v_c

    Grid: (programs,). A row is a query of a context: one token of one row of the extension. An item is a tile of rows
    of one head of one context, of which `num_blocks` are counted, some perhaps beyond its end. The blocks of all items,
    in order, are distributed in runs of `blocks_per_program`: a program reads the end of one item and the beginning of
    the next, a part of one item, or several items.

    BLOCK_M (a power of two up to ROWS, which is 8 or 16) are processed at once. Operands hold each query in
    `ROWS / BLOCK_M` rows, one for each tile of a group. The tiles of a group are multiplied one after the other, and
    only with their own rows, so that the scores and weights of a whole group fill one tile.

    Contexts are rows of the extension; a single one is shared by all rows, and has all queries. If it `has_tiles`, rows
    name their contexts: all queries are numbered as those of one context, and a tile [tiles, 3] says which context it
    reads, and from which query to before which other one. Slabs have `slab_columns` columns per head in memory, at
    least BLOCK_N, of which the first `num_columns` belong to the contexts. `num_slots` columns of each, up to SLOTS,
    are protected. The mask, a bit per column, is read if `has_mask`.

    The words of PREFETCH_TILES tiles at a time are prefetched to the L2 cache (0: none). With OVERLAP, the first tiles
    are prefetched while the preceding kernel may still run.
    """
    first_block = tl.program_id(0) * blocks_per_program
    last_block = tl.minimum(first_block + blocks_per_program, num_items * num_blocks)
    opaque_one = tl.minimum(num_columns, 1)
    copies: tl.constexpr = ROWS // BLOCK_M
    # The other dimension of an operand with few columns, of which two are used.
    parts: tl.constexpr = 24 - ROWS
    i = tl.arange(0, ROWS)
    item = first_block // num_blocks
    item_start = item * num_blocks
    part = tl.program_id(0) - item_start // blocks_per_program
    row_tile = item % num_row_tiles
    head = item // num_row_tiles % num_heads
    context = item // num_row_tiles // num_heads
    if OVERLAP:
        # The L2 cache sees later writes, so that nothing stale can be read.
        read = tl.load(tile_ptr + row_tile * 3, mask=has_tiles != 0, other=context)
        first_row = (read * num_heads + head).to(tl.int64) * slab_columns
        first_column = (first_block - item_start) * (TILES_PER_BLOCK * BLOCK_N)
        prefetch(key_slab_ptrs, first_row, first_column, num_columns, BLOCK_N, KEYS, ASM)
        prefetch(value_slab_ptrs, first_row, first_column, num_columns, BLOCK_N, VALUES, ASM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    for first_of_item in tl.range(item_start, last_block, num_blocks, num_stages=1):
        read, first_query, end_query = read_tile(tile_ptr, row_tile, context, num_rows, has_tiles, BLOCK_M)
        context_head = (read * num_heads + head).to(tl.int64)
        # A tile without queries reads nothing.
        length = tl.load(length_ptr + read, mask=first_query < end_query, other=0).to(tl.int32)
        length = tl.minimum(length, num_columns)
        first_tile = tl.maximum(first_block - first_of_item, 0) * TILES_PER_BLOCK
        end_tile = tl.minimum(
            tl.minimum(last_block - first_of_item, num_blocks) * TILES_PER_BLOCK, tl.cdiv(length, BLOCK_N)
        )
        # The slabs first, because their loads take longest.
        slab_row = context_head * slab_columns
        first_start = tile_start(first_tile, num_columns, BLOCK_N)
        if copies == 1:
            key_words = load_keys(key_slab_ptrs, slab_row, first_start, opaque_one, BLOCK_N, ROWS, KEYS)
            value_words = load_values(value_slab_ptrs, slab_row, first_start, BLOCK_N, VALUES)
        protected = ()
        for slot in tl.static_range(SLOTS):
            slot_ptr = protected_ptr + read * num_slots + slot
            protected = protected + (tl.load(slot_ptr, mask=slot < num_slots, other=-1),)

        row = first_query + i % BLOCK_M
        in_rows = row < end_query
        batch, token = row_and_token(row, num_tokens, BLOCK_M)
        batch += context
        map_scale = tl.load(map_scale_ptr + head)
        maps = load_query_maps(map_ptr + head * (2 * KEY_SIZE * HALF), HALF, KEYS, KEY_SIZE)
        field_biases = load_field_biases(field_bias_ptr, KEYS, parts, DTYPE)
        key_table_ptrs = key_table_ptr + head * 16
        value_table_ptrs = value_table_ptr + head * 16
        key_table = load_packed_table(key_table_ptrs, slab_of(KEYS, 0), DTYPE, ASM)
        value_table = load_packed_table(value_table_ptrs, slab_of(VALUES, 0), DTYPE, ASM)
        query_ptrs = query_ptr + head * stride_qh
        query_ptrs += batch.to(tl.int64) * stride_qb + token * stride_qn  # [ROWS]
        low, high, query_scale = load_scaled_queries(query_ptrs, in_rows, HEAD_DIM, HALF, DTYPE)
        residual_ptr = key_residual_ptr
        if residual_ptr is not None:
            residual_ptr += context_head * HEAD_DIM
        d = tl.arange(0, HALF)
        in_half = d < HEAD_DIM // 2
        mean_low = load_mean(mean_ptr + head * HEAD_DIM, residual_ptr, d, in_half)
        mean_high = load_mean(mean_ptr + head * HEAD_DIM, residual_ptr, HEAD_DIM // 2 + d, in_half)
        # This waits for the length, and so does everything after it.
        end_column = tl.minimum(end_tile * BLOCK_N, num_columns)
        # Programs with a single block have nothing to prefetch.
        end_prefetch = tl.where(blocks_per_program > 1, end_column, 0)
        if PREFETCH_TILES > 0:
            prefetch(
                key_slab_ptrs, slab_row, first_tile * BLOCK_N, end_prefetch, _PREFETCH_DISTANCE * BLOCK_N, KEYS, ASM
            )
            prefetch(
                value_slab_ptrs, slab_row, first_tile * BLOCK_N, end_prefetch, _PREFETCH_DISTANCE * BLOCK_N, VALUES, ASM
            )

        # Scores are in units in which the maps are at most 1. The mean may be far larger, so it has a scale of its own.
        largest = tl.max(tl.maximum(tl.abs(mean_low), tl.abs(mean_high)), 0)
        mean_scale = tl.maximum(floor_power_of_two(largest / map_scale), 1.0)
        mean_low = split_in_two(mean_low / map_scale / mean_scale, parts, DTYPE)
        mean_high = split_in_two(mean_high / map_scale / mean_scale, parts, DTYPE)
        # Not 0, or a score of minus infinity would become NaN.
        scale = tl.maximum(query_scale * (map_scale * LOG2E), _TINY)
        field_scale = scale / field_unit(slab_of(KEYS, 0), DTYPE)

        row_max = tl.full((ROWS,), LOWEST, tl.float32)
        l_i = tl.zeros((ROWS,), tl.float32)
        acc = ()
        for slab in tl.static_range(len(VALUES)):
            acc = acc + (slab_zeros(slab_of(VALUES, slab), ROWS),)
        for begin in tl.range(first_tile, end_tile, copies):
            end = tl.minimum(begin + copies, end_tile)
            own_tile = begin + i // BLOCK_M
            if copies > 1:
                # Memory answers while queries are mapped; earlier, these words would take registers from the values.
                begin_start = tile_start(begin, num_columns, BLOCK_N)
                key_words = load_keys(key_slab_ptrs, slab_row, begin_start, opaque_one, BLOCK_N, ROWS, KEYS)
            mapped = map_queries(
                low,
                high,
                begin // TILES_PER_BLOCK if copies == 1 else own_tile[:, None] // TILES_PER_BLOCK,
                maps,
                mean_low,
                mean_high,
                mean_scale,
                field_biases,
                angle_ptr,
                HEAD_DIM,
                HALF,
                KEYS,
                ROTATED,
                DTYPE,
                PRECISION,
                ASM,
            )
            # A group of one tile has no loop: bounds and loop-carried values would cost instructions. Other groups loop
            # over conditions: into loops over ranges Triton moves the layout conversions of queries and weights.
            if copies == 1:
                scored = _score_tile(
                    mapped[1:], key_words, key_slab_ptrs, key_table_ptrs, key_table, slab_row,
                    tile_start(tl.minimum(end, end_tile - 1), num_columns, BLOCK_N), opaque_one,
                    BLOCK_N, ROWS, KEYS, DTYPE, PRECISION, ASM,
                )  # fmt: skip
                scores = scored[0]
                key_words = scored[1:]
            else:
                # Rows of tiles that do not exist stay invisible.
                scores = tl.full((ROWS, BLOCK_N), float("-inf"), tl.float32)
                tile = begin
                while tile < end:
                    if PREFETCH_TILES > 0 and (tile - begin) % PREFETCH_TILES == 0:
                        ahead = (tile + _PREFETCH_DISTANCE) * BLOCK_N
                        prefetch(key_slab_ptrs, slab_row, ahead, end_prefetch, PREFETCH_TILES * BLOCK_N, KEYS, ASM)
                    scored = _score_tile(
                        mapped[1:], key_words, key_slab_ptrs, key_table_ptrs, key_table, slab_row,
                        tile_start(tl.minimum(tile + 1, end - 1), num_columns, BLOCK_N), opaque_one,
                        BLOCK_N, ROWS, KEYS, DTYPE, PRECISION, ASM,
                    )  # fmt: skip
                    scores = tl.where((own_tile == tile)[:, None], scored[0], scores)
                    key_words = scored[1:]
                    tile += 1
            if copies > 1:
                # Memory answers while weights are computed.
                value_words = load_values(value_slab_ptrs, slab_row, begin_start, BLOCK_N, VALUES)
            # Most groups are entirely visible and skip the mask.
            partial = end * BLOCK_N > length
            for slot in tl.static_range(SLOTS):
                partial = partial | ((protected[slot] >= begin * BLOCK_N) & (protected[slot] < end * BLOCK_N))
            if (has_mask != 0) | partial:
                # Not visible are rows beyond the last query and tiles from `end` on, columns that belong to an earlier
                # tile (the last one is loaded from the context's last columns) or lie beyond the length, protected ones
                # and masked ones.
                own_start = _inside_branch(own_tile * BLOCK_N, ASM)
                column = tile_start(own_tile, num_columns, BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
                visible = (in_rows & (own_tile < end))[:, None] & (column >= own_start[:, None]) & (column < length)
                for slot in tl.static_range(SLOTS):
                    visible = visible & (column != protected[slot])
                # A row's bits are one or two words, which take fewer registers than a byte of each column would.
                first_word = own_tile * BLOCK_N // 32
                row_words = tl.cdiv(num_columns, TILES_PER_BLOCK * BLOCK_N) * (TILES_PER_BLOCK * BLOCK_N // 32)
                word_ptrs = mask_ptr + batch.to(tl.int64) * row_words + first_word
                is_masked = in_rows & (own_tile < end) & (has_mask != 0)
                bit = column - first_word[:, None] * 32
                word = tl.load(word_ptrs, mask=is_masked, other=-1)[:, None]
                if BLOCK_N > 32:
                    upper = tl.load(word_ptrs + 1, mask=is_masked, other=-1)[:, None]
                    word = tl.where(bit < 32, word, upper)
                visible = visible & ((word >> (bit & 31) & 1) != 0)
                scores = tl.where(visible, scores, float("-inf"))
            bias = mapped[0] * scale
            new_max = tl.maximum(row_max, tl.max(scores, 1) * field_scale + bias)
            rescale = _exp2(row_max - new_max, ASM)
            weights = _exp2(scores * field_scale[:, None] + (bias - new_max)[:, None], ASM)  # [ROWS, BLOCK_N]
            if PRECISION != "tf32":
                # Only bfloat16 does not show that rounded weights have another total than the exact ones.
                weights = weights.to(DTYPE)
            l_i = l_i * rescale + tl.sum(weights.to(tl.float32), 1)
            row_max = new_max
            weights = as_lhs(pairs_to_quads(weights.to(DTYPE)))
            rescaled = ()
            for slab in tl.static_range(len(VALUES)):
                rescaled = rescaled + (acc[slab] * rescale[:, None],)
            acc = rescaled
            if copies == 1:
                summed = _accumulate_tile(
                    weights, None, acc, value_words, value_slab_ptrs, value_table_ptrs, value_table, slab_row,
                    tile_start(tl.minimum(end, end_tile - 1), num_columns, BLOCK_N),
                    BLOCK_N, ROWS, VALUES, DTYPE, PRECISION, ASM,
                )  # fmt: skip
                acc = summed[: len(VALUES)]
                value_words = summed[len(VALUES) :]
            else:
                tile = begin
                while tile < end:
                    if PREFETCH_TILES > 0 and (tile - begin) % PREFETCH_TILES == 0:
                        ahead = (tile + _PREFETCH_DISTANCE) * BLOCK_N
                        prefetch(value_slab_ptrs, slab_row, ahead, end_prefetch, PREFETCH_TILES * BLOCK_N, VALUES, ASM)
                    summed = _accumulate_tile(
                        weights, (own_tile == tile)[:, None], acc, value_words, value_slab_ptrs, value_table_ptrs,
                        value_table, slab_row, tile_start(tl.minimum(tile + 1, end - 1), num_columns, BLOCK_N),
                        BLOCK_N, ROWS, VALUES, DTYPE, PRECISION, ASM,
                    )  # fmt: skip
                    acc = summed[: len(VALUES)]
                    value_words = summed[len(VALUES) :]
                    tile += 1

        # The copies of each query are combined.
        query = first_query + tl.arange(0, BLOCK_M)
        is_query = query < end_query
        part_row = ((context * num_heads + head).to(tl.int64) * max_parts + part) * num_rows + query
        max_by_copy = tl.reshape(row_max, (copies, BLOCK_M))
        query_max = tl.max(max_by_copy, 0)  # [BLOCK_M]
        rescale = _exp2(max_by_copy - query_max[None, :], ASM)
        start = 0
        for slab in tl.static_range(len(VALUES)):
            acc_by_copy = tl.reshape(acc[slab], (copies, BLOCK_M, slab_of(VALUES, slab).size))
            query_acc = tl.sum(acc_by_copy * rescale[:, :, None], 0)  # [BLOCK_M, size]
            component = tl.arange(0, slab_of(VALUES, slab).size)
            acc_ptrs = part_acc_ptr + part_row[:, None] * VALUE_SIZE + start + component[None, :]
            tl.store(acc_ptrs, query_acc, mask=is_query[:, None])
            start += slab_of(VALUES, slab).size
        tl.store(part_max_ptr + part_row, query_max, mask=is_query)
        tl.store(part_total_ptr + part_row, tl.sum(tl.reshape(l_i, (copies, BLOCK_M)) * rescale, 0), mask=is_query)

        # The next item begins here, so that this is its first part. Counting up avoids slow divisions.
        part = part * 0
        row_tile = tl.where(row_tile + 1 == num_row_tiles, 0, row_tile + 1)
        head = tl.where(row_tile > 0, head, head + 1)
        context = tl.where(head == num_heads, context + 1, context)
        head = tl.where(head == num_heads, 0, head)
