// fp32 products of a few rows with packed lines (kvcore.quant.pack), for processors with AVX-512. Codes are taken apart in
// the processor's cache, a tile at a time: nothing of the size of the unpacked codes is ever written.
//
// A stream is `count` lines of `bits` * eighth bytes. A line is cut in eighths: the plane of width w is w pieces of eighth
// bytes, and byte j of its piece s holds, in field f, bits of the code of token (s + f * w) * eighth + j.
// Work is cut in the same items, and summed in the same order, for any number of threads. Functions return 1 without
// memory.
#include "tiles.h"

#define SIDE 256  // bytes of each eighth in a tile: 2048 tokens
#define LINES 64  // lines that lie unpacked at a time: 128 KB of codes
#define AHEAD 8   // lines from the one in hand to the one that is fetched into the cache

typedef struct {
    const uint8_t *codes;
    const float *rows;  // logits: [streams, num_rows, count]; mix: weights [streams, num_rows, tokens]
    float *out;         // logits: [streams, num_rows, 8 * eighth]; mix: [streams, tiles, num_rows, count]
    int64_t streams, count, eighth, num_rows, tokens;
    int bits;
    _Atomic int64_t next;  // the first item that no thread has taken
    _Atomic int failed;
} Job;

int lines_supported(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

// Whether there is a pool of threads: without one everything runs in the calling thread.
int lines_parallel(void) { return GOMP_parallel != 0; }

// Tiles of a stream.
int64_t lines_tiles(int64_t eighth) { return (eighth + SIDE - 1) / SIDE; }

// 64 bytes of each piece of a line -> the codes of 64 tokens of each eighth, at to[eighth * distance].
static inline void unpack_vector(const uint8_t *line, const uint8_t *later, int bits, int64_t eighth, __mmask64 inside,
                                 uint8_t *to, int64_t distance) {
    int shift = 0;
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        const __m512i mask = _mm512_set1_epi8((char)((1 << width) - 1));
        const __m128i left = _mm_cvtsi32_si128(shift);
        for (int piece = 0; piece < width; piece++, line += eighth, later += eighth) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(inside, line);
            _mm_prefetch(later, _MM_HINT_T0);
            for (int field = 0; field * width < 8; field++) {
                const __m512i moved = _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(field * width));
                __m512i code = _mm512_sll_epi16(_mm512_and_si512(moved, mask), left);
                uint8_t *at = to + (piece + field * width) * distance;
                if (shift) code = _mm512_or_si512(code, _mm512_load_si512(at));
                _mm512_store_si512(at, code);
            }
        }
        shift += width;
    }
}

// Line k of a stream from byte `start` of each eighth on, `live` bytes (zeros behind them).
static void unpack(const Job *job, int64_t stream, int64_t k, int64_t start, int64_t live, uint8_t *to,
                   int64_t distance) {
    const int64_t bytes = job->bits * job->eighth;
    const uint8_t *line = job->codes + (stream * job->count + k) * bytes + start;
    for (int64_t j = 0; j < live; j += 64)
        unpack_vector(line + j, line + j + AHEAD * bytes, job->bits, job->eighth, first_bytes(live - j), to + j,
                      distance);
}

// sums[r, v, lane] += weights[r] . codes[v], for four lines v of `tokens` tokens
static void tile_mix(int num_rows, const uint8_t *codes, int64_t tokens, const float *weights, float *sums) {
#define MIX_SUMS(r, v) (sums + ((r) * 4 + (v)) * 16)
#define MIX_CODE(v, t) (codes + (v) * tokens + 16 * (t))
#define MIX_FACTOR(r, t) _mm512_load_ps(weights + (r) * tokens + 16 * (t))
    FOR_ROWS(num_rows, tokens / 16, MIX_SUMS, MIX_CODE, MIX_FACTOR)
}

static float *zeroed(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) _mm512_store_ps(x + i, _mm512_setzero_ps());
    return x;
}

static void logits_item(const Job *job, int64_t stream, int64_t start, uint8_t *codes, float *sums) {
    const int64_t live = least(SIDE, job->eighth - start), side = to_multiple(live, 64);
    const int64_t size = block_rows(job->num_rows);
    zeroed(sums, job->num_rows * 8 * side);
    for (int64_t first = 0; first < job->count; first += LINES) {
        const int64_t count = least(LINES, job->count - first);
        for (int64_t k = 0; k < count; k++)
            unpack(job, stream, first + k, start, live, codes + k * side, LINES * side);
        for (int64_t r = 0; r < job->num_rows; r += size) {
            const float *rows = job->rows + (stream * job->num_rows + r) * job->count + first;
            for (int64_t at = 0; at < 8 * side; at += 64)
                tile_logits((int)least(size, job->num_rows - r), codes + at / side * LINES * side + at % side, side,
                            count, rows, job->count, sums + r * 8 * side + at, 8 * side);
        }
    }
    for (int64_t line = 0; line < job->num_rows * 8; line++) {
        float *to = job->out + (stream * job->num_rows * 8 + line) * job->eighth + start;
        for (int64_t i = 0; i < live; i += 16)
            _mm512_mask_storeu_ps(to + i, first_floats(live - i), _mm512_load_ps(sums + line * side + i));
    }
}

