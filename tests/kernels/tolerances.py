"""The one table of tolerances of the kernel tests: |kernel - reference| <= atol + rtol * |reference|, by dtype.

Inputs are rounded to the dtype first and the reference computes in fp32 from them, so what is left is the kernel's own
rounding: its products, the softmax weights rounded to the dtype, and (on CPUs) logits rounded to the dtype.
"""

import torch

OUTPUT = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}
# log-sum-exps and scores are fp32 sums of products rounded to the dtype
LOGITS = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 1e-2},
}
# one stream on a CPU goes through integers, whose rows are exact to 2 ** -15 of their largest entry
PLANES = {dtype: {"atol": 2e-3, "rtol": 1e-3} for dtype in OUTPUT}
GRADIENT = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}}
