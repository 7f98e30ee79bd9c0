"""The floating point types that ampfuse computes with."""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
# The types of parameters and gradients that the kernels read and write.
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)