static void logits_work(void *argument) {
    Job *job = argument;
    const int64_t tiles = lines_tiles(job->eighth);
    uint8_t *codes = aligned_alloc(64, 8 * SIDE * LINES);
    float *sums = aligned_alloc(64, (size_t)(job->num_rows * 8 * SIDE) * sizeof(float));
    if (!codes || !sums) job->failed = 1;
    for (int64_t item; !job->failed && (item = job->next++) < job->streams * tiles;)
        logits_item(job, item / tiles, item % tiles * SIDE, codes, sums);
    free(codes), free(sums);
}

// The tile's weights, zeros where no token is: [num_rows, 8, side].
static void gather_weights(const Job *job, int64_t stream, int64_t start, int64_t live, int64_t side, float *to) {
    for (int64_t line = 0; line < job->num_rows * 8; line++)
        for (int64_t i = 0; i < side; i += 16) {
            const int64_t token = line % 8 * job->eighth + start + i;
            const float *from = job->rows + (stream * job->num_rows + line / 8) * job->tokens + token;
            const __mmask16 inside = first_floats(least(live - i, job->tokens - token));
            _mm512_store_ps(to + line * side + i, _mm512_maskz_loadu_ps(inside, from));
        }
}

static void mix_item(const Job *job, int64_t stream, int64_t start, uint8_t *codes, float *weights, float *out) {
    const int64_t live = least(SIDE, job->eighth - start), side = to_multiple(live, 64);
    const int64_t size = block_rows(job->num_rows);
    gather_weights(job, stream, start, live, side, weights);
    for (int64_t k = 0; k < job->count; k += 4) {
        const int64_t lines = least(4, job->count - k);
        for (int64_t v = 0; v < lines; v++) unpack(job, stream, k + v, start, live, codes + v * 8 * side, side);
        for (int64_t r = 0; r < job->num_rows; r += size) {
            const int64_t rows = least(size, job->num_rows - r);
            float sums[MOST_ROWS * 4 * 16] __attribute__((aligned(64)));
            zeroed(sums, rows * 4 * 16);
            tile_mix((int)rows, codes, 8 * side, weights + r * 8 * side, sums);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t v = 0; v < lines; v++)
                    out[(r + i) * job->count + k + v] = _mm512_reduce_add_ps(_mm512_load_ps(sums + (i * 4 + v) * 16));
        }
    }
}

static void mix_work(void *argument) {
    Job *job = argument;
    const int64_t tiles = lines_tiles(job->eighth);
    uint8_t *codes = aligned_alloc(64, 4 * 8 * SIDE);
    float *weights = aligned_alloc(64, (size_t)(job->num_rows * 8 * SIDE) * sizeof(float));
    if (!codes || !weights) job->failed = 1;
    for (int64_t item; !job->failed && (item = job->next++) < job->streams * tiles;)
        mix_item(job, item / tiles, item % tiles * SIDE, codes, weights,
                 job->out + item * job->num_rows * job->count);
    free(codes), free(weights);
}

// out[s, r, t] = sum over k of rows[s, r, k] * code(s, k, t), for all 8 * eighth tokens t
int lines_logits(const uint8_t *codes, int bits, int64_t streams, int64_t count, int64_t eighth, const float *rows,
                 int64_t num_rows, float *out, int threads) {
    Job job = {codes, rows, out, streams, count, eighth, num_rows, 8 * eighth, bits, 0, 0};
    in_threads(logits_work, &job, threads);
    return job.failed;
}

// sum over tiles of out[s, tile, r, k] = sum over t < tokens of weights[s, r, t] * code(s, k, t)
int lines_mix(const uint8_t *codes, int bits, int64_t streams, int64_t count, int64_t eighth, const float *weights,
              int64_t num_rows, int64_t tokens, float *out, int threads) {
    Job job = {codes, weights, out, streams, count, eighth, num_rows, tokens, bits, 0, 0};
    in_threads(mix_work, &job, threads);
    return job.failed;
}
