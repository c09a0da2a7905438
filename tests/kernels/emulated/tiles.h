// AMX's registers and what is done with them; see instructions.h.
#pragma once

namespace triptych {
namespace {

// A register that is used before it is configured, or with another shape than its partners', ends the process.
struct TileRegister {
    alignas(64) char bytes[16][64];
    int num_rows = 0, row_bytes = 0;
};

inline TileRegister& tile_of(int number) {
    static thread_local TileRegister registers[8];
    return registers[number];
}

TRIPTYCH_CALLED void _tile_release() {
    for (int number = 0; number < 8; ++number) tile_of(number) = TileRegister{};
}
TRIPTYCH_CALLED void _tile_loadconfig(const void* config) {
    _tile_release();
    const auto* bytes = static_cast<const uint8_t*>(config);
    demand(bytes[0] == 1);
    for (int number = 0; number < 8; ++number) {
        tile_of(number).row_bytes = bytes[16 + 2 * number] + 256 * bytes[17 + 2 * number];
        tile_of(number).num_rows = bytes[48 + number];
    }
}
TRIPTYCH_CALLED void _tile_zero(int number) {
    demand(tile_of(number).num_rows > 0);
    std::memset(tile_of(number).bytes, 0, sizeof(TileRegister::bytes));
}
TRIPTYCH_CALLED void _tile_loadd(int number, const void* from, int64_t stride) {
    _tile_zero(number);
    TileRegister& tile = tile_of(number);
    for (int row = 0; row < tile.num_rows; ++row)
        std::memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, tile.row_bytes);
}
TRIPTYCH_CALLED void _tile_stream_loadd(int number, const void* from, int64_t stride) {
    _tile_loadd(number, from, stride);
}
TRIPTYCH_CALLED void _tile_stored(int number, void* to, int64_t stride) {
    const TileRegister& tile = tile_of(number);
    demand(tile.num_rows > 0);
    for (int row = 0; row < tile.num_rows; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], tile.row_bytes);
}

// Even and odd numbers of a row are summed apart before they are added.
TRIPTYCH_CALLED void _tile_dpbf16ps(int to, int left, int right) {
    TileRegister& sums = tile_of(to);
    const TileRegister &a = tile_of(left), &b = tile_of(right);
    demand(sums.num_rows > 0 && a.num_rows == sums.num_rows && b.row_bytes == sums.row_bytes &&
           a.row_bytes == 4 * b.num_rows);
    for (int row = 0; row < sums.num_rows; ++row) {
        float total[16], even[16] = {}, odd[16] = {};
        uint16_t x[32], y[32];
        std::memcpy(x, a.bytes[row], 64);
        for (int pair = 0; pair < b.num_rows; ++pair) {
            std::memcpy(y, b.bytes[pair], 64);
            for (int column = 0; column < sums.row_bytes / 4; ++column) {
                even[column] = flushed_fma(from_bf16(x[2 * pair]), from_bf16(y[2 * column]), even[column]);
                odd[column] = flushed_fma(from_bf16(x[2 * pair + 1]), from_bf16(y[2 * column + 1]), odd[column]);
            }
        }
        std::memcpy(total, sums.bytes[row], 64);
        for (int column = 0; column < sums.row_bytes / 4; ++column)
            total[column] = flushed(flushed(total[column]) + flushed(even[column] + odd[column]));
        std::memcpy(sums.bytes[row], total, sums.row_bytes);
    }
}

}  // namespace
}  // namespace triptych
