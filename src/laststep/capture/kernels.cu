// Copies and fingerprints over tables of addresses; one block of threads works on one tile.
// Compiled at run time by NVRTC, without any header. Callers keep tiles at 256 KiB or less.

template <typename Unit>
__device__ void copy_tile(const unsigned long long* sources, const long long* offsets,
                          const int* counts, unsigned char* target) {
    const Unit* from = reinterpret_cast<const Unit*>(sources[blockIdx.x]);
    Unit* into = reinterpret_cast<Unit*>(target + offsets[blockIdx.x]);
    const int count = counts[blockIdx.x], step = blockDim.x;
    int at = threadIdx.x;
    // Many loads in flight hide the memory's latency; past the caches, which training uses.
    constexpr int depth = 8;
    for (; at + (depth - 1) * step < count; at += depth * step) {
        Unit held[depth];
#pragma unroll
        for (int i = 0; i < depth; ++i) held[i] = __ldcs(from + at + i * step);
#pragma unroll
        for (int i = 0; i < depth; ++i) __stcs(into + at + i * step, held[i]);
    }
    for (; at < count; at += step) __stcs(into + at, __ldcs(from + at));
}

#define COPY(NAME, UNIT)                                                                     \
    extern "C" __global__ void NAME(const unsigned long long* sources,                       \
                                    const long long* offsets, const int* counts,             \
                                    unsigned char* target) {                                 \
        copy_tile<UNIT>(sources, offsets, counts, target);                                   \
    }
COPY(copy_16, uint4)
COPY(copy_4, unsigned int)
COPY(copy_1, unsigned char)

// Two sums over the 32-bit words of each tile, counted from its first byte, wherever that lies; the
// last word is filled up with zeros. murmur3's finaliser is a bijection: a single changed word always
// changes the sum; the position in it keeps swaps and shifts from cancelling out.
__device__ void mix(unsigned int word, int at, unsigned long long& one, unsigned long long& two) {
    unsigned int mixed = word ^ (unsigned int)at * 0x9E3779B1u;
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
    mixed ^= mixed >> 16;
    unsigned int other = (mixed ^ (mixed >> 15)) * 0x2C1B3C6Du;
    other = (other ^ (other >> 12)) * 0x297A2D39u;
    one += mixed;
    two += other ^ (other >> 15);
}

// The same with words of 64 bits and sums that wrap at 64: two tiles that differ have equal sums by a
// chance of 2^-128, not only with much that differs but also with two words.
__device__ void mix_wide(unsigned long long word, unsigned long long at, unsigned long long& one,
                         unsigned long long& two) {
    unsigned long long mixed = word ^ (at + 1) * 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    mixed ^= mixed >> 31;
    unsigned long long other = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93ull;
    other = (other ^ (other >> 29)) * 0xC4CEB9FE1A85EC53ull;
    one += mixed;
    two += other ^ (other >> 33);
}

// `count` bytes at any address, as the low bytes of a word.
__device__ unsigned int gather_word(const unsigned char* bytes, int count) {
    unsigned int word = 0;
    for (int i = 0; i < count; ++i) word |= (unsigned int)__ldcs(bytes + i) << (8 * i);
    return word;
}

__device__ void add_up(unsigned long long one, unsigned long long two, unsigned long long* sums) {
    __shared__ unsigned long long ones[32], twos[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int reach = 16; reach; reach /= 2) {
        one += __shfl_down_sync(0xffffffffu, one, reach);
        two += __shfl_down_sync(0xffffffffu, two, reach);
    }
    if (lane == 0) {
        ones[warp] = one;
        twos[warp] = two;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int other = 1; other < blockDim.x / 32; ++other) {
            one += ones[other];
            two += twos[other];
        }
        sums[2 * blockIdx.x] = one;
        sums[2 * blockIdx.x + 1] = two;
    }
}

__device__ unsigned long long gather_wide(const unsigned char* bytes, int count) {
    unsigned long long word = 0;
    for (int i = 0; i < count; ++i) word |= (unsigned long long)__ldcs(bytes + i) << (8 * i);
    return word;
}

extern "C" __global__ void digest_tiles(const unsigned long long* addresses, const int* sizes,
                                        const int*, unsigned long long* sums) {
    const unsigned long long address = addresses[blockIdx.x];
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(address);
    const int size = sizes[blockIdx.x];
    const int count = size / 8, rest = size % 8;
    const int pairs = address % 16 == 0 ? count / 2 : 0;
    unsigned long long one = 0, two = 0;
#pragma unroll 4
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const ulonglong2 both = __ldcs(reinterpret_cast<const ulonglong2*>(bytes) + pair);
        mix_wide(both.x, 2 * pair, one, two);
        mix_wide(both.y, 2 * pair + 1, one, two);
    }
    for (int at = 2 * pairs + threadIdx.x; at < count; at += blockDim.x)
        mix_wide(gather_wide(bytes + 8 * at, 8), at, one, two);
    if (threadIdx.x == 0 && rest) mix_wide(gather_wide(bytes + 8 * count, rest), count, one, two);
    add_up(one, two, sums);
}

extern "C" __global__ void mix_tiles(const unsigned long long* addresses, const int* sizes,
                                     const int* firsts, unsigned long long* sums) {
    const unsigned long long address = addresses[blockIdx.x];
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(address);
    const unsigned int* words = reinterpret_cast<const unsigned int*>(address);
    const int size = sizes[blockIdx.x], first = firsts[blockIdx.x];
    const int count = size / 4, rest = size % 4;
    const int quads = address % 16 == 0 ? count / 4 : 0;
    const bool aligned = address % 4 == 0;
    unsigned long long one = 0, two = 0;
#pragma unroll 4
    for (int quad = threadIdx.x; quad < quads; quad += blockDim.x) {
        const uint4 four = __ldcs(reinterpret_cast<const uint4*>(words) + quad);
        const int at = first + 4 * quad;
        mix(four.x, at, one, two);
        mix(four.y, at + 1, one, two);
        mix(four.z, at + 2, one, two);
        mix(four.w, at + 3, one, two);
    }
    for (int at = 4 * quads + threadIdx.x; at < count; at += blockDim.x)
        mix(aligned ? __ldcs(words + at) : gather_word(bytes + 4 * at, 4), first + at, one, two);
    if (threadIdx.x == 0 && rest)
        mix(gather_word(bytes + 4 * count, rest), first + count, one, two);
    add_up(one, two, sums);
}
