// Sums of runs of neighbours, for processors with AVX-512.
#include "tiles.h"

// out[r, s] = sum of values[r, starts[b, s] : starts[b, s + 1]]; the rows of batch row b are per_batch neighbours
void segment_sums(const float *values, int64_t batch, int64_t per_batch, int64_t stride, const int64_t *starts,
                  int64_t segments, float *out) {
    for (int64_t row = 0; row < batch * per_batch; row++) {
        const int64_t *start = starts + row / per_batch * (segments + 1);
        const float *from = values + row * stride;
        for (int64_t s = 0; s < segments; s++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = start[s]; i < start[s + 1]; i += 16)
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first_floats(start[s + 1] - i), from + i));
            out[row * segments + s] = _mm512_reduce_add_ps(sum);
        }
    }
}
