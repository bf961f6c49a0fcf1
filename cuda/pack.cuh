// The index arithmetic of pack, unpack and HND <-> NHD: which thread of a grid copies which bytes.
//
// Compiles as CUDA and as host C++, and includes nothing (NVRTC has no headers). rust/kvxfer-proto/src/plan/pack makes the
// tables; a test builds this file with the host's compiler, runs every thread, and compares with that module.
//
// There is one operation: copy stripes. A stripe is a number of equal rows, at equal distances on both sides. Packing is
// a copy whose destination's rows touch, unpacking one whose source's do, and a change of order one in which neither's
// do: the kernel need not know which.
#pragma once

#ifdef __CUDACC__
#define KVXFER_BOTH __host__ __device__ __forceinline__
#else
#define KVXFER_BOTH inline
#endif

namespace kvxfer {

typedef unsigned int u32;
typedef unsigned long long u64;

// `rows` rows of `row` bytes: row r goes from src + r * src_stride to dst + r * dst_stride, modulo 2^64, since addresses
// may have bit 63 set. Rust's `Stripe` is this, field for field.
struct Stripe {
    u64 src;
    u64 dst;
    u64 src_stride;
    u64 dst_stride;
    u64 row;
    u64 rows;
};

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "the table is made of 64-bit words");
static_assert(sizeof(Stripe) == 48, "Rust writes stripes of six words");
// NVRTC has no offsetof. Six words without padding are in order of declaration, which is that of an initialiser.
KVXFER_BOTH constexpr bool in_order(const Stripe& s) {
    return s.src == 0 && s.dst == 1 && s.src_stride == 2 && s.dst_stride == 3 && s.row == 4 && s.rows == 5;
}
static_assert(in_order(Stripe{0, 1, 2, 3, 4, 5}), "Rust's order of the words");

// Lanes of a warp, loads that each has in flight, and what a warp takes at once. An enum, because constants would be
// objects in the PTX.
enum : u32 { LANES = 32, BATCH = 4, TILE_UNITS = LANES * BATCH };

// One access of 2^SHIFT bytes.
template <u32 SHIFT>
struct Unit;
template <>
struct Unit<0> {
    typedef unsigned char Type;
};
template <>
struct Unit<1> {
    typedef unsigned short Type;
};
template <>
struct Unit<2> {
    typedef u32 Type;
};
template <>
struct Unit<3> {
    typedef u64 Type;
};
template <>
struct Unit<4> {
    struct alignas(16) Type {
        u64 low, high;
    };
};

// Loads and stores as they are. Addresses are of global memory: the device's, or the host's that is pinned and mapped; the
// compiler takes that from their coming out of the kernel's table. The host's test has another one, that notes them.
struct Memory {
    template <u32 SHIFT>
    using Value = typename Unit<SHIFT>::Type;

    template <u32 SHIFT>
    KVXFER_BOTH Value<SHIFT> load(u64 at) {
        return *reinterpret_cast<const Value<SHIFT>*>(at);
    }

    template <u32 SHIFT>
    KVXFER_BOTH void store(u64 at, const Value<SHIFT>& value) {
        *reinterpret_cast<Value<SHIFT>*>(at) = value;
    }
};

// The widest access to which every row of a stripe is aligned on both sides, and of which it is a multiple. It is worked
// out and not a field of the table, so that no table can make an access that is not aligned.
KVXFER_BOTH u32 unit_shift(const Stripe& s) {
    const u64 all = s.src | s.dst | s.src_stride | s.dst_stride | s.row;
    return all & 1 ? 0 : all & 2 ? 1 : all & 4 ? 2 : all & 8 ? 3 : 4;
}

// The last stripe whose first tile is not after `tile`. first[0] is 0, and first never falls.
KVXFER_BOTH u64 find(const u64* first, u64 count, u64 tile) {
    u64 low = 0, high = count;
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (first[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Carries a column that may be up to a warp past its row's end into the rows.
KVXFER_BOTH void wrap(u64& row, u64& column, u64 width) {
    if (width > LANES) {
        if (column >= width) {
            column -= width;
            row += 1;
        }
    } else {
        // Both are small, and a division of 64 bits is slow.
        const u32 rows = static_cast<u32>(column) / static_cast<u32>(width);
        column -= rows * width;
        row += rows;
    }
}

// The first `count` of a lane's units: all loads before the first store, so that they are in flight together.
template <u32 SHIFT, class Io>
KVXFER_BOTH void move_units(const u64 (&from)[BATCH], const u64 (&to)[BATCH], u32 count, Io& io) {
    typename Io::template Value<SHIFT> values[BATCH];
#pragma unroll
    for (u32 k = 0; k < BATCH; ++k) {
        if (k < count) {
            values[k] = io.template load<SHIFT>(from[k]);
        }
    }
#pragma unroll
    for (u32 k = 0; k < BATCH; ++k) {
        if (k < count) {
            io.template store<SHIFT>(to[k], values[k]);
        }
    }
}

// One lane's share of a stripe's tiles [tile, stop).
template <class Io>
KVXFER_BOTH void copy_tiles(const Stripe& s, u64 tile, u64 stop, u32 lane, Io& io) {
    const u32 shift = unit_shift(s);
    const u64 width = s.row >> shift;  // units of a row
    const u64 total = width * s.rows;
    u64 unit = tile * TILE_UNITS + lane;
    const u64 limit = total < stop * TILE_UNITS ? total : stop * TILE_UNITS;
    if (unit >= limit) {
        return;
    }
    // Where the lane's next unit is. The one after follows without another division of 64 bits.
    u64 row = unit / width, column = unit % width;
    for (; unit < limit; unit += TILE_UNITS) {
        u64 from[BATCH], to[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            from[k] = s.src + row * s.src_stride + (column << shift);
            to[k] = s.dst + row * s.dst_stride + (column << shift);
            column += LANES;
            wrap(row, column, width);
        }
        const u64 left = (limit - unit + LANES - 1) / LANES;
        const u32 count = left < BATCH ? static_cast<u32>(left) : BATCH;
        switch (shift) {
            case 0:
                move_units<0>(from, to, count, io);
                break;
            case 1:
                move_units<1>(from, to, count, io);
                break;
            case 2:
                move_units<2>(from, to, count, io);
                break;
            case 3:
                move_units<3>(from, to, count, io);
                break;
            default:
                move_units<4>(from, to, count, io);
        }
    }
}

// What thread `thread` of `threads` does. first[i] is the number of tiles before stripe i, first[count] all of them.
//
// Work is shared out by tiles, whatever stripes they are of: one long row and a thousand short ones load the warps alike.
// A warp's tiles are neighbours, so that it searches for its first stripe once and then walks.
template <class Io>
KVXFER_BOTH void copy_stripes(const Stripe* stripes, const u64* first, u64 count, u64 thread, u64 threads, Io& io) {
    const u64 warp = thread / LANES, warps = threads / LANES;
    if (count == 0 || warp >= warps) {
        return;
    }
    const u64 tiles = first[count];
    const u64 each = tiles / warps, rest = tiles % warps;
    u64 tile = warp * each + (warp < rest ? warp : rest);
    const u64 end = tile + each + (warp < rest ? 1 : 0);
    if (tile == end) {
        return;
    }
    const u32 lane = static_cast<u32>(thread % LANES);
    for (u64 at = find(first, count, tile); tile < end; ++at) {
        const u64 before = first[at], after = first[at + 1];
        const u64 stop = after < end ? after : end;
        copy_tiles(stripes[at], tile - before, stop - before, lane, io);
        tile = stop;
    }
}

}  // namespace kvxfer
