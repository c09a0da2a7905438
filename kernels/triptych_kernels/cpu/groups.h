// x W^T for weights of codes: R rows times P panels, group by group.
//
// A panel has, group by group of inputs: the codes, in steps (see codes.h); the scale of each column; and its minimum,
// if the weight has minima. Packed rows have the units of each group and, if there are minima, their sum. An output is
// one chain over the groups: of each, the products of its numbers with what the codes stand for are added up as in
// microkernel.h, and multiplied by the scale; then the minimum times the sum of the numbers is subtracted. The order is
// the same for any R and P: this makes results independent of the batch.
//
// If rows are rounded to int8, their groups have units of four numbers, what to add to the sum of products, as codes
// stand for other whole numbers than are multiplied, and the scale by which that is multiplied first.
//
// Sums lie in memory, so that products are compiled once for all stores of a tile. Include isa.h before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm.h"
#include "packing.h"

namespace triptych {
namespace {

// The bits by which the code of number k of eight is shifted: the first of each pair are in the lower half. For rows of
// int8 the first four are in the lower halves of bytes.
constexpr int code4_shift(int k) { return 4 * (k / 2) + 16 * (k % 2); }
constexpr int code4_shift_for_int8(int k) { return 4 * (k / 4) + 8 * (k % 4); }

constexpr int64_t kMostNumbers = 16;  // of a column in a step of any kind of codes

// Where the code of input k of a step is of a column: at a bit of a byte, or its four lowest and its upper bits at
// different ones. A column's eight codes of 4 bits are neighbours, as are four of 8 bits for rows of int8.
struct CodeAt {
    int64_t byte, upper_byte;
    int shift, upper_shift;

    void put(char* step, int code, bool has_upper) const {
        const int lower = has_upper ? code & 15 : code;
        step[byte] = static_cast<char>(step[byte] | lower << shift);
        if (has_upper) {
            step[upper_byte] = static_cast<char>(step[upper_byte] | code >> 4 << upper_shift);
        }
    }
    int code(const char* step, int bits) const {
        const auto bits_at = [&](int64_t at, int first, int count) {
            return static_cast<uint8_t>(step[at]) >> first & ((1 << count) - 1);
        };
        return bits == 6 ? bits_at(byte, shift, 4) | bits_at(upper_byte, upper_shift, 2) << 4
                         : bits_at(byte, shift, bits);
    }
};
inline CodeAt code_at(WeightKind kind, int column, int64_t k) {
    if (kind == WeightKind::kCodes8) {
        return {byte_of_pairs(column, k), 0, 0, 0};
    }
    const int64_t lanes = 4 * kPanelColumns, lane = 4 * column;
    if (kind == WeightKind::kCodes8ForInt8) {
        return {k / 4 * lanes + lane + k % 4, 0, 0, 0};
    }
    const int eighth = static_cast<int>(k % 8);
    const int bit = kind == WeightKind::kCodes4 ? code4_shift(eighth) : code4_shift_for_int8(eighth);
    // Of 6 bits, the upper two of sixteen codes follow their lower ones.
    return {k / 8 * lanes + lane + bit / 8, 2 * lanes + lane + k % 4, bit % 8, static_cast<int>(2 * (k / 4))};
}
// Numbers of a column in a step that code_at knows.
inline int64_t numbers_of_step(WeightKind kind) { return bits_of(kind) == 6 ? 16 : 8; }

// What codes have in common that are multiplied with rows as they are.
struct PlainRows {
    using Sum = Floats;
    static constexpr bool kHasInt8Rows = false;

    TRIPTYCH_INLINE static Floats start() { return zeros(); }
    TRIPTYCH_INLINE static Floats finished(Floats sum, const uint32_t*, int) { return sum; }
};

// The same with rows of int8.
struct Int8Rows {
    using Sum = WordSums;
    static constexpr bool kHasInt8Rows = true;

