// Runs cuda/pack.cuh on the host, every thread of a grid in turn, for tests/pack_kernel.rs. Words are 64-bit, as the
// host has them. First it says: bytes of a stripe, TILE_UNITS, BATCH, and the addresses of two areas of argv[1] bytes.
// Then for each order (kind, threads of the grid, first thread to run, how many, stripes, the table):
//   kind 0, followed by both areas' contents: copies, and answers with the second area;
//   kind 1: copies nothing, and answers with the accesses: how many, then (thread, from, to, shift) of each.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pack.cuh"

using kvxfer::u32;
using kvxfer::u64;

namespace {

// Notes where it would load and store.
struct Notes {
    template <u32 SHIFT>
    using Value = u64;

    std::vector<u64> words;
    u64 thread = 0;

    template <u32 SHIFT>
    u64 load(u64 at) {
        return at;
    }

    template <u32 SHIFT>
    void store(u64 at, u64 from) {
        words.insert(words.end(), {thread, from, at, SHIFT});
    }
};

bool take(void* to, size_t bytes) { return bytes == 0 || std::fread(to, bytes, 1, stdin) == 1; }

void give(const void* from, size_t bytes) {
    if ((bytes != 0 && std::fwrite(from, bytes, 1, stdout) != 1) || std::fflush(stdout) != 0) {
        std::exit(3);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const size_t size = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    void* const src = std::aligned_alloc(4096, size);
    void* const dst = std::aligned_alloc(4096, size);
    if (size == 0 || src == nullptr || dst == nullptr) {
        return 2;
    }
    const u64 hello[] = {sizeof(kvxfer::Stripe), kvxfer::TILE_UNITS, kvxfer::BATCH, reinterpret_cast<u64>(src),
                         reinterpret_cast<u64>(dst)};
    give(hello, sizeof hello);
    u64 order[5];
    while (take(order, sizeof order)) {
        const u64 kind = order[0], threads = order[1], begin = order[2], end = begin + order[3], count = order[4];
        std::vector<kvxfer::Stripe> stripes(count);
        std::vector<u64> first(count + 1);
        if (!take(stripes.data(), count * sizeof(kvxfer::Stripe)) || !take(first.data(), first.size() * sizeof(u64))) {
            return 2;
        }
        if (kind == 0) {
            if (!take(src, size) || !take(dst, size)) {
                return 2;
            }
            kvxfer::Memory memory;
            for (u64 thread = begin; thread < end; ++thread) {
                kvxfer::copy_stripes(stripes.data(), first.data(), count, thread, threads, memory);
            }
            give(dst, size);
        } else {
            Notes notes;
            for (notes.thread = begin; notes.thread < end; ++notes.thread) {
                kvxfer::copy_stripes(stripes.data(), first.data(), count, notes.thread, threads, notes);
            }
            const u64 accesses = notes.words.size() / 4;
            give(&accesses, sizeof accesses);
            give(notes.words.data(), notes.words.size() * sizeof(u64));
        }
    }
    return 0;
}
