// fp32 products of a few rows with the codes of planes, for processors with AVX-512: what torch would first write out as floats.
//
// A plane is [batch, n, count] bytes (see planes.c): token t of batch row b is field t / n of its byte row t % n. All planes of
// the codes have as many tokens. They belong to `heads` heads, `tokens` to each, one head after the other; what is left are
// fillings. A head has num_rows rows; rows, and lines of the sums, lie at equal distances.
// layout: for each plane its width, n, count, number of runs, and per run (first entry in a row, coefficients, place) of the
// plane's coefficients in order; a code counts 2^place times.
// scale, zero: fp16 [batch, heads * tokens, groups], a token's numbers are code * scale + zero in every `group` coefficients;
// NULL where codes are the numbers: planes of different `count` then are one group each.
// A function returns 1 without memory.
#include <string.h>

#include "tiles.h"

typedef struct {
    const uint8_t *packed;
    int64_t width, n, count, num_runs;
    const int64_t *runs;
    const uint16_t *scale, *zero;
    int64_t group, groups, heads, tokens;
} Codes;

// One plane of the codes; `layout` moves on to the next one. Zero points are added once, with the first plane.
static Codes plane_of(const uint8_t *const *packed, int64_t plane, int64_t batch_row, const int64_t **layout,
                      const uint16_t *scale, const uint16_t *zero, int64_t group, int64_t heads, int64_t tokens) {
    const int64_t *of = *layout, count = of[2], size = scale ? group : count, groups = (count + size - 1) / size;
    const int64_t before = batch_row * heads * tokens * groups;
    *layout += 4 + 3 * of[3];
    return (Codes){packed[plane] + batch_row * of[1] * count, of[0], of[1], count, of[3], of + 4,
                   scale ? scale + before : NULL, zero && plane == 0 ? zero + before : NULL, size, groups, heads, tokens};
}

// What a 32-bit lane whose lowest bits are a code stands for: the higher bits need no mask.
static inline __m512 code_table(int64_t width) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_and_si512(lanes, _mm512_set1_epi32((1 << width) - 1)));
}

static inline __m512 code_numbers(const uint8_t *bytes, __mmask16 inside, __m128i place, __m512 table) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(inside, bytes));
    return _mm512_permutexvar_ps(_mm512_srl_epi32(wide, place), table);
}

// `live` fp16 numbers (at most 16), `stride` apart
static inline __m512 halves(const uint16_t *from, int64_t stride, int64_t live) {
    if (stride == 1) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_floats(live), from));
    uint16_t side[16] = {0};
    for (int64_t i = 0; i < live && i < 16; i++) side[i] = from[i * stride];
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)side));
}

// The sums of 16 vectors, in their order.
static inline __m512 lane_sums(const float *vectors) {
    __m512 x[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_load_ps(vectors + 16 * i);
    for (int i = 0; i < 8; i++)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
}

static float row_sum(const float *x, int64_t length) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < length; k += 16)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first_floats(length - k), x + k));
    return _mm512_reduce_add_ps(sum);
}

#define INLINE static inline __attribute__((always_inline))
#define CALL_ROWS(COUNT, FUNCTION, ...)                                                                       \
    switch (COUNT) {                                                                                          \
        case 1: FUNCTION(1, __VA_ARGS__); break;                                                              \
        case 2: FUNCTION(2, __VA_ARGS__); break;                                                              \
        case 3: FUNCTION(3, __VA_ARGS__); break;                                                              \
        case 4: FUNCTION(4, __VA_ARGS__); break;                                                              \
        case 5: FUNCTION(5, __VA_ARGS__); break;                                                              \
        case 6: FUNCTION(6, __VA_ARGS__); break;                                                              \
    }

// vectors[(r * 16 + i) * 16 ...] = the 16 partial sums of rows[r] . code of token i, for `live` tokens of one field
INLINE void token_dots(const int num_rows, const uint8_t *bytes, int64_t distance, int64_t live, int64_t length,
                       __m128i place, __m512 table, const float *rows, int64_t stride, float *vectors) {
    for (int64_t i = 0; i < live; i++, bytes += distance) {
        __m512 sum[MOST_ROWS];
        for (int r = 0; r < num_rows; r++) sum[r] = _mm512_setzero_ps();
        for (int64_t k = 0; k < length; k += 16) {
            const __m512 code = code_numbers(bytes + k, first_floats(length - k), place, table);
            for (int r = 0; r < num_rows; r++)
                sum[r] = _mm512_fmadd_ps(_mm512_load_ps(rows + r * stride + k), code, sum[r]);
        }
        for (int r = 0; r < num_rows; r++) _mm512_store_ps(vectors + (r * 16 + i) * 16, sum[r]);
    }
}

