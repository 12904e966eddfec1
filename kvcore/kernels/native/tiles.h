// What the fp32 products with packed codes share: masks, the inner product of a tile, threads. For processors with AVX-512.
#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST_ROWS 6  // rows whose sums for four vectors of codes are held in registers at once

// The thread pool of the OpenMP library that torch has loaded; where there is none, the calling thread does the work.
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

static inline void in_threads(void (*work)(void *), void *job, int threads) {
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(work, job, (unsigned)threads, 0);
    else
        work(job);
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t to_multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

static inline __mmask64 first_bytes(int64_t count) {
    return count >= 64 ? ~(__mmask64)0 : count <= 0 ? 0 : (((__mmask64)1 << count) - 1);
}

static inline __mmask16 first_floats(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1 << count) - 1);
}

static inline __m512 numbers(const uint8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)codes)));
}

// SUMS(r, v) += FACTOR(r) * CODE(v), for every step: the sums stay in registers
#define ACCUMULATE(ROWS, STEPS, SUMS, CODE, FACTOR)                                                   \
    case ROWS: {                                                                                      \
        __m512 sum[ROWS][4];                                                                          \
        for (int r = 0; r < ROWS; r++)                                                                \
            for (int v = 0; v < 4; v++) sum[r][v] = _mm512_load_ps(SUMS(r, v));                       \
        for (int64_t step = 0; step < STEPS; step++) {                                                \
            __m512 code[4];                                                                           \
            for (int v = 0; v < 4; v++) code[v] = numbers(CODE(v, step));                             \
            _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                  \
                const __m512 factor = FACTOR(r, step);                                                \
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_fmadd_ps(factor, code[v], sum[r][v]);  \
            }                                                                                         \
        }                                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                \
            for (int v = 0; v < 4; v++) _mm512_store_ps(SUMS(r, v), sum[r][v]);                       \
        break;                                                                                        \
    }
#define FOR_ROWS(COUNT, ...)                                                                         \
    switch (COUNT) {                                                                                 \
        ACCUMULATE(1, __VA_ARGS__) ACCUMULATE(2, __VA_ARGS__) ACCUMULATE(3, __VA_ARGS__)             \
        ACCUMULATE(4, __VA_ARGS__) ACCUMULATE(5, __VA_ARGS__) ACCUMULATE(6, __VA_ARGS__)             \
    }

// sums[r * sum_stride + 0:64] += rows[r] . codes[:, 0:64], lines of codes `side` bytes apart
static void tile_logits(int num_rows, const uint8_t *codes, int64_t side, int64_t count, const float *rows,
                        int64_t stride, float *sums, int64_t sum_stride) {
#define LOGITS_SUMS(r, v) (sums + (r) * sum_stride + 16 * (v))
#define LOGITS_CODE(v, k) (codes + (k) * side + 16 * (v))
#define LOGITS_FACTOR(r, k) _mm512_set1_ps(rows[(r) * stride + (k)])
    FOR_ROWS(num_rows, count, LOGITS_SUMS, LOGITS_CODE, LOGITS_FACTOR)
}

// Rows of a block: as few blocks as possible, as even as possible.
static int64_t block_rows(int64_t rows) {
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return (rows + blocks - 1) / blocks;
}
