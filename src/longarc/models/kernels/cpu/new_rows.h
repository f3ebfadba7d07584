// The new tokens of a call, and where in the cache their sequences lie.
#pragma once

#include <cstdint>

namespace longarc {

// Position p of a slot's sequence lies in page pages[slot][p >> page_shift] of every table.
struct Rows {
    const int64_t *tokens, *slots, *positions;
    const int64_t* pages;  // [slot][slot_pages]
    int64_t num, slot_pages, page_shift;
    const float *embedding, *cos, *sin;  // angles of all positions, [position][width / 2]
    const float* final_norm;
    float* hidden;  // out, [row][hidden]
    int64_t ends_only;  // hidden is wanted of the last row of each sequence alone; the other rows are left as they are
    int64_t fp8_rows;  // what is written to the cache is rounded to e4m3 first
};

inline int64_t page_keys(const Rows& rows) { return int64_t(1) << rows.page_shift; }

// The pages of a row's sequence, its own page, and its place there.
inline const int64_t* pages_of(const Rows& rows, int64_t row) { return rows.pages + rows.slots[row] * rows.slot_pages; }
inline int64_t page_of(const Rows& rows, int64_t row) {
    return pages_of(rows, row)[rows.positions[row] >> rows.page_shift];
}
inline int64_t place_in_page(const Rows& rows, int64_t row) { return rows.positions[row] & (page_keys(rows) - 1); }

// Whether a row is the last of its sequence in this call.
inline bool is_end(const Rows& rows, int64_t row) {
    return row + 1 == rows.num || rows.slots[row + 1] != rows.slots[row];
}

inline void prefetch(const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace longarc