// sums[r][0:64] += weights[r] . codes[:, 0:64] over `steps` tokens of one field
INLINE void token_sums(const int num_rows, const uint8_t *bytes, int64_t distance, int64_t steps, int64_t length,
                       __m128i place, __m512 table, const float *weights, int64_t stride, float *sums) {
    __m512 sum[MOST_ROWS][4];
    __mmask16 inside[4];
    for (int v = 0; v < 4; v++) inside[v] = first_floats(length - 16 * v);
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < 4; v++) sum[r][v] = _mm512_load_ps(sums + 64 * r + 16 * v);
    for (int64_t step = 0; step < steps; step++, bytes += distance) {
        __m512 code[4];
        for (int v = 0; v < 4; v++) code[v] = code_numbers(bytes + 16 * v, inside[v], place, table);
        for (int r = 0; r < num_rows; r++) {
            const __m512 factor = _mm512_set1_ps(weights[r * stride + step]);
            for (int v = 0; v < 4; v++) sum[r][v] = _mm512_fmadd_ps(factor, code[v], sum[r][v]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < 4; v++) _mm512_store_ps(sums + 64 * r + 16 * v, sum[r][v]);
}

// A row's entries in the plane's order, times their places; groups begin at multiples of `wide`.
static void to_plane(const Codes *codes, const float *row, float *to, int64_t wide) {
    int64_t column = 0;  // of the group
    for (int64_t run = 0; run < codes->num_runs; run++) {
        const float place = (float)(1 << codes->runs[3 * run + 2]), *from = row + codes->runs[3 * run];
        for (int64_t k = 0; k < codes->runs[3 * run + 1]; k++) {
            to[column] = from[k] * place;
            if (++column == codes->group) column = 0, to += wide;
        }
    }
}

// A block of one head's rows times one group of its tokens, from token `first` on, all in one field.
static void add_dots(const Codes *codes, int64_t b, int64_t first, int64_t live, int64_t g, const float *rows,
                     int64_t stride, int size, float *out, int64_t out_stride) {
    float vectors[MOST_ROWS * 256] __attribute__((aligned(64)));
    const int64_t start = g * codes->group, length = least(codes->group, codes->count - start);
    const int64_t at = (b * codes->heads * codes->tokens + first) * codes->groups + g;
    const uint8_t *bytes = codes->packed + (b * codes->n + first % codes->n) * codes->count + start;
    const __m128i place = _mm_cvtsi64_si128(first / codes->n * codes->width);
    CALL_ROWS(size, token_dots, bytes, codes->count, live, length, place, code_table(codes->width), rows, stride, vectors)
    const __mmask16 there = first_floats(live);
    for (int r = 0; r < size; r++) {
        __m512 sum = lane_sums(vectors + 256 * r);
        if (codes->scale) sum = _mm512_mul_ps(sum, halves(codes->scale + at, codes->groups, live));
        if (codes->zero) {
            const __m512 total = _mm512_set1_ps(row_sum(rows + r * stride, length));
            sum = _mm512_fmadd_ps(total, halves(codes->zero + at, codes->groups, live), sum);
        }
        float *to = out + r * out_stride;
        _mm512_mask_storeu_ps(to, there, _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), sum));
    }
}

static int add_plane_dot(const Codes *codes, int64_t batch, int64_t num_rows, const float *rows, int64_t stride,
                         float *out, int64_t out_stride) {
    const int64_t wide = to_multiple(codes->group, 16), length = codes->groups * wide, size = block_rows(num_rows);
    const int64_t tokens = codes->tokens;
    float *mine = aligned_alloc(64, (size_t)(num_rows * length) * 4);
    if (!mine) return 1;
    memset(mine, 0, (size_t)(num_rows * length) * 4);
    for (int64_t head = 0; head < batch * codes->heads; head++) {
        for (int64_t r = 0; r < num_rows; r++) to_plane(codes, rows + (head * num_rows + r) * stride, mine + r * length, wide);
        const int64_t begin = head % codes->heads * tokens;
        for (int64_t t = begin, live; t < begin + tokens; t += live) {
            live = least(16, least(codes->n - t % codes->n, begin + tokens - t));
            for (int64_t r = 0; r < num_rows; r += size)
                for (int64_t g = 0; g < codes->groups; g++)
                    add_dots(codes, head / codes->heads, t, live, g, mine + r * length + g * wide, length,
                             (int)least(size, num_rows - r), out + (head * num_rows + r) * out_stride + t - begin,
                             out_stride);
        }
    }
    free(mine);
    return 0;
}

