// Products of signed 8-bit digits with codes of 1, 2 or 4 bits that are still packed in bytes, for processors with
// AVX-512 VNNI. Products take codes apart in registers: nothing of the size of the unpacked codes is ever written.
//
// A plane is uint8 [n, K]: n byte rows of K coefficients. Field f of a byte (bits f * width and up) is the code of token
// f * n + i in byte row i. Digits are int8 [rows, stride], sums int32 [rows, out_stride], to which is added. All sums are
// exact in 32 bits. Functions return 1 when there is no memory.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ROWS 12   // rows whose sums (of two vectors of codes) are held in registers at once
#define TOKENS 256     // byte rows that are interleaved at a time by plane_mix
#define AHEAD 64       // byte rows from the one in hand to the one that is fetched into the cache

// Whether this processor has what the products need.
int plane_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

static inline __mmask64 first_bytes(int64_t count) {
    return count >= 64 ? ~(__mmask64)0 : count <= 0 ? 0 : (((__mmask64)1 << count) - 1);
}

static inline int32_t four_bytes(const int8_t *from, int64_t count) {
    int32_t word = 0;
    if (count >= 4)
        memcpy(&word, from, 4);
    else
        for (int64_t i = 0; i < count; i++) ((int8_t *)&word)[i] = from[i];
    return word;
}

// sums[r] += codes . words[step * ROWS + r], four bytes a lane, for two vectors of codes: a word is loaded once for both
#define ACCUMULATE(ROWS)                                                                          \
    case ROWS: {                                                                                  \
        __m512i sum[ROWS], other[ROWS];                                                           \
        _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++) {                                 \
            sum[r] = _mm512_loadu_si512(sums + 16 * r);                                           \
            other[r] = _mm512_loadu_si512(other_sums + 16 * r);                                   \
        }                                                                                         \
        for (int64_t step = 0; step < steps; step++) {                                            \
            const __m512i code = _mm512_and_si512(                                                \
                _mm512_srl_epi32(_mm512_loadu_si512(bytes + step * distance), shift), mask);      \
            const __m512i code2 = _mm512_and_si512(                                               \
                _mm512_srl_epi32(_mm512_loadu_si512(other_bytes + step * distance), shift2), mask); \
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++) {                             \
                const __m512i word = _mm512_set1_epi32(words[step * ROWS + r]);                   \
                sum[r] = _mm512_dpbusd_epi32(sum[r], code, word);                                 \
                other[r] = _mm512_dpbusd_epi32(other[r], code2, word);                            \
            }                                                                                     \
        }                                                                                         \
        _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++) {                                 \
            _mm512_storeu_si512(sums + 16 * r, sum[r]);                                           \
            _mm512_storeu_si512(other_sums + 16 * r, other[r]);                                   \
        }                                                                                         \
        break;                                                                                    \
    }

static void accumulate(int rows, const uint8_t *bytes, const uint8_t *other_bytes, int64_t distance, int64_t steps,
                       int place, int other_place, int width, const int32_t *words, int32_t *sums,
                       int32_t *other_sums) {
    const __m128i shift = _mm_cvtsi32_si128(place), shift2 = _mm_cvtsi32_si128(other_place);
    const __m512i mask = _mm512_set1_epi8((char)((1 << width) - 1));
    switch (rows) {
        ACCUMULATE(1) ACCUMULATE(2) ACCUMULATE(3) ACCUMULATE(4) ACCUMULATE(5) ACCUMULATE(6)
        ACCUMULATE(7) ACCUMULATE(8) ACCUMULATE(9) ACCUMULATE(10) ACCUMULATE(11) ACCUMULATE(12)
    }
}

// 16 vectors of 16 words: rows become columns
static inline void transpose(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 8; i++) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

// Rows of a block: as few blocks as possible, as even as possible.
static int block_rows(int64_t rows) {
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return (int)((rows + blocks - 1) / blocks);
}

