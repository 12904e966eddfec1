// Rows of floats as two signed 8-bit digits of each entry, for processors with AVX-512: what the integer products take.
// A function returns 1 without memory.
#include <math.h>
#include <string.h>

#include "tiles.h"

// The largest magnitude of a row; NaN when there is one.
static float largest_of(const float *x, int64_t count) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 missing = 0;
    for (int64_t k = 0; k < count; k += 16) {
        const __m512 mine = _mm512_maskz_loadu_ps(first_floats(count - k), x + k);
        missing |= _mm512_cmp_ps_mask(mine, mine, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(mine));
    }
    return missing ? NAN : _mm512_reduce_max_ps(most);
}

// [0, 1): multiples of the golden ratio, of 24 bits
static inline __m512 dither(int64_t first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i steps = _mm512_add_epi32(_mm512_set1_epi32((int)first), lanes);
    const __m512i turned = _mm512_mullo_epi32(steps, _mm512_set1_epi32((int)2654435769u));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(turned, 8)), _mm512_set1_ps(0x1p-24f));
}

// x = scale * (high + low / (2 * most)); low digits are rounded to the nearest, or up or down as the dither has it
static void write_digits(const float *x, int64_t count, int most, int dithered, int8_t *high, int8_t *low, float *scale) {
    const float found = largest_of(x, count), largest = found < 1e-30f ? 1e-30f : found;
    const __m512 factor = _mm512_set1_ps(1 / largest * (float)most), next = _mm512_set1_ps((float)(2 * most));
    *scale = largest / (float)most;
    for (int64_t k = 0; k < count; k += 16) {
        const __mmask16 there = first_floats(count - k);
        const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + k), factor);
        const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m512 rest = _mm512_mul_ps(_mm512_sub_ps(scaled, whole), next);
        if (dithered)
            rest = _mm512_roundscale_ps(_mm512_add_ps(rest, dither(k)), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        _mm_mask_storeu_epi8(high + k, there, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
        _mm_mask_storeu_epi8(low + k, there, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rest)));
    }
}

// Rows, `stride` apart, in the order of the planes (layout: see plane_floats.c) and times their places
// -> digits [2 * num_rows, count], the high ones of all rows first, and scales [num_rows].
int plane_digits(const float *rows, int64_t stride, int64_t num_rows, int64_t num_planes, const int64_t *layout,
                 int64_t count, int most, int8_t *digits, float *scale) {
    float *mine = malloc((size_t)count * 4);
    if (!mine) return 1;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t *of = layout;
        float *to = mine;
        for (int64_t plane = 0; plane < num_planes; plane++) {
            const int64_t *runs = of + 4;
            for (int64_t run = 0; run < of[3]; run++, runs += 3) {
                const float *from = rows + r * stride + runs[0], place = (float)(1 << runs[2]);
                for (int64_t k = 0; k < runs[1]; k++) to[k] = from[k] * place;
                to += runs[1];
            }
            of = runs;
        }
        write_digits(mine, count, most, 0, digits + r * count, digits + (num_rows + r) * count, scale + r);
    }
    free(mine);
    return 0;
}

// Weights of tokens in order, `stride` apart -> digits and scales, as above, of the tokens in eight lines, dithered: `main`
// tokens fill the first `columns` of the lines, one after the other, and each tile of `tile` tokens the next tile / 8 columns.
int line_digits(const float *weights, int64_t stride, int64_t num_rows, int64_t main, int64_t columns, int64_t tail,
                int64_t tile, int most, int8_t *digits, float *scale) {
    const int64_t count = 8 * columns + tail, part = tile / 8;
    float *mine = calloc((size_t)count, 4);
    if (!mine) return 1;
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = weights + r * stride;
        float *to = mine;
        for (int64_t line = 0; line < 8; line++) {
            const int64_t first = line * columns, live = first < main ? least(columns, main - first) : 0;
            memcpy(to, from + first, (size_t)live * 4);
            to += columns;
            for (int64_t t = main + line * part; t < main + tail; t += tile)
                for (int64_t i = 0; i < part; i++) *to++ = from[t + i];
        }
        write_digits(mine, count, most, 1, digits + r * count, digits + (num_rows + r) * count, scale + r);
    }
    free(mine);
    return 0;
}
