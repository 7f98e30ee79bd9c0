"""The functions of ``torch`` at O1."""

import torch

from ampfuse.compat.apex.amp.lists.names import names

MODULE = torch
FP16_FUNCS = names("torch", "FP16_FUNCS")
FP32_FUNCS = names("torch", "FP32_FUNCS")
CASTS = names("torch", "CASTS")
SEQUENCE_CASTS = names("torch", "SEQUENCE_CASTS")