    // A sum that began with another number than zero would take a register more.
    TRIPTYCH_INLINE static WordSums start() { return WordSums{}; }
    // others: of each row what is added, then of each row the scale.
    TRIPTYCH_INLINE static Floats finished(WordSums sum, const uint32_t* others, int distance) {
        const Words addend = splat_word(static_cast<int32_t>(others[0]));
        const Words scale = splat_word(static_cast<int32_t>(others[distance]));
        return mul(to_floats(add(as_words(sum), addend)), as_floats(scale));
    }
};

}  // namespace
}  // namespace triptych

#include TRIPTYCH_OF_ISA(codes.h)

namespace triptych {
namespace {

struct GroupTile {
    const uint32_t* rows;
    const char* panel;
    int64_t panel_bytes, num_groups, num_steps;  // num_steps: of a group
    bool has_minima, are_fp32;
    // Prefetch distance in bytes; `distance_after` from group `turn` on, where that would be behind the panels.
    int64_t turn, distance, distance_after;
};

TRIPTYCH_INLINE Floats load_scales(const char* from, int first_column, bool are_fp32) {
    return are_fp32 ? load(reinterpret_cast<const float*>(from) + first_column)
                    : widen_fp16(load_halves(reinterpret_cast<const uint16_t*>(from) + first_column));
}

template <class Body, int... parts>
TRIPTYCH_INLINE void for_each_part(const Body& body, std::integer_sequence<int, parts...>) {
    (body(std::integral_constant<int, parts>()), ...);
}

// sums: [R][kPanelColumns P], zeros before.
template <class Codes, int R, int P>
[[gnu::noinline]] void multiply_groups(const Codes& codes, const GroupTile& tile, float* sums) {
    const uint32_t* rows = tile.rows;
    const char* panel = tile.panel;
    const int64_t scale_bytes = kPanelColumns * (tile.are_fp32 ? 4 : 2);
    for (int64_t group = 0; group < tile.num_groups; ++group) {
        const int64_t distance = group < tile.turn ? tile.distance : tile.distance_after;
        typename Codes::Sum parts[R][kVectors * P];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kVectors * P; ++j) {
                parts[r][j] = Codes::start();
            }
        }
        for (int64_t step = 0; step < tile.num_steps; ++step, panel += Codes::kStep) {
            const auto add_part = [&](auto part) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int first = 0; first < P; first += kPanelsLoaded) {
                    constexpr int kLoaded = P < kPanelsLoaded ? P : kPanelsLoaded;
                    Words lanes[kLoaded][kVectors];
#pragma GCC unroll 8
                    for (int p = 0; p < kLoaded; ++p) {
                        const char* from = panel + (first + p) * tile.panel_bytes;
                        codes.template load_part<part.value>(from, lanes[p]);
                        if (part.value == 0) {
#pragma GCC unroll 2
                            for (int64_t line = 0; line < Codes::kStep; line += 64) {
                                _mm_prefetch(from + distance + line, _MM_HINT_T0);
                            }
                        }
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const Words x = splat_word(static_cast<int>(rows[r]));
#pragma GCC unroll 8
                        for (int p = 0; p < kLoaded; ++p) {
#pragma GCC unroll 2
                            for (int v = 0; v < kVectors; ++v) {
                                auto& sum = parts[r][kVectors * (first + p) + v];
                                sum = codes.add_product(sum, x, lanes[p][v]);
                            }
                        }
                    }
                }
                rows += R;
            };
            for_each_part(add_part, std::make_integer_sequence<int, Codes::kParts>());
        }
        const uint32_t* others = rows;
        rows += Codes::kHasInt8Rows ? 2 * R : 0;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const char* scales = panel + p * tile.panel_bytes;
            _mm_prefetch(scales + distance, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                const Floats scale = load_scales(scales, 16 * v, tile.are_fp32);
                float* sum = sums + p * kPanelColumns + 16 * v;
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r, sum += kPanelColumns * P) {
                    const Floats part = Codes::finished(parts[r][kVectors * p + v], others + r, R);
                    store(sum, fmadd(part, scale, load(sum)));
                }
                if (tile.has_minima) {
                    const Floats minimum = load_scales(scales + scale_bytes, 16 * v, tile.are_fp32);
                    sum = sums + p * kPanelColumns + 16 * v;
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r, sum += kPanelColumns * P) {
                        const Floats x = as_floats(splat_word(static_cast<int>(rows[r])));
                        store(sum, fnmadd(minimum, x, load(sum)));
                    }
                }
            }
        }
        panel += scale_bytes * (tile.has_minima ? 2 : 1);
        rows += tile.has_minima ? R : 0;
    }
}