// out[r, f * n + i] += sum over k of digits[r, k] * code(f, i, k)
int plane_logits(const uint8_t *packed, int64_t n, int64_t count, int width, const int8_t *digits, int64_t stride,
                 int64_t rows, int32_t *out, int64_t out_stride) {
    const int64_t steps = (count + 3) / 4, wide = (count + 63) / 64, fields = 8 / width;
    const int size = block_rows(rows);
    const int64_t blocks = (rows + size - 1) / size;
    int32_t *words = calloc((size_t)(blocks * steps * size), 4);
    uint8_t *tile = aligned_alloc(64, (size_t)(wide * 16 * 64));
    if (!words || !tile) {
        free(words), free(tile);
        return 1;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t step = 0; step < steps; step++)
            words[(r / size * steps + step) * size + r % size] =
                four_bytes(digits + r * stride + 4 * step, count - 4 * step);
    for (int64_t first = 0; first < n; first += 16) {
        const int64_t live = n - first < 16 ? n - first : 16;
        for (int64_t part = 0; part < wide; part++) {
            __m512i x[16];
            const __mmask64 inside = first_bytes(count - 64 * part);
            for (int i = 0; i < 16; i++) {
                const uint8_t *row = packed + (first + i) * count + 64 * part;
                x[i] = i < live ? _mm512_maskz_loadu_epi8(inside, row) : _mm512_setzero_si512();
                _mm_prefetch(row + AHEAD * count, _MM_HINT_T0);
            }
            transpose(x);
            for (int i = 0; i < 16; i++) _mm512_store_si512(tile + (part * 16 + i) * 64, x[i]);
        }
        for (int64_t field = 0; field < fields; field += 2)
            for (int64_t block = 0; block < blocks; block++) {
                int32_t sums[2][16 * MOST_ROWS] = {{0}};
                accumulate(size, tile, tile, 64, steps, (int)field * width, (int)(field + 1) * width, width,
                           words + block * steps * size, sums[0], sums[1]);
                const int64_t last = rows - block * size < size ? rows - block * size : size;
                for (int64_t r = 0; r < last; r++)
                    for (int64_t next = 0; next < 2; next++) {
                        int32_t *to = out + (block * size + r) * out_stride + (field + next) * n + first;
                        const __mmask16 there = (__mmask16)((1 << live) - 1);
                        const __m512i more = _mm512_loadu_si512(sums[next] + 16 * r);
                        const __m512i sum = _mm512_add_epi32(_mm512_maskz_loadu_epi32(there, to), more);
                        _mm512_mask_storeu_epi32(to, there, sum);
                    }
            }
    }
    free(words), free(tile);
    return 0;
}