// Weights of a head's tokens times their scales in one group; returns their sum over the zero points.
static float scaled_weights(const Codes *codes, int64_t at, const float *weights, float *to) {
    const int64_t groups = codes->groups;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t t = 0; t < codes->tokens; t += 16) {
        const int64_t live = codes->tokens - t;
        const __m512 mine = _mm512_maskz_loadu_ps(first_floats(live), weights + t);
        _mm512_store_ps(to + t, codes->scale ? _mm512_mul_ps(mine, halves(codes->scale + at + t * groups, groups, live)) : mine);
        if (codes->zero) sum = _mm512_fmadd_ps(mine, halves(codes->zero + at + t * groups, groups, live), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

// mixed[r, k] = constant[r] + sum over the head's tokens of weights[r, t] * code(t, k), for the coefficients of one group
static void group_sums(const Codes *codes, int64_t b, int64_t begin, int64_t g, const float *weights, int64_t stride,
                       int size, const float *constant, float *mixed) {
    const int64_t stop = least(codes->count, (g + 1) * codes->group), end = begin + codes->tokens;
    for (int64_t k = g * codes->group; k < stop; k += 64) {
        float sums[MOST_ROWS * 64] __attribute__((aligned(64)));
        for (int i = 0; i < size * 64; i++) sums[i] = constant[i / 64];
        for (int64_t t = begin, steps; t < end; t += steps) {
            steps = least(codes->n - t % codes->n, end - t);
            const uint8_t *bytes = codes->packed + (b * codes->n + t % codes->n) * codes->count + k;
            const __m128i place = _mm_cvtsi64_si128(t / codes->n * codes->width);
            CALL_ROWS(size, token_sums, bytes, codes->count, steps, stop - k, place, code_table(codes->width),
                      weights + t - begin, stride, sums)
        }
        for (int r = 0; r < size; r++)
            memcpy(mixed + r * codes->count + k, sums + 64 * r, (size_t)least(64, stop - k) * 4);
    }
}

static void add_from_plane(const Codes *codes, const float *mixed, float *out) {
    for (int64_t run = 0; run < codes->num_runs; run++) {
        const float place = (float)(1 << codes->runs[3 * run + 2]);
        float *to = out + codes->runs[3 * run];
        for (int64_t k = 0; k < codes->runs[3 * run + 1]; k++) to[k] += place * *mixed++;
    }
}

static int add_plane_sum(const Codes *codes, int64_t batch, int64_t num_rows, const float *weights, int64_t stride,
                         float *out, int64_t out_stride) {
    const int64_t wide = to_multiple(codes->tokens, 16), size = block_rows(num_rows);
    float *mine = aligned_alloc(64, (size_t)(size * wide) * 4), *mixed = malloc((size_t)(size * codes->count) * 4);
    if (!mine || !mixed) {
        free(mine), free(mixed);
        return 1;
    }
    for (int64_t first = 0, live; first < batch * codes->heads * num_rows; first += live) {
        const int64_t head = first / num_rows, begin = head % codes->heads * codes->tokens;
        live = least(size, (head + 1) * num_rows - first);
        for (int64_t g = 0; g < codes->groups; g++) {
            float constant[MOST_ROWS];
            for (int64_t r = 0; r < live; r++)
                constant[r] = scaled_weights(codes, head * codes->tokens * codes->groups + g, weights + (first + r) * stride,
                                             mine + r * wide);
            group_sums(codes, head / codes->heads, begin, g, mine, wide, (int)live, constant, mixed);
        }
        for (int64_t r = 0; r < live; r++)
            add_from_plane(codes, mixed + r * codes->count, out + (first + r) * out_stride);
    }
    free(mine), free(mixed);
    return 0;
}

// out[b, h, p, t] += sum over k of x[b, h, p, k] * number(first_row + b, h * tokens + t, k)
int plane_dot(const uint8_t *const *packed, int64_t num_planes, const int64_t *layout, const uint16_t *scale,
              const uint16_t *zero, int64_t group, int64_t first_row, int64_t batch, int64_t heads, int64_t tokens,
              int64_t num_rows, const float *x, int64_t stride, float *out, int64_t out_stride) {
    int failed = 0;
    for (int64_t plane = 0; plane < num_planes && !failed; plane++) {
        const Codes codes = plane_of(packed, plane, first_row, &layout, scale, zero, group, heads, tokens);
        failed = add_plane_dot(&codes, batch, num_rows, x, stride, out, out_stride);
    }
    return failed;
}

// out[b, h, p, k] += sum over t of x[b, h, p, t] * number(first_row + b, h * tokens + t, k)
int plane_sum(const uint8_t *const *packed, int64_t num_planes, const int64_t *layout, const uint16_t *scale,
              const uint16_t *zero, int64_t group, int64_t first_row, int64_t batch, int64_t heads, int64_t tokens,
              int64_t num_rows, const float *x, int64_t stride, float *out, int64_t out_stride) {
    int failed = 0;
    for (int64_t plane = 0; plane < num_planes && !failed; plane++) {
        const Codes codes = plane_of(packed, plane, first_row, &layout, scale, zero, group, heads, tokens);
        failed = add_plane_sum(&codes, batch, num_rows, x, stride, out, out_stride);
    }
    return failed;
}