// The product of a tile, for each number of rows.
template <class Codes>
struct GroupProducts {
    using Multiply = void (*)(const Codes&, const GroupTile&, float*);

#define TRIPTYCH_CASE(R) multiply_groups<Codes, R, panels_at_once(R)>,
    static constexpr Multiply kWide[] = {TRIPTYCH_EACH_TILE_ROWS(TRIPTYCH_CASE)};
#undef TRIPTYCH_CASE
#define TRIPTYCH_CASE(R) multiply_groups<Codes, R, 1>,
    static constexpr Multiply kNarrow[] = {TRIPTYCH_EACH_TILE_ROWS(TRIPTYCH_CASE)};
#undef TRIPTYCH_CASE
};

// Passes sums [num_rows][kPanelColumns P] on to the store, a row at a time.
template <int P, class Store>
void store_tile(const float* sums, int num_rows, int64_t first_row, int64_t panel, const Store& store) {
    for (int r = 0; r < num_rows; ++r, sums += kPanelColumns * P) {
        Floats values[1][kVectors * P];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors * P; ++j) {
            values[0][j] = load(sums + 16 * j);
        }
        store.template operator()<1, P>(first_row + r, panel, values);
    }
}

constexpr int64_t kTileSums = kPanelColumns * std::max(kMaxTileRows, 12);

// Panels [first, end) of a weight times a chunk of packed rows.
template <class Codes, class Store>
void multiply_by_groups(const PackedWeight& weight, const RowBlocks& blocks, const uint32_t* rows, int64_t first,
                        int64_t end, const Store& store) {
    using Products = GroupProducts<Codes>;
    const Codes codes(weight.groups.table);
    const int64_t panel_bytes = weight.panel_bytes(), num_units = weight.num_units();
    const auto run_tile = [&](int64_t block, int64_t panel, auto num_panels, int64_t ahead) {
        constexpr int P = num_panels.value;
        const int num_rows = blocks.size(block);
        const int64_t first_row = blocks.first_row(block);
        GroupTile tile;
        tile.rows = rows + first_row * num_units;
        tile.panel = weight.panels + panel * panel_bytes;
        tile.panel_bytes = panel_bytes;
        tile.num_groups = weight.num_groups();
        tile.num_steps = weight.groups.size / Codes::kNumbers;
        tile.has_minima = weight.groups.has_minima;
        tile.are_fp32 = weight.groups.are_fp32;
        tile.turn = (panel_bytes - std::min(ahead, panel_bytes)) / weight.group_bytes();
        tile.distance = ahead;
        tile.distance_after = ahead + (P - 1) * panel_bytes;
        alignas(64) float sums[kTileSums] = {};
        for (int r = 0; r < num_rows; ++r) {
            store.template prefetch<1, P>(first_row + r, panel);
        }
        (P > 1 ? Products::kWide : Products::kNarrow)[num_rows - 1](codes, tile, sums);
        store_tile<P>(sums, num_rows, first_row, panel, store);
    };
    using One = std::integral_constant<int, 1>;
    if (blocks.num_blocks == 1) {
        const int64_t at_once = panels_at_once(blocks.size(0));
        const int64_t ahead = std::min(kPrefetchBytes / at_once, panel_bytes);
        int64_t panel = first;
        for (; at_once > 1 && panel + at_once <= end; panel += at_once) {
            at_once == 4 ? run_tile(0, panel, std::integral_constant<int, 4>(), ahead)
                         : run_tile(0, panel, std::integral_constant<int, 2>(), ahead);
        }
        for (; panel < end; ++panel) {
            run_tile(0, panel, One(), ahead);
        }
        return;
    }
    // The first block prefetches the next panel, the others what is in the cache.
    for (int64_t panel = first; panel < end; ++panel) {
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            run_tile(block, panel, One(), block == 0 ? panel_bytes : 0);
        }
    }
}

