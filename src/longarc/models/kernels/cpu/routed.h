// What tokens were routed to, written beside their rows in the cache: numbers of one, two or four bytes.
#pragma once

#include <cstdint>

#include "new_rows.h"

namespace longarc {

template <class Number>
inline void put_numbers(uint8_t* to, const int32_t* chosen, int64_t num) {
    Number* numbers = reinterpret_cast<Number*>(to);
    for (int64_t i = 0; i < num; i++) numbers[i] = Number(chosen[i]);
}

// Keeps the `num` choices of one row in a table [page][position][num] of numbers of `width` bytes.
inline void keep_choice(uint8_t* table, int64_t width, const Rows& rows, int64_t row, const int32_t* chosen,
                        int64_t num) {
    uint8_t* to = table + (page_of(rows, row) * page_keys(rows) + place_in_page(rows, row)) * num * width;
    if (width == 1) return put_numbers<uint8_t>(to, chosen, num);
    if (width == 2) return put_numbers<uint16_t>(to, chosen, num);
    put_numbers<int32_t>(to, chosen, num);
}

}  // namespace longarc