// out[r, k] += sum over f and i of digits[r, f * n + i] * code(f, i, k)
int plane_mix(const uint8_t *packed, int64_t n, int64_t count, int width, const int8_t *digits, int64_t stride,
              int64_t rows, int32_t *out, int64_t out_stride) {
    const int64_t fours = (n + 3) / 4, wide = (count + 63) / 64, fields = 8 / width;
    const int size = block_rows(rows);
    const int64_t blocks = (rows + size - 1) / size;
    int32_t *words = calloc((size_t)(blocks * fields * (TOKENS / 4) * size), 4);  // of a tile; 0 where no row is
    int32_t *sums = calloc((size_t)(wide * 4 * blocks * size), 64);
    uint8_t *tile = aligned_alloc(64, TOKENS / 4 * 4 * 64);
    if (!words || !sums || !tile) {
        free(words), free(sums), free(tile);
        return 1;
    }
    for (int64_t first = 0; first < fours; first += TOKENS / 4) {
        const int64_t steps = fours - first < TOKENS / 4 ? fours - first : TOKENS / 4;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t field = 0; field < fields; field++) {
                int32_t *to = words + (r / size * fields + field) * (TOKENS / 4) * size + r % size;
                const int8_t *from = digits + r * stride + field * n + 4 * first;
                for (int64_t step = 0; step < steps; step++)
                    to[step * size] = four_bytes(from + 4 * step, n - 4 * (first + step));
            }
        for (int64_t part = 0; part < wide; part++) {
            const __mmask64 inside = first_bytes(count - 64 * part);
            for (int64_t step = 0; step < steps; step++) {
                __m512i x[4];
                for (int i = 0; i < 4; i++) {
                    const int64_t row = 4 * (first + step) + i;
                    const uint8_t *from = packed + row * count + 64 * part;
                    x[i] = row < n ? _mm512_maskz_loadu_epi8(inside, from) : _mm512_setzero_si512();
                    _mm_prefetch(from + AHEAD * count, _MM_HINT_T0);
                }
                const __m512i low = _mm512_unpacklo_epi8(x[0], x[1]), high = _mm512_unpackhi_epi8(x[0], x[1]);
                const __m512i low2 = _mm512_unpacklo_epi8(x[2], x[3]), high2 = _mm512_unpackhi_epi8(x[2], x[3]);
                uint8_t *to = tile + step * 256;
                _mm512_store_si512(to, _mm512_unpacklo_epi16(low, low2));
                _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(low, low2));
                _mm512_store_si512(to + 128, _mm512_unpacklo_epi16(high, high2));
                _mm512_store_si512(to + 192, _mm512_unpackhi_epi16(high, high2));
            }
            for (int64_t block = 0; block < blocks; block++)
                for (int quarter = 0; quarter < 4; quarter += 2) {
                    int32_t *mine = sums + ((part * 4 + quarter) * blocks + block) * size * 16;
                    for (int64_t field = 0; field < fields; field++)
                        accumulate(size, tile + 64 * quarter, tile + 64 * (quarter + 1), 256, steps,
                                   (int)field * width, (int)field * width, width,
                                   words + (block * fields + field) * (TOKENS / 4) * size, mine,
                                   mine + blocks * size * 16);
                }
        }
    }
    // lane 4 L + e of a quarter is coefficient 16 L + 4 quarter + e of its 64
    for (int64_t part = 0; part < wide; part++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int64_t r = 0; r < rows; r++) {
                const int32_t *from = sums + (((part * 4 + quarter) * blocks + r / size) * size + r % size) * 16;
                for (int lane = 0; lane < 16; lane++) {
                    const int64_t k = 64 * part + 16 * (lane / 4) + 4 * quarter + lane % 4;
                    if (k < count) out[r * out_stride + k] += from[lane];
                }
            }
    free(words), free(sums), free(tile);
    return 0;
}

// out[b, f * n + i, start + k] |= code(b, f, i, first + k) << shift, for runs (start, coefficients, shift) of the plane's
// coefficients in order; the last tokens of a plane, from `tokens` on, are padding
void plane_codes(const uint8_t *packed, int64_t batch, int64_t n, int64_t count, int width, const int64_t *runs,
                 int64_t num_runs, uint8_t *out, int64_t tokens, int64_t stride) {
    const __m512i mask = _mm512_set1_epi8((char)((1 << width) - 1));
    for (int64_t row = 0; row < batch * tokens; row++) {
        const int64_t b = row / tokens, token = row % tokens;
        const uint8_t *from = packed + (b * n + token % n) * count;
        const __m128i place = _mm_cvtsi32_si128((int)(token / n) * width);
        for (int64_t run = 0; run < num_runs; run++) {
            const int64_t length = runs[3 * run + 1];
            const __m128i shift = _mm_cvtsi32_si128((int)runs[3 * run + 2]);
            uint8_t *to = out + row * stride + runs[3 * run];
            for (int64_t k = 0; k < length; k += 64) {
                const __mmask64 inside = first_bytes(length - k);
                const __m512i bytes = _mm512_srl_epi32(_mm512_maskz_loadu_epi8(inside, from + k), place);
                const __m512i code = _mm512_sll_epi32(_mm512_and_si512(bytes, mask), shift);
                _mm512_mask_storeu_epi8(to + k, inside, _mm512_or_si512(_mm512_maskz_loadu_epi8(inside, to + k), code));
            }
            from += length;
        }
    }
}