// What a stored code stands for.
inline float number_of(const PackedWeight& weight, int code) {
    switch (weight.kind) {
        case WeightKind::kCodes4:
            return number_of_code4(weight.groups.table, code);
        case WeightKind::kCodes8:
            return number_of_code8(weight.groups.table, code);
        case WeightKind::kCodes4ForInt8:
            return static_cast<float>(whole_of_code4(weight.groups.table, code) + weight.groups.base);
        case WeightKind::kCodes6ForInt8:
            return static_cast<float>(code + weight.groups.base);
        default:
            return static_cast<float>(whole_of_code8(code) + weight.groups.base);
    }
}

// Row n of a weight of codes: its numbers in the order of the inputs, times row_scale.
inline void take_weight_row(const PackedWeight& weight, int64_t n, float row_scale, float* out) {
    const int column = static_cast<int>(n % kPanelColumns);
    const int64_t size = weight.groups.size, at_once = numbers_of_step(weight.kind);
    const int64_t step_bytes = weight.code_bytes() * at_once / size;
    const char* group = weight.panels + n / kPanelColumns * weight.panel_bytes();
    for (int64_t first = 0; first < weight.in_features; first += size, group += weight.group_bytes()) {
        const auto scale_at = [&](int64_t offset) {
            float lanes[16];
            store(lanes, load_scales(group + offset, column / 16 * 16, weight.groups.are_fp32));
            return lanes[column % 16];
        };
        const float scale = scale_at(weight.code_bytes());
        const float minimum = weight.groups.has_minima ? scale_at(weight.code_bytes() + weight.scale_bytes()) : 0.0f;
        for (int64_t k = 0; k < std::min(size, weight.in_features - first); ++k) {
            const CodeAt at = code_at(weight.kind, column, k % at_once);
            const int code = at.code(group + k / at_once * step_bytes, bits_of(weight.kind));
            const int64_t to = weight.groups.order == nullptr ? first + k : weight.groups.order[first + k];
            out[to] = (number_of(weight, code) * scale - minimum) * row_scale;
        }
    }
}

// The same; rows and weight may be of any kind with groups.
template <class Store>
void multiply_codes(const PackedWeight& weight, const RowBlocks& blocks, const uint32_t* rows, int64_t first,
                    int64_t end, const Store& store) {
    if (weight.form == RowForm::kInt8) {
        switch (bits_of(weight.kind)) {
            case 4:
                return multiply_by_groups<Codes4ForInt8>(weight, blocks, rows, first, end, store);
            case 6:
                return multiply_by_groups<Codes6ForInt8>(weight, blocks, rows, first, end, store);
            default:
                return multiply_by_groups<Codes8ForInt8>(weight, blocks, rows, first, end, store);
        }
    }
    const auto multiply_as = [&](auto rows_are_fp32) {
        constexpr bool kRowsAreFp32 = rows_are_fp32.value;
        weight.kind == WeightKind::kCodes4
            ? multiply_by_groups<Codes4<kRowsAreFp32>>(weight, blocks, rows, first, end, store)
            : multiply_by_groups<Codes8<kRowsAreFp32>>(weight, blocks, rows, first, end, store);
    };
    weight.rows_are_fp32 ? multiply_as(std::true_type()) : multiply_as(std::false_type());
}

}  // namespace
}  // namespace triptych
