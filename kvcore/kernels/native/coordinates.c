// fp32 products of a few rows with tokens that are kept as a few coordinates of low precision, for processors with AVX-512.
//
// A stream is lines of `tokens` bytes. A part of `dims` coordinates of `bits` bits is n = dims * bits / 8 of them: the highest
// bits of line j hold coordinate j of every token, the next ones coordinate n + j, and so on. Parts follow one another.
// A function returns 1 without memory.
#include "tiles.h"

#define TOKENS 512  // of a tile

typedef struct {
    const uint8_t *codes;
    const float *rows, *offset;  // [streams, num_rows, count], [streams, num_rows]
    float *out;                  // [streams * num_rows, tokens], lines out_stride apart
    const int64_t *parts;        // dims and bits of each part
    int64_t num_parts, streams, tokens, num_rows, out_stride;
    int64_t count, bytes;  // coordinates and lines of all parts
    _Atomic int64_t next;  // the first item that no thread has taken
    _Atomic int failed;
} Job;

// One line of `live` tokens -> codes of 8 / bits coordinates, which lie `distance` apart.
static void unpack(const uint8_t *line, int bits, int64_t live, uint8_t *to, int64_t distance) {
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
    for (int64_t t = 0; t < live; t += 64) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes(live - t), line + t);
        _mm_prefetch(line + t + TOKENS, _MM_HINT_T0);  // the next tile's
        for (int field = 0; field * bits < 8; field++) {
            const __m512i moved = _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(8 - bits * (field + 1)));
            _mm512_store_si512(to + field * distance + t, _mm512_and_si512(moved, mask));
        }
    }
}

static void item(const Job *job, int64_t stream, int64_t start, uint8_t *codes, float *sums) {
    const int64_t live = least(TOKENS, job->tokens - start), size = block_rows(job->num_rows);
    const uint8_t *line = job->codes + stream * job->bytes * job->tokens + start;
    uint8_t *to = codes;
    for (int64_t part = 0; part < job->num_parts; part++) {
        const int64_t dims = job->parts[2 * part], bits = job->parts[2 * part + 1], lines = dims * bits / 8;
        for (int64_t j = 0; j < lines; j++, line += job->tokens)
            unpack(line, (int)bits, live, to + j * TOKENS, lines * TOKENS);
        to += dims * TOKENS;
    }
    for (int64_t r = 0; r < job->num_rows; r++) {
        const __m512 first = _mm512_set1_ps(job->offset[stream * job->num_rows + r]);
        for (int64_t t = 0; t < TOKENS; t += 16) _mm512_store_ps(sums + r * TOKENS + t, first);
    }
    for (int64_t r = 0; r < job->num_rows; r += size)
        for (int64_t t = 0; t < live; t += 64)
            tile_logits((int)least(size, job->num_rows - r), codes + t, TOKENS, job->count,
                        job->rows + (stream * job->num_rows + r) * job->count, job->count, sums + r * TOKENS + t,
                        TOKENS);
    for (int64_t r = 0; r < job->num_rows; r++) {
        float *out = job->out + (stream * job->num_rows + r) * job->out_stride + start;
        for (int64_t t = 0; t < live; t += 16)
            _mm512_mask_storeu_ps(out + t, first_floats(live - t), _mm512_load_ps(sums + r * TOKENS + t));
    }
}

static void work(void *argument) {
    Job *job = argument;
    const int64_t tiles = (job->tokens + TOKENS - 1) / TOKENS;
    uint8_t *codes = aligned_alloc(64, (size_t)(job->count * TOKENS));
    float *sums = aligned_alloc(64, (size_t)(job->num_rows * TOKENS) * sizeof(float));
    if (!codes || !sums) job->failed = 1;
    for (int64_t i; !job->failed && (i = job->next++) < job->streams * tiles;)
        item(job, i / tiles, i % tiles * TOKENS, codes, sums);
    free(codes), free(sums);
}

// out[s, r, t] = offset[s, r] + sum over k of rows[s, r, k] * coordinate(s, k, t)
int coordinate_logits(const uint8_t *codes, const int64_t *parts, int64_t num_parts, int64_t streams, int64_t tokens,
                      const float *rows, const float *offset, int64_t num_rows, float *out, int64_t out_stride,
                      int threads) {
    Job job = {.codes = codes, .rows = rows, .offset = offset, .out = out, .parts = parts, .num_parts = num_parts};
    job.streams = streams, job.tokens = tokens, job.num_rows = num_rows, job.out_stride = out_stride;
    for (int64_t part = 0; part < num_parts; part++) {
        job.count += parts[2 * part];
        job.bytes += parts[2 * part] * parts[2 * part + 1] / 8;
    }
    in_threads(work, &job, threads);
    return job.failed;
}
